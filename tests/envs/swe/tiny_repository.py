"""A repository of a dozen lines with one bug, as an SWE task that is judged in under a second.

It is also an environment module (`build_env`), so that the shared contract can play it.
"""

import atexit
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.errors import EnvironmentFault, MissingDependencyError
from envs.loading import build_env_from
from envs.swe import SWEEnv, check_machine
from envs.swe.small_tasks import unified_diff
from envs.swe.verdict.evaluate import Verdict, run_tests
from envs.swe.verdict.instances import Instance, load_instances
from envs.swe.verdict.reports import NotCounted
from envs.swe.verdict.trees import build_tree, commit_all

TASK = "shop_total"
WRONG = "def total(prices):\n    return sum(prices[1:])\n"
RIGHT = "def total(prices):\n    return sum(prices)\n"
DISCOUNT = "\n\ndef discount(price, percent):\n    return price - price * percent / 100\n"

FILES = {
    "shop/__init__.py": "from shop.prices import discount, total\n",
    "shop/prices.py": WRONG + DISCOUNT,
    "tests/test_prices.py": """\
import pytest

from shop import discount, total


def test_total():
    assert total([3, 4]) == 7


def test_total_of_nothing():
    assert total([]) == 0


@pytest.mark.parametrize("percent, left", [(0, 50), (10, 45)])
def test_discount(percent, left):
    assert discount(50, percent) == left


@pytest.mark.xfail(reason="not decided yet")
def test_negative_discount():
    with pytest.raises(ValueError):
        discount(50, -10)
""",
    "tests/test_more_prices.py": """\
import unittest

import shop


class Shared:
    def test_everything_off(self):
        self.assertEqual(shop.discount(50, 100), 0)


class DiscountTest(Shared, unittest.TestCase):
    pass
""",
    "tests/__init__.py": "",
    "README.md": "A shop.\n",
    "run.sh": "echo shop\n",
}
HIDDEN = "from shop import total\n\n\ndef test_generators():\n    assert total([5, 6, 9]) == 20\n"

ROW = {
    "instance_id": TASK,
    "repo": "tiny/shop",
    "problem_statement": "`total([3, 4])` is 4. The first price is left out; it should be 7.",
    "patch": unified_diff("shop/prices.py", FILES["shop/prices.py"], RIGHT + DISCOUNT),
    "test_patch": unified_diff("tests/test_hidden.py", None, HIDDEN),
    "FAIL_TO_PASS": ["tests/test_prices.py::test_total", "tests/test_hidden.py::test_generators"],
    "PASS_TO_PASS": [
        "tests/test_prices.py::test_total_of_nothing",
        "tests/test_prices.py::test_discount[0-50]",
        "tests/test_prices.py::test_discount[10-45]",
        "tests/test_prices.py::test_negative_discount",
        "tests/test_more_prices.py::DiscountTest::test_everything_off",
    ],
    # Other arguments double the runs of a verdict; `test_probe_draws.py` tests them.
    "DRAW_ARGUMENTS": False,
}


def write_repository(name: str, files: dict[str, str], row: dict[str, Any]) -> dict[str, Any]:
    """Make a repository and a file with one instance of it; return the `env:` mapping that plays
    it."""
    folder = Path(tempfile.mkdtemp(prefix="slime-verlog-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    repository = folder / name
    for path, text in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    row = {**row, "base_commit": commit_all(repository)}
    (folder / "instances.jsonl").write_text(json.dumps(row) + "\n")
    return {
        "instances": str(folder / "instances.jsonl"),
        "repos": {f"tiny/{name}": str(repository)},
        "cache_dir": str(folder / "cache"),
        "test_timeout_s": 60.0,
    }


@functools.cache
def tiny_options() -> dict[str, Any]:
    """The `env:` mapping that plays the task; the repository is made once for the whole test
    run."""
    return write_repository("shop", FILES, ROW)


def played(options: Mapping[str, Any], files: Mapping[str, str], *commands: str) -> SWEEnv:
    """The environment of the only instance of `options` after the commands, with these files, and
    submitted."""
    needs_sandbox()
    (task,) = load_instances(options["instances"])
    env: Any = build_env_from("envs.swe", {"task": task, "seed": 0}, options)
    env.reset()
    for command in commands:
        env.step(call("run", command=command))
    for path, text in files.items():
        assert "written" in env.step(call("create", path=path, text=text))[0]["obs_str"]
    env.step("submit")
    return env


def judged(options: Mapping[str, Any], files: Mapping[str, str], *commands: str) -> Verdict:
    """The verdict on what `played` submits."""
    verdict = played(options, files, *commands).verdict
    assert verdict is not None
    return verdict


def tiny_instance() -> Instance:
    """The task as it is read from its file."""
    return load_instances(tiny_options()["instances"])[TASK]


def tiny_env(**options: Any) -> SWEEnv:
    """The environment, reset; `options` go over the usual ones. Skips where the sandbox cannot
    run."""
    needs_sandbox()
    env: Any = build_env_from("envs.swe", {"task": TASK, "seed": 0}, {**tiny_options(), **options})
    env.reset()
    return env


def ordinary_run(env: SWEEnv, files: Mapping[str, str]) -> frozenset[str]:
    """The required tests that are green as they are, on the unsolved tree with some `files` of the
    agent."""

    def build(target: Path) -> None:
        build_tree(target, env._pristine, env.instance.test_patch)
        for path, text in files.items():
            (target / path).write_text(text)

    try:
        return run_tests(build, env.instance.required, env.judge).green
    except NotCounted:
        return frozenset()


def needs_sandbox() -> None:
    """Skip the test where bubblewrap is missing or may not make namespaces; the sentence says what
    to do."""
    try:
        check_machine(Path(sys.executable))
    except (MissingDependencyError, EnvironmentFault) as error:
        pytest.skip(str(error))


def build_env(sample: Any, args: Any) -> Any:
    """The tiny task with `args.env` over its usual options."""
    needs_sandbox()
    return build_env_from("envs.swe", sample.metadata, {**tiny_options(), **args.env})


def call(name: str, **arguments: Any) -> str:
    """An answer that calls one tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
