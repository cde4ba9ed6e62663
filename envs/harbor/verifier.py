"""Judges an episode's files with the task's tests, in a sandbox that is started after the agent has ended.

1. No process of the agent is alive, since none outlives its command.
2. The folders of tests and reward are new. The agent had neither, and none of its links leads to them.
3. PATH, home and the import path of Python lead to nothing that the agent could change; see `Machine.for_tests`.
4. The reward file counts only if the tests ended by themselves, within their limits, and pytest came to its end.
"""

import errno
import itertools
import json
import math
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from envs.harbor.machine import Machine, find_unfinished
from envs.harbor.places import TESTS, VERDICT, VERIFIER_HOME, follow, outside, part_of
from envs.harbor.task import HarborTask
from envs.swe.sandbox.supervise import Outcome
from envs.swe.sandbox.usage import walk
from envs.swe.sandbox.workspace import copy_tree, give, open_plain, remove_tree

_MAX_LOOKS = 1_000_000
"""Path components that are looked up before links are too many to check, which takes half a minute or so."""


def find_link_to_tests(tree: Path, task: HarborTask) -> str:
    """A sentence about a link of the agent that leads to files of the tests, or to a folder above them."""

    looks = itertools.count()

    def file_of(path: PurePosixPath) -> Path:
        if next(looks) > _MAX_LOOKS:
            raise OSError(errno.ELOOP, "the agent left too many links")
        return outside(tree, task.places, str(path)) or (task.root or Path("/")) / str(path).lstrip("/")

    for place in task.places:
        folder, unlisted = tree / part_of(place), list[str]()
        links = [entry.path for entry in walk(folder, unlisted=unlisted.append) if entry.is_symlink()]
        for path in links + unlisted:
            inside = PurePosixPath(place, os.path.relpath(path, folder))
            try:
                target = follow(inside, file_of) or PurePosixPath("/")
            except OSError as error:
                return f"{inside} cannot be checked ({error.strerror})"
            places = map(PurePosixPath, (TESTS, VERDICT, VERIFIER_HOME, "/proc"))
            if any(target.is_relative_to(other) or other.is_relative_to(target) for other in places):
                return f"{inside} is a link to {target}"
    return ""


_MAX_BYTES = 64 << 10
_SIGNALLED = range(129, 193)
"""Exit statuses that a shell gives to commands that a signal ended."""
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
    """Run the tests. What the agent did ends in a verdict, never in an error; the files are of no use afterwards."""
    command = machine.settings.test_command
    if link := find_link_to_tests(machine.tree, machine.task):
        return Verdict(reason=link)
    copy_tree(machine.task.folder / "tests", machine.tests)
    for path in (VERDICT, VERIFIER_HOME):
        folder = machine.tree / part_of(path)
        remove_tree(folder)
        folder.mkdir()
        give(folder, machine.tree)
    sandbox = machine.for_tests()
    with open(os.open(machine.judge / "report", os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as report:
        script = f"{TESTS}/test.sh"  # its name also marks a command as the tests', see `judge/bash_env`
        outcome = sandbox.run(["bash", "-c", command, script] if command else ["bash", script])
        verdict = _read_verdict(machine.tree / part_of(VERDICT), outcome, machine)
        if verdict.reward and (broken := find_unfinished(report.fileno())):
            verdict = Verdict(reason=broken)
    return replace(verdict, output=outcome.output)


def _read_verdict(folder: Path, outcome: Outcome, machine: Machine) -> Verdict:
    if outcome.stopped:
        return Verdict(reason=f"the tests were stopped by their {outcome.stopped} limit")
    if outcome.returncode < 0 or outcome.returncode in _SIGNALLED:
        return Verdict(reason=f"the tests were ended by a signal (exit status {outcome.returncode})")
    if outcome.returncode == _CANNOT_START:
        return Verdict(reason=f"the test script could not start a program (exit status {outcome.returncode})")
    if folder.stat().st_mode & stat.S_IRWXU != stat.S_IRWXU:
        return Verdict(reason="a program under test has locked the folder of the reward")
    try:
        return read_reward(folder, machine.settings.reward_key)
    except FileNotFoundError:
        if machine.settings.test_command is not None:
            return Verdict(float(outcome.returncode == 0))
        return Verdict(reason=f"the tests wrote no reward file (exit status {outcome.returncode})")
    except (OSError, ValueError) as error:
        return Verdict(reason=f"the reward file cannot be used: {error}")


def read_reward(folder: Path, key: str) -> Verdict:
    """The reward in `reward.json` or `reward.txt`; if both have one, the lower.

    Of several numbers in `reward.json`, the reward is the one at `key`. Without such a key, it is the only number, or
    else the one in `reward.txt`. So a program under test gains nothing by adding the file that the tests do not write.

    Raises:
        FileNotFoundError: there is neither file.
        ValueError: there is no number, or several and no `key`.
    """
    text, content = (_read_if_there(folder / name) for name in ("reward.txt", "reward.json"))
    found = [] if text is None else [float(text.strip())]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{found[0]} is not a finite number")
    if content is not None:
        numbers = _numbers(content)
        if key in numbers or len(numbers) == 1:
            found.append(numbers[key] if key in numbers else next(iter(numbers.values())))
        if not found:
            names = ", ".join(list(numbers)[:8]) or "none"
            raise ValueError(f"reward.json has no number {key!r} (its numbers: {names}); set env.reward_key")
    if not found:
        raise FileNotFoundError
    return Verdict(min(found))


def _numbers(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("reward.json is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("reward.json holds no object")
    numbers = {key: value for key, value in found.items() if type(value) in (int, float)}
    return {key: float(value) for key, value in numbers.items() if abs(value) < 1e300}


def _read_if_there(file: Path) -> str | None:
    """A small plain file that tested code could have made."""
    try:
        descriptor = open_plain(file)
    except FileNotFoundError:
        return None
    if descriptor is None:
        raise ValueError(f"{file.name} is not a plain file")
    with os.fdopen(descriptor, "rb") as opened:
        if not os.fstat(descriptor).st_mode & stat.S_IWUSR:
            raise ValueError(f"{file.name} is read-only, so the tests could not write it")
        data = opened.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{file.name} is longer than {_MAX_BYTES >> 10} KiB")
    return data.decode("utf-8")
