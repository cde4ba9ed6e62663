"""Runs tests in a fresh sandbox, and reads the outcome of each test outside of it.

Tested code shares a process with pytest, so it could forge a green report. `evaluate.py` does not depend on an honest
report: the probes must have shown the right values before.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import TESTBED, hand_over
from envs.swe.verdict.trees import Build, scratch_tree

_FOLDER, _SCRIPTS = "/judge", ("pytest_script.py", "encoding.py")
"""Where the sandbox shows the scripts; the first of them is run."""
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
    collected: tuple[str, ...] = ()
    """All tests of the files that were run, in pytest's order."""

    @property
    def green(self) -> frozenset[str]:
        """Tests that passed, or failed as their `xfail` mark says."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome in ("passed", "xfailed"))


def run_tests(build: Build, ids: Iterable[str], settings: JudgeSettings) -> TestRun:
    """Build a tree, run the tests `ids` in it (all that pytest finds, if none are named), and remove it."""
    ids = tuple(ids)
    with scratch_tree() as tree:
        build(tree)
        files = files_of(tree, ids)
        if ids and not files:
            return TestRun(reason="none of the required test files exists")
        key = secrets.token_bytes(32)
        outcome = run_pytest(tree, files, {"key": key.hex(), "ids": ids}, settings)
    return replace(read_report(outcome, key), output=outcome.output)


def run_pytest(
    tree: Path, files: Iterable[str], job: Mapping[str, Any], settings: JudgeSettings, hash_seed: int = 0
) -> Outcome:
    """Run `pytest_script.py` on test files of a tree, in a fresh sandbox; `job` says which tests and what to report."""
    hand_over(tree)
    sandbox = Sandbox(
        tree,
        settings.python,
        settings.limits,
        readable=tuple((Path(__file__).with_name(name), f"{_FOLDER}/{name}") for name in _SCRIPTS),
        variables=(("PYTHONHASHSEED", str(hash_seed)),),
        writable_tree=settings.writable_tests,
    )
    args = [f"--rootdir={TESTBED}", "-o", "addopts=", *_FIXED_ARGS, *settings.test_args, *files]
    stdin = json.dumps({**job, "roots": source_roots(tree), "args": args}).encode()
    return sandbox.run([str(settings.python), "-s", "-B", f"{_FOLDER}/{_SCRIPTS[0]}"], stdin, with_report=True)


def files_of(tree: Path, tests: Iterable[str]) -> list[str]:
    """The files of some tests, as far as they are in the tree."""
    return [file for file in dict.fromkeys(test.split("::", 1)[0] for test in tests) if (tree / file).is_file()]


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
    collected = tuple(test for kind, values in records if kind == "collected" for test in values["ids"])
    return TestRun(_outcomes(records), uncollectable=broken, collected=collected)


def _outcomes(records: Sequence[tuple[str, Mapping]]) -> Mapping[str, str]:
    """One word per test; only a test that was started, set up, called, torn down and finished can be green."""
    marked = {test for kind, values in records if kind == "marked" for test in values["ids"]}
    steps: dict[str, list[str]] = {}
    for kind, values in records:
        if kind == "phase":
            xfailed = values["xfail"] and values["outcome"] == "skipped" and values["id"] in marked
            word = "xfailed" if xfailed else values["outcome"]
            steps.setdefault(values["id"], []).append(f"{values['when']} {word}")
        elif kind in ("start", "finish"):
            steps.setdefault(values["id"], []).append(kind)
    outcomes: dict[str, str] = {}
    for test, done in steps.items():
        match done:
            case ["start", "setup passed", *calls, "teardown passed", "finish"] if set(calls) == {"call passed"}:
                outcomes[test] = "passed"
            case ["start", "setup passed", *calls, "teardown passed", "finish"] if set(calls) == {"call xfailed"}:
                outcomes[test] = "xfailed"
            case _:
                outcomes[test] = "failed" if any(step.endswith(" failed") for step in done) else "skipped"
    return outcomes
