"""Judges an episode's files with the task's tests, in a fresh sandbox that is started after the
agent has ended.

1. No process of the agent is alive, since none outlives its command.
2. The agent's files are data: pipes, devices, and links that leave its folders are removed, and the
   files get another user. The folders of tests and reward are new.
3. The sandbox has another home, and its search paths name no folder that the agent could write.
4. The reward counts only if the tests ended by themselves, within their limits, with exit status 0,
   and the reward file had one writer. If the script starts pytest, pytest must have written its own
   report, too.

A task with `verifier: same` is judged with the agent's home and variables, and without the fourth
point.
"""

from dataclasses import dataclass, replace

from envs.harbor.machine import SESSION, Machine
from envs.harbor.places import (
    TESTS,
    VERDICT,
    VERIFIER_HOME,
    UncheckableError,
    drop_what_leads_out,
    part_of,
)
from envs.harbor.reward import RewardWatch, make_files, read_reward
from envs.swe.sandbox.supervise import Outcome
from envs.swe.sandbox.workspace import copy_tree, give, hand_over, new_user, read_plain, remove_tree

_SIGNALLED = range(129, 193)
"""Exit statuses that a shell gives to commands that a signal ended."""
NO_REWARD = "the tests wrote no reward file"
_CANNOT_START = 254
"""Exit status of a bash that cannot start a program, for example because there are too many."""


@dataclass(frozen=True)
class Verdict:
    """The reward, and why there is none if there is none. `output` is what the tests printed."""

    reward: float = 0.0
    reason: str = ""
    output: str = ""

    @property
    def progression(self) -> float:
        return min(max(self.reward, 0.0), 1.0)


def verify(machine: Machine) -> Verdict:
    """Run the tests. What the agent did ends in a verdict, never in an error; the files are of no
    use afterwards."""
    task = machine.task
    tree = machine.tree
    command = machine.settings.test_command
    try:
        drop_what_leads_out(tree, task.places, task.root)
    except UncheckableError as error:
        return Verdict(reason=str(error))
    copy_tree((task.folder / "tests").resolve(), machine.tests)
    for path in (VERDICT, VERIFIER_HOME):
        folder = tree / part_of(path)
        remove_tree(folder)
        folder.mkdir()
        give(folder, tree)
    make_files(machine.rewards)
    hand_over(tree, new_user())
    script = f"{TESTS}/test.sh"
    argv = ["bash", "-c", command, script] if command else ["bash", script]
    if task.is_judged_in_place:
        outcome = machine.for_tests().run(argv)
        return replace(_verdict(outcome, machine, None), output=outcome.output)
    with RewardWatch(machine.rewards) as watch:
        outcome = machine.for_tests().run(argv)
    return replace(_verdict(outcome, machine, watch), output=outcome.output)


def _verdict(outcome: Outcome, machine: Machine, watch: RewardWatch | None) -> Verdict:
    if outcome.stopped:
        return Verdict(reason=f"the tests were stopped by their {outcome.stopped} limit")
    if outcome.returncode < 0 or outcome.returncode in _SIGNALLED:
        return Verdict(
            reason=f"the tests were ended by a signal (exit status {outcome.returncode})"
        )
    if outcome.returncode == _CANNOT_START:
        return Verdict(
            reason=f"the test script could not start a program (exit status {outcome.returncode})"
        )
    folder = machine.rewards if watch is not None else machine.tree / part_of(VERDICT)
    try:
        reward = read_reward(folder, machine.settings.reward_key, watch)
    except (OSError, ValueError) as error:
        return Verdict(reason=f"the reward file cannot be used: {error}")
    if reward and outcome.returncode and watch is not None:
        why = f"the tests ended with exit status {outcome.returncode}, so the reward {reward:g} may not be theirs"
        return Verdict(reason=why)
    if reward != 0 and watch is not None and machine.task.uses_pytest and not _has_session(machine):
        return Verdict(reason="pytest did not come to its end")
    if reward is not None:
        return Verdict(reward)
    if machine.settings.test_command is not None:
        return Verdict(float(outcome.returncode == 0))
    return Verdict(reason=f"{NO_REWARD} (exit status {outcome.returncode})")


def _has_session(machine: Machine) -> bool:
    """Whether pytest left its report."""
    try:
        report = read_plain(machine.tree / part_of(VERDICT) / SESSION, 4096)
    except OSError:
        return False
    return report is not None and b"<testsuite" in report
