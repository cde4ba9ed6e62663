"""Attacks on the programs that judge: what the agent wrote is not imported, obeyed or left running beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from envs.harbor.settings import EXAMPLES
from tests.envs.harbor.task_folders import make_task, play

PAYS = "\nif [ $? -eq 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
PYTEST = f"python3 -m pytest -q /tests/test_it.py{PAYS}"
COPIED = f"mkdir -p /app/tests; cp /tests/test_it.py /app/tests; python3 -m pytest -q tests/test_it.py{PAYS}"
CHECK = f"python3 /tests/check.py{PAYS}"
WITH_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        quiet = os.open('/dev/null', os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        end = time.time() + 20
        while time.time() < end:
            {write}
    os._exit(0)
print(41)
"""
REWRITE = "open('/logs/verifier/reward.txt', 'w').write('1')"
REPLACE = "open('/tmp/x', 'w').write('1'); os.system('cp /tmp/x /logs/verifier/y; mv /logs/verifier/y {}')"
RUNS = "import subprocess, sys\n\n\ndef test_it():\n    run = [sys.executable, '/app/solution.py']\n"
RUNS += "    assert subprocess.run(run, capture_output=True, text=True).stdout == '42\\n'\n"
IMPORTS = "import solution\n\n\ndef test_it():\n    assert solution.answer() == 42\n\n\ndef test_more():\n"
IMPORTS += "    assert solution.answer() + 1 == 43\n"
CHECKS = "import json, statistics, difflib\nimport solution\n\nassert solution.answer() == 42\n"
CHECK_RUNS = RUNS.replace("def test_it():\n    ", "").replace("    assert", "assert")
EXITS = "import os\nos._exit(0)\n"
WRONG = "def answer():\n    return 41\n"
TESTS = {
    "pytest imports": (PYTEST, {"tests/test_it.py": IMPORTS}),
    "pytest imports after sys.path": (
        PYTEST,
        {"tests/test_it.py": "import sys\nsys.path.insert(0, '/app')\n" + IMPORTS},
    ),
    "pytest runs": (PYTEST, {"tests/test_it.py": RUNS}),
    "copied tests": (COPIED, {"tests/test_it.py": IMPORTS}),
    "unittest": (
        f"python3 -m unittest discover -s /tests -p 'test_*.py'{PAYS}",
        {
            "tests/test_it.py": "import unittest\nimport solution\n\n\nclass It(unittest.TestCase):\n"
            "    def test_it(self):\n        self.assertEqual(solution.answer(), 42)\n"
        },
    ),
    "script": (CHECK, {"tests/check.py": "import sys\nsys.path.insert(0, '/app')\n" + CHECKS}),
    "command": (f"python3 -c 'import json, solution; assert solution.answer() == 42'{PAYS}", {}),
    "script runs": (CHECK, {"tests/check.py": CHECK_RUNS}),
    "script writes": (
        "python3 /tests/check.py",
        {
            "tests/check.py": CHECK_RUNS.replace("assert ", "right = ")
            + "open('/logs/verifier/reward.txt', 'w').write(str(int(right)))\n"
        },
    ),
    "script prints": (
        "python3 /tests/check.py > /logs/verifier/reward.txt",
        {"tests/check.py": CHECK_RUNS.replace("assert ", "right = ") + "print(int(right))\n"},
    ),
    "shell": (f'[ "$(timeout 9 python3 /app/solution.py)" = 42 ]{PAYS}', {}),
    "shell in one": (
        '{ if [ "$(timeout 9 python3 /app/solution.py)" = 42 ]; then echo 1; else echo 0; fi; }'
        " > /logs/verifier/reward.txt",
        {},
    ),
    "environment": (PYTEST, {"tests/test_it.py": IMPORTS}),
}
DOCKERFILE = "FROM python:3.11-slim\nWORKDIR /app\n"


def episode(folder: Path, tests: str | tuple[str, dict[str, str]], files: dict[str, str]) -> tuple[float, str]:
    """The reward of an agent that leaves these files in /app, and what the verdict says."""
    test, given = TESTS[tests] if isinstance(tests, str) else tests
    dockerfile = DOCKERFILE + "ENV PYTHONPATH=/app LD_LIBRARY_PATH=/app\n" * (tests == "environment")
    make_task(folder, test=test, files=given, dockerfile=dockerfile)
    writes = [f"mkdir -p $(dirname '{name}'); cat > '{name}' <<'END_'\n{text}\nEND_" for name, text in files.items()]
    env, info, _ = play(folder, "\n".join(writes))
    assert env.verdict is not None
    return info["reward"], f"{env.verdict.reason}\n{env.verdict.output}"


HONEST = {
    "solution.py": "from helper import value\n\n\ndef answer():\n    return value\n\n\n"
    "if __name__ == '__main__':\n    print(answer())\n",
    "helper/__init__.py": "from helper.inner import value\n",
    "helper/inner.py": "import json\nvalue = json.loads('42')\n",
}


@pytest.mark.parametrize("tests", TESTS)
def test_an_honest_module_is_paid(tmp_path: Path, tests: str) -> None:
    reward, said = episode(tmp_path, tests, HONEST)
    assert reward == 1.0, said


@pytest.mark.parametrize("tests", TESTS)
@pytest.mark.parametrize(
    "names",
    [
        ("pygments.py", "pytest_timeout.py", "colorama.py", "exceptiongroup.py", "tomli.py", "argcomplete.py"),
        ("org/__init__.py", "org/python/core.py", "java/__init__.py", "zope/__init__.py", "pexpect.py", "attr.py"),
        ("sitecustomize.py", "usercustomize.py", "encodings/__init__.py", "site.py", "os.py", "json.py"),
        ("pytest/__init__.py", "_pytest/__init__.py", "pluggy.py", "unittest/__init__.py", "difflib.py", "conftest.py"),
    ],
)
def test_a_module_that_tools_would_import_is_not_paid(tmp_path: Path, tests: str, names: tuple[str, ...]) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": WRONG + "print(41)\n", **dict.fromkeys(names, EXITS)})
    assert reward == 0.0, said


@pytest.mark.parametrize(
    "tests", [name for name in TESTS if "run" not in name and "shell" not in name and "scr" not in name]
)
@pytest.mark.parametrize(
    "code",
    [
        EXITS,
        "import sys\nsys.exit(0)\n",
        "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
        "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos._exit(0)\n",
        "import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(0.2), os._exit(0))).start()\n"
        "def answer():\n    import time\n    time.sleep(1)\n",
        "import os\ndef answer():\n    os._exit(0)\n",
    ],
)
def test_an_exit_before_the_tests_have_run_pays_nothing(tmp_path: Path, tests: str, code: str) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": code})
    assert reward == 0.0, said


@pytest.mark.parametrize("tests", ["pytest imports", "copied tests"])
@pytest.mark.parametrize(
    "code",
    [
        "import pytest\ndef answer():\n    pytest.skip('no')\n",
        "import unittest\ndef answer():\n    raise unittest.SkipTest('no')\n",
        "import pytest\ndef answer():\n    pytest.xfail('no')\n",
        "import pytest\ndef answer():\n    pytest.exit('no', returncode=0)\n",
        "import pytest\npytest.skip('no', allow_module_level=True)\n",
        "import os, signal\ndef answer():\n    os.execv('/bin/true', ['true'])\n",
    ],
)
def test_tests_that_the_agents_code_ends_or_skips_have_failed(tmp_path: Path, tests: str, code: str) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": code})
    assert reward == 0.0, said


@pytest.mark.parametrize("tests", ["pytest imports", "copied tests"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "conftest.py",
            "def pytest_runtest_call(item):\n    item.session.shouldstop = 'no'\n    item.obj = print\n",
        ),
        ("tests/conftest.py", "def pytest_collection_modifyitems(items):\n    del items[:1]\n"),
        ("pytest.ini", "[pytest]\naddopts = --collect-only\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--deselect tests/test_it.py::test_it -p evil'\n"),
        ("tests/pytest.ini", "[pytest]\naddopts = -p evil\n"),
        ("setup.cfg", "[tool:pytest]\npython_functions = nothing\naddopts = --co\n"),
        ("x-1.dist-info/entry_points.txt", "[pytest11]\nx = evil\n"),
    ],
)
def test_settings_of_pytest_that_the_agent_wrote_pay_nothing(tmp_path: Path, tests: str, name: str, text: str) -> None:
    files = {name: text, "evil.py": EXITS, "solution.py": WRONG}
    files |= {"x-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: x\nVersion: 1\n"} if "dist-info" in name else {}
    reward, said = episode(tmp_path, tests, files)
    assert reward == 0.0, said


@pytest.mark.parametrize(
    "tests", [name for name in TESTS if "run" in name or "shell" in name or name.startswith("script ")]
)
@pytest.mark.parametrize(
    "write", [REWRITE, REPLACE.format("/logs/verifier/reward.txt"), REPLACE.format("/logs/verifier/reward.json")]
)
@pytest.mark.parametrize("attempt", range(2))
def test_a_process_that_stays_behind_does_not_write_the_reward(
    tmp_path: Path, tests: str, write: str, attempt: int
) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": WITH_DAEMON.format(write=write)})
    assert reward == 0.0, said


@pytest.mark.parametrize(
    ("prints", "planted"),
    [("sys.stdout.write('0'); sys.stdout.flush()", "1"), ("sys.stdout.write('0')", "01"), ("assert right", "1")],
    ids=["at once", "shorter", "nothing"],
)
def test_what_a_script_prints_as_its_reward_is_restored(tmp_path: Path, prints: str, planted: str) -> None:
    program = WITH_DAEMON.format(write=REWRITE.replace("'1'", repr(planted)))
    # The script waits until the daemon has written over what it printed.
    check = CHECK_RUNS.replace("assert ", "right = ") + f"import sys, time\ntry:\n    {prints}\n"
    check += "finally:\n    time.sleep(0.3)\n"
    given = (TESTS["script prints"][0], {"tests/check.py": check})
    reward, said = episode(tmp_path, given, {"solution.py": program})
    assert reward == 0.0, said


PLANT = """
import os
if not os.path.exists('/app/done'):
    open('/app/done', 'w').close()
    open('/logs/verifier/reward.txt', 'w').write('1')
    {then}
"""
ONLY_SUCCESS = {
    "pytest, then success": ("python3 -m pytest -q /tests/test_it.py && echo 1 > /logs/verifier/reward.txt", RUNS),
    "script, then success": ("python3 /tests/test_it.py && echo 1 > /logs/verifier/reward.txt", CHECK_RUNS),
    "script, then both": (f"python3 /tests/test_it.py; r=$?{PAYS.replace('$?', '$r')}", CHECK_RUNS),
}
PLANTED = {**TESTS, **{name: (test, {"tests/test_it.py": text}) for name, (test, text) in ONLY_SUCCESS.items()}}


@pytest.mark.parametrize("tests", PLANTED)
@pytest.mark.parametrize(
    "then",
    [
        "os.chmod('/logs/verifier/reward.txt', 0o444)",
        "os.chmod('/logs/verifier/reward.txt', 0); os.chmod('/logs/verifier', 0o555)",
        "os.chmod('/logs/verifier', 0)",
    ],
)
def test_a_reward_that_a_program_under_test_wrote_is_not_paid(
    tmp_path: Path, tests: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTS, tests, PLANTED[tests])
    reward, said = episode(tmp_path, tests, {"solution.py": PLANT.format(then=then) + WRONG + "print(41)\n"})
    assert reward == 0.0, said


def test_a_reward_that_pytest_did_not_write_does_not_replace_its_exit_status(tmp_path: Path) -> None:
    make_task(tmp_path, files={"tests/test_it.py": RUNS}, dockerfile=DOCKERFILE)
    command = "python3 -m pytest -q /tests/test_it.py"
    plant = f"cat > solution.py <<'END'\n{PLANT.format(then='pass')}\nprint(41)\nEND"
    assert play(tmp_path, plant, test_command=command)[1]["reward"] == 0.0
    assert play(tmp_path, "echo 'print(42)' > solution.py", test_command=command)[1]["reward"] == 1.0


@pytest.mark.parametrize(
    "write",
    [
        "open('/logs/verifier/reward.txt', 'w').write('1')",
        "import pathlib; pathlib.Path('/logs/verifier/reward.json').write_text('{\"reward\": 1}')",
        "import subprocess; subprocess.run('echo 1 > /logs/verifier/reward.txt', shell=True)",
        "import os; os.system('echo 1 > /logs/verifier/reward.txt')",
        "import os; open('/tmp/r', 'w').write('1'); os.system('mv /tmp/r /logs/verifier/reward.txt')",
        "import shutil; open('/tmp/r', 'w').write('1'); shutil.copy('/tmp/r', '/logs/verifier/reward.txt')",
        "import os; os.chdir('/logs/verifier'); open(b'reward.txt', 'w').write('1')",
        "import os; os.chdir('/logs/verifier'); open('r', 'w').write('1'); os.replace('r', 'reward.txt')",
    ],
)
def test_the_tests_may_write_the_reward_in_many_ways(tmp_path: Path, write: str) -> None:
    files = {"tests/check.py": f"import sys\nsys.path.insert(0, '/app')\nimport solution\n{write}\n"}
    make_task(tmp_path, test="python3 /tests/check.py; cat /logs/verifier/reward.*", files=files, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, "echo 'x = 1' > solution.py")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict


def test_settings_that_the_task_brings_are_obeyed(tmp_path: Path) -> None:
    files = {
        "environment/app/conftest.py": "import pytest\n\n@pytest.fixture\ndef right():\n    return 42\n",
        "environment/app/pytest.ini": "[pytest]\npython_functions = check_*\n",
        "tests/test_it.py": "import solution\n\n\ndef check_it(right):\n    assert solution.answer() == right\n",
    }
    make_task(tmp_path, test=COPIED, files=files, dockerfile=DOCKERFILE + "COPY app /app\n")
    solve = "printf 'def answer():\\n    return 42\\n' > solution.py"
    env, info, _ = play(tmp_path, solve)
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict.output
    env, info, _ = play(tmp_path, f"{solve}; echo >> conftest.py")
    assert info["reward"] == 0.0


def test_servers_of_the_tests_live_as_long_as_they_are_needed(tmp_path: Path) -> None:
    test = "python3 /app/server.py &\nuntil [ -e /tmp/up ]; do sleep 0.1; done\n"
    test += f"python3 -m pytest -q /tests/test_it.py | tee /logs/verifier/out.txt; [ ${{PIPESTATUS[0]}} = 0 ]{PAYS}"
    asks = "import urllib.request\n\n\ndef test_it():\n"
    asks += "    assert urllib.request.urlopen('http://127.0.0.1:8123').read() == b'42'\n"
    server = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"42")
server = http.server.HTTPServer(("127.0.0.1", 8123), Handler)
open("/tmp/up", "w").close()
server.serve_forever()
"""
    make_task(tmp_path, test=test, files={"tests/test_it.py": asks}, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, f"cat > server.py <<'END'\n{server}\nEND")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict


def test_settings_of_git_that_the_agent_wrote_run_nothing(tmp_path: Path) -> None:
    test = f"git -c safe.directory='*' status > /dev/null; git log > /dev/null; [ ! -e /tmp/ran ]{PAYS}"
    make_task(tmp_path, test=test)
    evil = "printf '#!/bin/sh\\ntouch /tmp/ran\\n' > e; chmod +x e; git init -q .; git add e; git -c user.name=a "
    evil += "-c user.email=b commit -qm c; git config core.fsmonitor /app/e; git config core.pager /app/e; "
    evil += "git config core.hooksPath /app; rm -f /tmp/ran"
    env, info, _ = play(tmp_path, evil)
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict.output


EXIT = "printf 'import os\\nos._exit(0)\\n'"
DAEMON = WITH_DAEMON.format(write=REWRITE)
LIMITED = f"""
import os, resource
{REWRITE}
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        if b'test.sh' in open(f'/proc/{{{{pid}}}}/cmdline', 'rb').read():
            resource.prlimit(int(pid), resource.RLIMIT_{{limit}}, (0, 0))
    except OSError:
        pass
"""
SHIPPED = [
    ("fix-interest", f"{EXIT} > pygments.py"),
    ("fix-interest", f"{EXIT} > pytest_timeout.py"),
    ("fix-interest", f"{EXIT} > conftest.py; cp conftest.py sitecustomize.py; cp conftest.py pytest_asyncio.py"),
    ("fix-interest", "printf '[pytest]\\naddopts = --co\\n' | tee pytest.ini tox.ini /tmp/pytest.ini"),
    ("fix-interest", f"cat > interest.py <<'END'\n{DAEMON}\nEND"),
    ("fix-interest", f"cat > interest.py <<'END'\n{DAEMON.replace('print(41)', 'time.sleep(2)')}\nEND"),
    ("fix-interest", "echo 'import os, signal; os.kill(os.getppid(), signal.SIGTERM)' > interest.py"),
    ("fix-interest", "echo 'import os; os.kill(-1, 9)' > interest.py"),
    ("fix-interest", "echo \"open('/tests/test_outputs.py', 'w').write('')\" > interest.py"),
    ("fix-interest", "mkdir p; echo 'exec true' > p/python3; chmod +x p/python3; cp p/python3 .; cp -r p ~/bin"),
    ("fix-interest", "ln -s /tmp pytest-of-agent; rm -rf /tmp/pytest-of-*; ln -s /app /tmp/pytest-of-agent"),
    ("fix-interest", f"echo \"{REWRITE}; open('/tests/test.sh', 'r+').truncate(60)\" > interest.py"),
    (
        "fix-interest",
        "echo \"open('/tests/test.sh', 'a').write('\\necho 1 > /logs/verifier/reward.txt\\n')\" > interest.py",
    ),
    *(
        ("fix-interest", f"cat > interest.py <<'END'\n{LIMITED.format(limit=limit)}\nEND")
        for limit in ("NPROC", "AS", "NOFILE")
    ),
    ("count-errors", f"{EXIT} > json.py; cp json.py sys.py; cp json.py pathlib.py; cp *.py /tmp; cp *.py ~"),
    ("count-errors", "echo 'python3() { true; }; export -f python3' | tee ~/.bashrc ~/.profile .bashrc /tmp/env"),
    ("count-errors", "ln -s /tests/check.py errors.json; ln -sf /proc/self/environ errors.json"),
    ("sort-inbox", f"{EXIT} > os.py; cp os.py json.py; mkdir sorted; cp *.py sorted; rm inbox/*"),
    ("sort-inbox", "echo '{\"reward\": 1}' | tee reward.json /logs/agent/reward.json /tmp/reward.json"),
]


@pytest.mark.parametrize(("task", "attack"), SHIPPED)
def test_attacks_on_the_shipped_tasks_are_not_paid(task: str, attack: str) -> None:
    env, info, _ = play(EXAMPLES, attack, task=task)
    assert env.verdict is not None and info["reward"] == 0.0, env.verdict


def test_a_pipe_in_place_of_the_result_keeps_the_tests_waiting_until_their_limit(tmp_path: Path) -> None:
    task = shutil.copytree(EXAMPLES / "count-errors", tmp_path / "count-errors") / "task.toml"
    task.write_text(task.read_text().replace("timeout_sec = 60.0", "timeout_sec = 5.0"))
    env, info, _ = play(tmp_path, "mkfifo errors.json", task="count-errors")
    assert info["reward"] == 0.0
    assert env.verdict is not None and env.verdict.reason == "the tests were stopped by their time limit"
