"""Runs tests in a fresh sandbox, and reads the outcome of each test outside of it.

1. The tree is built anew and mounted read-only.
2. `judge_script.py` runs the tests and reports every step through a pipe, in numbered and signed records. The chain
   must be complete, a green test must have been set up, called and torn down, and pytest's own verdict must agree with
   the exit status of the process.

Tested code shares a process with pytest, so it could find the signing key and forge a green report. `evaluate.py`
does not depend on this report being honest: the probes must have shown the right values before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.swe.sandbox.folders import process_folder, remove_tree
from envs.swe.sandbox.sandbox import TESTBED, Sandbox
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import copy_tree, hand_over
from envs.swe.verdict.pristine import git

_SCRIPT = Path(__file__).with_name("judge_script.py")
_INSIDE = "/judge/judge_script.py"
_FIXED_ARGS = ("-q", "--tb=no", "--color=no", "-p", "no:cacheprovider", "--continue-on-collection-errors")
_BROKEN_CODES = (3, 4)
"""pytest's exit statuses for an internal error and for a command line or configuration that it refuses."""


@dataclass(frozen=True)
class JudgeSettings:
    """How tests are run: interpreter, limits, pytest arguments of this repository, and whether tests may write
    into the tree that they are read from."""

    python: Path
    limits: Limits
    test_args: tuple[str, ...] = ()
    writable_tests: bool = False


@dataclass(frozen=True)
class TestRun:
    """Outcome of every test that ran: passed, xfailed, skipped, failed. `reason` is set if none of it counts."""

    __test__ = False
    outcomes: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    output: str = ""
    uncollectable: tuple[str, ...] = ()
    """Files and folders that pytest could not collect."""

    @property
    def green(self) -> frozenset[str]:
        """Tests that passed, or failed as their `xfail` mark says."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome in ("passed", "xfailed"))


def build_tree(target: Path, pristine: Path, test_patch: str = "") -> None:
    """Make a tree to run tests in: the pristine files without git's data, with the tests' patch.

    Raises:
        ConfigError: the patch does not apply.
    """
    copy_tree(pristine, target)
    remove_tree(target / ".git")
    if test_patch.strip():
        text = test_patch if test_patch.endswith("\n") else test_patch + "\n"
        git("apply", "--whitespace=nowarn", "-", cwd=target, stdin=text)


def run_tests(build: Callable[[Path], None], ids: Iterable[str], settings: JudgeSettings) -> TestRun:
    """Build a tree, run the tests `ids` in it (all that pytest finds, if none are named), and remove it."""
    folder = process_folder().make()
    try:
        tree = folder / "tree"
        build(tree)
        hand_over(tree)
        return _run_in(tree, tuple(ids), settings)
    finally:
        remove_tree(folder)


def _run_in(tree: Path, ids: tuple[str, ...], settings: JudgeSettings) -> TestRun:
    files = [f for f in dict.fromkeys(i.split("::", 1)[0] for i in ids) if (tree / f).is_file()]
    if ids and not files:
        return TestRun(reason="none of the required test files exists")
    sandbox = Sandbox(
        tree,
        settings.python,
        settings.limits,
        readable=((_SCRIPT, _INSIDE),),
        writable_tree=settings.writable_tests,
    )
    job = {"ids": ids, "roots": source_roots(tree), "args": pytest_args(settings, files)}
    key = secrets.token_bytes(32)
    stdin = key.hex().encode() + b"\n" + json.dumps(job).encode()
    outcome = sandbox.run_with_report([str(settings.python), "-s", "-B", _INSIDE], stdin)
    return replace(read_report(outcome, key), output=outcome.output)


def pytest_args(settings: JudgeSettings, files: Iterable[str]) -> list[str]:
    """Arguments of pytest for a run of some files."""
    return [f"--rootdir={TESTBED}", "-o", "addopts=", *_FIXED_ARGS, *settings.test_args, *files]


def source_roots(tree: Path) -> list[str]:
    """Folders inside the sandbox from which the repository's packages are imported."""
    return [f"{TESTBED}/src", TESTBED] if (tree / "src").is_dir() else [TESTBED]


def read_report(outcome: Outcome, key: bytes) -> TestRun:
    """Check the chain of records and turn it into outcomes; a broken chain means that nothing counts."""
    if outcome.stopped:
        return TestRun(reason=f"the tests were stopped by their {outcome.stopped} limit")
    records: list[tuple[str, Mapping]] = []
    for line in outcome.report.splitlines():
        signature, _, body = line.partition(b" ")
        expected = hmac.new(key, body, hashlib.sha256).hexdigest().encode()
        if not hmac.compare_digest(signature, expected):
            return TestRun(reason="the report of the tests was tampered with")
        number, kind, values = json.loads(body)
        if number != len(records):
            return TestRun(reason="the report of the tests has a gap")
        records.append((kind, values))
    if not records or records[-1][0] != "end":
        return TestRun(reason=f"the tests did not run to their end (exit status {outcome.returncode})")
    if records[-1][1]["code"] != outcome.returncode:
        return TestRun(reason="pytest's verdict and the exit status differ")
    if outcome.returncode in _BROKEN_CODES:
        last = (outcome.output.strip() or "it printed nothing").splitlines()[-1]
        return TestRun(reason=f"pytest could not run the tests (exit status {outcome.returncode}): {last}")
    broken = tuple(values["id"] for kind, values in records if kind == "uncollectable")
    return TestRun(_outcomes(records), uncollectable=broken)


def _outcomes(records: Sequence[tuple[str, Mapping]]) -> Mapping[str, str]:
    """One word per test; only a test that was started, set up, called, torn down and finished can be green."""
    marked = {test for kind, values in records if kind == "collected" for test in values["xfail"]}
    steps: dict[str, list[str]] = {}
    for kind, values in records:
        if kind == "phase":
            xfailed = values["xfail"] and values["outcome"] == "skipped" and values["id"] in marked
            word = "xfailed" if xfailed else values["outcome"]
            steps.setdefault(values["id"], []).append(f"{values['when']} {word}")
        elif kind in ("start", "finish"):
            steps.setdefault(values["id"], []).append(kind)
    return {test: _outcome(done) for test, done in steps.items()}


def _outcome(steps: Sequence[str]) -> str:
    around = [*steps[:2], *steps[-2:]]
    calls = set(steps[2:-2])
    if around == ["start", "setup passed", "teardown passed", "finish"] and len(steps) > 4:
        if calls == {"call passed"}:
            return "passed"
        if calls == {"call xfailed"}:
            return "xfailed"
    return "failed" if any(step.endswith("failed") and "xfailed" not in step for step in steps) else "skipped"
