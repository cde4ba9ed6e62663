"""Attacks on the programs that judge: what the agent wrote is neither imported nor obeyed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import pairs, some
from tests.envs.harbor.attacks import COPIED, DOCKERFILE, EXITS, PAYS, TESTS, WRONG, episode
from tests.envs.harbor.task_folders import make_task, play

HONEST = {
    "solution.py": "from helper import value\n\n\ndef answer():\n    return value\n\n\n"
    "if __name__ == '__main__':\n    print(answer())\n",
    "helper/__init__.py": "from helper.inner import value\n",
    "helper/inner.py": "import json\nvalue = json.loads('42')\n",
}


@pytest.mark.parametrize("tests", some(TESTS, [*TESTS][::2]))
def test_an_honest_module_is_paid(tmp_path: Path, tests: str) -> None:
    reward, said = episode(tmp_path, tests, HONEST)
    assert reward == 1.0, said


NAMES = [
    ("pygments.py", "pytest_timeout.py", "colorama.py", "exceptiongroup.py", "tomli.py", "argcomplete.py"),
    ("org/__init__.py", "org/python/core.py", "java/__init__.py", "zope/__init__.py", "pexpect.py", "attr.py"),
    ("sitecustomize.py", "usercustomize.py", "encodings/__init__.py", "site.py", "os.py", "json.py"),
    ("pytest/__init__.py", "_pytest/__init__.py", "pluggy.py", "unittest/__init__.py", "difflib.py", "conftest.py"),
]
ALL_NAMES = tuple(name for names in NAMES for name in names if name != "conftest.py")
"""Whoever imports one of them is found out. A `conftest.py` would end pytest before."""


@pytest.mark.parametrize("tests", some(TESTS, [*TESTS][1::2]))
@pytest.mark.parametrize("names", some([ALL_NAMES, *NAMES], [ALL_NAMES]))
def test_a_module_that_tools_would_import_is_not_paid(tmp_path: Path, tests: str, names: tuple[str, ...]) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": WRONG + "print(41)\n", **dict.fromkeys(names, EXITS)})
    assert reward == 0.0, said


JUDGE = Path(__file__).parents[3] / "envs" / "harbor" / "judge"


def test_an_installed_module_does_not_import_a_module_of_the_agent(tmp_path: Path) -> None:
    folders = judge, app, installed = [tmp_path / name for name in ("judge", "app", "installed")]
    for folder in folders:
        folder.mkdir()
    shutil.copy(JUDGE / "sitecustomize.py", judge)
    for name in ("places", "fixed", "python_path", "shipped"):
        (judge / name).write_text(str(app) if name == "places" else "")
    (app / "planted.py").write_text("print('the agent ran')")
    (installed / "tool.py").write_text(
        "try:\n    import planted\nexcept ImportError:\n    print('planted not found')\n"
    )
    path = f"{judge}:{installed}:{app}"
    command = [sys.executable, "-c", "import tool"]
    done = subprocess.run(command, cwd=app, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "planted not found\n"), done.stderr


IMPORTING = [name for name in TESTS if "run" not in name and "shell" not in name and "scr" not in name]
# By default, each meets one kind of tests, in this order: `sys.exit` meets the command, whose exit status it would be.
EXITING = [
    EXITS,
    "import os\ndef answer():\n    os._exit(0)\n",
    "import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(0.2), os._exit(0))).start()\n"
    "def answer():\n    import time\n    time.sleep(1)\n",
    "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos._exit(0)\n",
    "import sys\nsys.exit(0)\n",
    "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
]


@pytest.mark.parametrize(("tests", "code"), pairs(IMPORTING, EXITING))
def test_an_exit_before_the_tests_have_run_pays_nothing(tmp_path: Path, tests: str, code: str) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": code})
    assert reward == 0.0, said


ENDING = [
    "import pytest\ndef answer():\n    pytest.skip('no')\n",
    "import unittest\ndef answer():\n    raise unittest.SkipTest('no')\n",
    "import pytest\ndef answer():\n    pytest.xfail('no')\n",
    "import pytest\ndef answer():\n    pytest.exit('no', returncode=0)\n",
    "import pytest\npytest.skip('no', allow_module_level=True)\n",
    "import os, signal\ndef answer():\n    os.execv('/bin/true', ['true'])\n",
]


@pytest.mark.parametrize(("tests", "code"), pairs(["pytest imports", "copied tests"], ENDING))
def test_tests_that_the_agents_code_ends_or_skips_have_failed(tmp_path: Path, tests: str, code: str) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": code})
    assert reward == 0.0, said


ONCE = "answers = [42]\n\n\ndef answer():\n    return answers.pop() if answers else 41\n"
"""Right for the test that calls it first, whichever that is: settings that skip the other one would be paid."""


# Only tests that lie in the agent's folder would obey most of these settings.
@pytest.mark.parametrize("tests", some(["pytest imports", "copied tests"], ["copied tests"]))
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "conftest.py",
            "def pytest_runtest_call(item):\n    item.session.shouldstop = 'no'\n    item.obj = print\n",
        ),
        ("tests/conftest.py", "def pytest_collection_modifyitems(items):\n    del items[:1]\n"),
        ("pytest.ini", "[pytest]\naddopts = --collect-only\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--deselect tests/test_it.py::test_more'\n"),
        ("tests/pytest.ini", "[pytest]\naddopts = -p evil\n"),
        ("setup.cfg", "[tool:pytest]\npython_functions = *_it\n"),
        ("x-1.dist-info/entry_points.txt", "[pytest11]\nx = evil\n"),
    ],
)
def test_settings_of_pytest_that_the_agent_wrote_pay_nothing(tmp_path: Path, tests: str, name: str, text: str) -> None:
    files = {name: text, "evil.py": EXITS, "solution.py": ONCE}
    files |= {"x-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: x\nVersion: 1\n"} if "dist-info" in name else {}
    reward, said = episode(tmp_path, tests, files)
    assert reward == 0.0, said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "pytest.ini",
            "[pytest]\npython_functions = check_*\nfilterwarnings =\n  error\n  ignore:The configuration option\n",
        ),
        ("pytest.toml", "[pytest]\npython_functions = ['check_*']\n"),
    ],
)
def test_settings_that_the_task_brings_are_obeyed(tmp_path: Path, name: str, text: str) -> None:
    files = {
        "environment/app/conftest.py": "import pytest\n\n@pytest.fixture\ndef right():\n    return 42\n",
        f"environment/app/{name}": text,
        "tests/test_it.py": "import solution\n\n\ndef check_it(right):\n    assert solution.answer() == right\n",
    }
    make_task(tmp_path, test=COPIED, files=files, dockerfile=DOCKERFILE + "COPY app /app\n")
    solve = "printf 'def answer():\\n    return 42\\n' > solution.py"
    env, info, _ = play(tmp_path, solve)
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict.output
    env, info, _ = play(tmp_path, f"{solve}; echo >> conftest.py")
    assert info["reward"] == 0.0


def test_settings_of_git_that_the_agent_wrote_run_nothing(tmp_path: Path) -> None:
    test = f"git -c safe.directory='*' status > /dev/null; git log > /dev/null; [ ! -e /tmp/ran ]{PAYS}"
    make_task(tmp_path, test=test)
    evil = "printf '#!/bin/sh\\ntouch /tmp/ran\\n' > e; chmod +x e; git init -q .; git add e; git -c user.name=a "
    evil += "-c user.email=b commit -qm c; git config core.fsmonitor /app/e; git config core.pager /app/e; "
    evil += "git config core.hooksPath /app; rm -f /tmp/ran"
    env, info, _ = play(tmp_path, evil)
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict.output
