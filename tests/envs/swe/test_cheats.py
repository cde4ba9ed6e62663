"""Ways to be paid without solving the task. Each is tried for real, and each must earn nothing."""

from pathlib import Path

import pytest

from envs.swe.verdict.trees import apply_changes, collect_changes, is_protected
from tests.cases import some
from tests.envs.swe.tiny_repository import DISCOUNT, HIDDEN, call, tiny_env, tiny_instance

pytestmark = pytest.mark.usefixtures("few_runs")

FAKE_REPORT = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
PASSING = "def test_total():\n    pass\n"

FILES = {
    "conftest in the root": {"conftest.py": FAKE_REPORT},
    "conftest beside the tests": {"tests/conftest.py": FAKE_REPORT},
    "edited tests": {
        "tests/test_prices.py": PASSING,
        "tests/test_hidden.py": HIDDEN.replace("20", "15"),
    },
    "plugin through pytest.ini": {
        "pytest.ini": "[pytest]\naddopts = -p cheat\n",
        "cheat.py": FAKE_REPORT,
    },
    "plugin through pyproject.toml": {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n",
        "cheat.py": FAKE_REPORT,
    },
    "plugin through tests/pytest.ini": {
        "tests/pytest.ini": "[pytest]\naddopts = -p cheat\n",
        "cheat.py": FAKE_REPORT,
    },
    "sitecustomize": {"sitecustomize.py": "import os\nos._exit(0)\n"},
    "a pytest of one's own": {
        "pytest.py": "def main(*a, **k): return 0\n",
        "_pytest/__init__.py": "",
        "pluggy.py": "",
        "json.py": "",
    },
    "a conftest folder": {"conftest.py/x": "", "tests/test_prices.py/x": ""},
}

PATCH_RUNNER = """
from _pytest.runner import CallInfo
real = CallInfo.from_call.__func__
def from_call(cls, func, when, reraise=None):
    if when != "call":
        return real(cls, func, when, reraise)
    return cls(None, None, 0, 0, 0, when, _ispytest=True)
CallInfo.from_call = classmethod(from_call)
"""
PATCH_FUNCTION = "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
SWAP_CODE = """
import _pytest.python
def nothing(self): pass
_pytest.python.Function.runtest.__code__ = nothing.__code__
"""
FOREIGN_PLUGIN = f"""
import gc, types, sys
from _pytest.config import PytestPluginManager
plugin = types.ModuleType("harmless")
exec({FAKE_REPORT!r}, plugin.__dict__)
[m for m in gc.get_objects() if isinstance(m, PytestPluginManager)][0].register(plugin)
"""
EMPTY_BODIES = """
import ast, glob, sys, types
for path in glob.glob("/testbed/tests/test_*.py"):
    tree = ast.parse(open(path).read())
    tree.body = [n for n in tree.body if not (isinstance(n, (ast.Import, ast.ImportFrom)) and "shop" in ast.unparse(n))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
    name = "tests." + path.split("/")[-1][:-3]
    module = types.ModuleType(name)
    module.__file__, module.__package__ = path, "tests"
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), module.__dict__)
    sys.modules[name] = module
"""
FORGED_LINES = """
import os, stat
for fd in range(3, 4096):
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.write(fd, b'00 [0, "collected", {"ids": [], "xfail": []}]\\n')
    except OSError:
        pass
"""
FORGED_CHAIN = """
import gc, os
judge = [o for o in gc.get_objects() if type(o).__name__ == "Judge"][0]
tell = [o for o in gc.get_objects() if getattr(o, "__name__", "") == "tell"][0]
tell(code=0, collected=[], uncollectable=[], outcomes={test: "passed" for test in judge.wanted})
os._exit(0)
"""

CODE = {
    "os._exit at import": "import os\nos._exit(0)\n",
    "sys.exit at import": "import sys\nsys.exit(0)\n",
    "os._exit in a test": "def total(prices):\n    import os\n    os._exit(0)\n",
    "sys.exit in a test": "def total(prices):\n    raise SystemExit(0)\n",
    "skipping": "def total(prices):\n    import pytest\n    pytest.skip('no')\n",
    "expecting to fail": "def total(prices):\n    import pytest\n    pytest.xfail('no')\n",
    "pytest.exit": "def total(prices):\n    import pytest\n    pytest.exit('done', returncode=0)\n",
    "patched runner": PATCH_RUNNER,
    "patched test function": PATCH_FUNCTION,
    "swapped code": SWAP_CODE,
    "foreign plugin": FOREIGN_PLUGIN,
    "test modules replaced by empty ones": EMPTY_BODIES,
    "forged lines": FORGED_LINES,
    "forged report by the judge's own function": FORGED_CHAIN,
    "killing the judge": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "closing the pipe": "import os\nos.closerange(3, 4096)\n",
    "rewriting the tests": "for f in ('prices', 'hidden'):\n    open(f'/testbed/tests/test_{f}.py', 'w')\n",
}


EVERY_FILE = "all settings and plugins at once"
FILES[EVERY_FILE] = {
    path: text
    for name, files in FILES.items()
    if name not in ("a pytest of one's own", "a conftest folder")
    for path, text in files.items()
}

NEVER_FOOLED = {
    "edited tests",
    "a pytest of one's own",
    "a conftest folder",
    "sys.exit at import",
    "sys.exit in a test",
    "forged lines",
    "forged report by the judge's own function",
    "killing the judge",
    "closing the pipe",
    "rewriting the tests",
}
"""Tricks that gain nothing against plain pytest either, or are meant for our judge alone."""


def _unpaid(env) -> str:
    _, done, info = env.step("ACTION: submit")
    assert done and info["terminated"] and not info["truncated"]
    assert info["reward"] == 0.0 and info["progression"] < 1.0
    assert not env.verdict.solved
    return env.verdict.reason


def _fools_plain_pytest(env) -> bool:
    shown = env.step(call("run", command="python -m pytest -q -p no:cacheprovider tests"))[0][
        "obs_str"
    ]
    return "(exit status 0)" in shown


def _append(env, code: str) -> None:
    env.step(call("run", command=f"cat >> shop/prices.py <<'END'\n{code}\nEND"))


@pytest.mark.parametrize(
    "name", some(FILES, [EVERY_FILE, "a pytest of one's own", "a conftest folder"])
)
def test_files_that_configure_or_replace_the_tests_do_not_count(name: str) -> None:
    env = tiny_env()
    for path, text in FILES[name].items():
        folder = Path(path).parent
        env.step(call("run", command=f"mkdir -p {folder} || (rm {folder}; mkdir {folder})"))
        assert "error" not in env.step(call("create", path=path, text=text))[0]["obs_str"]
    assert name in NEVER_FOOLED or _fools_plain_pytest(env)
    assert "required tests are not green" in _unpaid(env)


QUICK = (
    "os._exit at import",
    "patched runner",
    "forged lines",
    "forged report by the judge's own function",
    "rewriting the tests",
)


@pytest.mark.parametrize("name", some(CODE, QUICK))
def test_code_that_tampers_with_its_judge_is_not_paid(name: str) -> None:
    env = tiny_env()
    _append(env, CODE[name])
    assert name in NEVER_FOOLED or _fools_plain_pytest(env)
    reason = _unpaid(env)
    assert REASONS.get(name, "") in reason


REASONS = {
    "patched runner": "not at hand",
    "patched test function": "not at hand",
    "swapped code": "not at hand",
    "foreign plugin": "not at hand",
    "forged lines": "tampered with",
    # These fool the tests, and know nothing to report to the probes.
    "test modules replaced by empty ones": "not at hand",
}


def test_an_endless_loop_and_a_memory_hog_end_in_a_verdict() -> None:
    tiny_env().close()  # the probes are validated within the usual limit
    env = tiny_env(test_timeout_s=2.0)
    _append(env, "while True:\n    pass\n")
    assert "time limit" in _unpaid(env)
    env = tiny_env(memory_mb=512)
    _append(env, "hoard = bytearray(1 << 40)\n")
    assert "required tests are not green" in _unpaid(env)


def test_stale_bytecode_of_a_test_is_not_used() -> None:
    env = tiny_env()
    env.step(
        call(
            "run",
            command="PYTHONDONTWRITEBYTECODE= python -m pytest -q; cat tests/__pycache__/*.pyc | wc -c",
        )
    )
    changes = collect_changes(env._workspace.tree, env._pristine)
    assert not [path for path in changes if "__pycache__" in path]
    assert "required tests are not green" in _unpaid(env)


def test_git_in_the_tree_is_never_run_by_us(tmp_path: Path) -> None:
    env = tiny_env()
    mark = tmp_path / "hook-ran"
    mark.parent.chmod(0o777)
    hook = f"#!/bin/sh\\ntouch {mark}\\n"
    script = f"""
    mkdir -p .git/hooks && cd .git/hooks
    for name in post-checkout pre-commit post-index-change applypatch-msg; do
        printf '{hook}' > $name; chmod +x $name
    done
    git config core.fsmonitor 'touch {mark}'; git config core.pager 'touch {mark}'
    """
    assert "(exit status 0)" in env.step(call("run", command=script))[0]["obs_str"]
    _unpaid(env)
    assert not mark.exists()


def test_links_pipes_and_devices_do_not_reach_the_judged_tree() -> None:
    env = tiny_env()
    env.step(
        call(
            "run",
            command="rm shop/prices.py README.md; ln -s /etc/hostname README.md; ln -s /etc/passwd shop/prices.py; "
            "mkfifo shop/pipe.py; ln -s /etc loose; mv run.sh kept.sh; mkdir shop/deep; ln -s .. "
            "shop/deep/up",
        )
    )
    changes = collect_changes(env._workspace.tree, env._pristine)
    assert {path: change.content for path, change in changes.items()} == {
        "README.md": None,
        "shop/prices.py": None,
        "run.sh": None,
        "kept.sh": b"echo shop\n",
    }
    assert _unpaid(env)


def test_changes_are_written_beside_links_never_through_them(tmp_path: Path) -> None:
    outside, tree, source, empty = (
        tmp_path / name for name in ("outside", "tree", "source", "empty")
    )
    for folder in (outside, tree, source / "link", empty):
        folder.mkdir(parents=True)
    (outside / "file").write_text("safe")
    (tree / "link").symlink_to(outside)
    (source / "link" / "file").write_text("new")
    apply_changes(tree, collect_changes(source, empty))
    assert (outside / "file").read_text() == "safe" and (
        tree / "link" / "file"
    ).read_text() == "new"


def test_a_flood_of_files_ends_in_a_verdict() -> None:
    env = tiny_env()
    env.step(
        call("run", command="mkdir many; cd many; for i in $(seq 2500); do echo $i > f$i; done")
    )
    assert "were changed" in _unpaid(env)


def test_tests_and_their_configuration_are_protected_and_sources_are_not() -> None:
    instance = tiny_instance()
    for path in (
        "conftest.py",
        "shop/conftest.py",
        "setup.cfg",
        "tests/helpers.py",
        "tests/test_hidden.py",
        "shop/test_extra.py",
        "tests/test_prices.py/x",
    ):
        assert is_protected(path, instance), path
    for path in ("shop/prices.py", "shop/new.py", "setup.py", "shop/latest.py", "contest.py"):
        assert not is_protected(path, instance), path


def test_dense_reward_pays_the_share_that_is_green_and_nothing_for_idleness() -> None:
    env = tiny_env(dense_reward=True)
    assert env.step("submit")[2]["reward"] == 0.0
    env = tiny_env(dense_reward=True)
    half = "def total(prices):\n    return prices[0] + prices[1] if len(prices) == 2 else 0\n"
    env.step(call("create", path="shop/prices.py", text=half + DISCOUNT))
    info = env.step("submit")[2]
    assert info["reward"] == info["progression"] == 0.5
    assert info["metrics"]["fail_to_pass"] == 0.5 and info["metrics"]["pass_to_pass"] == 1.0
