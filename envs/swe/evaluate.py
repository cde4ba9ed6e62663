"""Decides whether a task is solved, out of the agent's reach; nothing counts unless the required tests really ran.

1. The judged tree is built anew: the pristine files, the tests' patch, and of the agent's changes only those that
   are neither tests nor configure them. It is mounted read-only.
2. `judge_script.py` runs the required tests in a fresh sandbox and tells every step through a pipe, in numbered
   and signed records. The chain must be whole, every required test must have been set up, called and torn down,
   and pytest's own verdict must agree with the process's exit status.
3. What passed runs once more as a control, with every test's body failing at its first statement. Whatever passes
   there was not decided by the test.

What remains: tested code shares a process with pytest, so code that reads the signing key out of memory and tells
the control apart could still lie, and objects that compare equal to everything satisfy any assertion.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.swe.changes import TooMuchChanged, apply_changes, collect_changes, is_protected
from envs.swe.control import sabotage
from envs.swe.instances import Instance
from envs.swe.pristine import git
from envs.swe.sandbox import TESTBED, Sandbox
from envs.swe.supervise import Limits, Outcome
from envs.swe.workspace import copy_tree, hand_over, remove_tree

_SCRIPT = Path(__file__).with_name("judge_script.py")
_INSIDE = "/judge/judge_script.py"
_FIXED_ARGS = ("-q", "--tb=no", "--color=no", "-p", "no:cacheprovider", "--continue-on-collection-errors")


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


@dataclass(frozen=True)
class Verdict:
    """Whether the task is solved, the share of tests of each kind that passed, and why not more."""

    solved: bool
    fail_to_pass: float = 0.0
    pass_to_pass: float = 0.0
    reason: str = ""
    outcomes: Mapping[str, str] = field(default_factory=dict)

    @property
    def progression(self) -> float:
        """0..1; a product, so that doing nothing is worth nothing although most tests are green from the start."""
        return self.fail_to_pass * self.pass_to_pass


def evaluate(instance: Instance, pristine: Path, tree: Path, settings: JudgeSettings) -> Verdict:
    """Judge the agent's `tree`. The agent's doings end in a verdict, never in an error."""
    try:
        changes = collect_changes(tree, pristine)
    except TooMuchChanged as error:
        return Verdict(False, reason=str(error))
    counted = {path: change for path, change in changes.items() if not is_protected(path, instance)}

    def judged_tree(target: Path) -> None:
        build_tree(target, pristine, instance.test_patch)
        apply_changes(target, counted)

    run = run_tests(judged_tree, instance.required, settings)
    verdict = _verdict(instance, run)
    if verdict.solved and (faked := _control(judged_tree, instance, run, settings)):
        return Verdict(False, reason=faked)
    return verdict


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


def _verdict(instance: Instance, run: TestRun) -> Verdict:
    if run.reason:
        return Verdict(False, reason=run.reason)
    green = {test for test, outcome in run.outcomes.items() if outcome in ("passed", "xfailed")}
    fail, keep = (_share(green, tests) for tests in (instance.fail_to_pass, instance.pass_to_pass))
    solved = green.issuperset(instance.required)
    red = [test for test in instance.required if test not in green]
    reason = "" if solved else f"{len(red)} of {len(instance.required)} required tests are not green, as {red[0]}"
    return Verdict(solved, fail, keep, reason, run.outcomes)


def _share(green: set[str], tests: Sequence[str]) -> float:
    return sum(test in green for test in tests) / len(tests) if tests else 1.0


def _control(build: Callable[[Path], None], instance: Instance, run: TestRun, settings: JudgeSettings) -> str:
    """Run tests that must all fail; return what is wrong if one does not, or if they do not run at all."""
    reached: frozenset[str] = frozenset()

    def sabotaged_tree(target: Path) -> None:
        nonlocal reached
        build(target)
        reached = sabotage(target, instance.required)

    control = run_tests(sabotaged_tree, instance.required, settings)
    expected = {test for test in reached if run.outcomes[test] == "passed"}
    if not expected:
        return ""
    if control.reason:
        return f"the control run broke: {control.reason}"
    wrong = sorted(test for test in expected if control.outcomes.get(test) != "failed")
    return f"{wrong[0]} does not fail where its body must fail, so passing means nothing" if wrong else ""


def run_tests(build: Callable[[Path], None], ids: Iterable[str], settings: JudgeSettings) -> TestRun:
    """Build a tree, run the tests `ids` in it (all that pytest finds, if none are named), and remove it."""
    folder = Path(tempfile.mkdtemp(prefix="slime-verlog-judge-"))
    try:
        folder.chmod(0o711)
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
    args = [f"--rootdir={TESTBED}", "-o", "addopts=", *_FIXED_ARGS, *settings.test_args, *files]
    job = {"ids": ids, "roots": source_roots(tree), "args": args}
    key = secrets.token_bytes(32)
    stdin = key.hex().encode() + b"\n" + json.dumps(job).encode()
    outcome = sandbox.run_with_report([str(settings.python), "-s", "-B", _INSIDE], stdin)
    return replace(read_report(outcome, key), output=outcome.output)


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
    tampered = [values["what"] for kind, values in records if kind == "tampered"]
    if tampered:
        return TestRun(reason=f"the tests' own machinery was changed while they ran: {', '.join(tampered[0])}")
    if not records or records[-1][0] != "end":
        return TestRun(reason=f"the tests did not run to their end (exit status {outcome.returncode})")
    if records[-1][1]["code"] != outcome.returncode:
        return TestRun(reason="pytest's verdict and the exit status differ")
    return TestRun(_outcomes(records))


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
