"""Uses a task's reference solution: to check the task, and as the expert that plays it with the agent's tools."""

import base64
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from envs.errors import SlimeVerlogError
from envs.harbor.env import HarborEnv, select_tasks
from envs.harbor.machine import start
from envs.harbor.places import SOLUTION, part_of
from envs.harbor.settings import HarborSettings
from envs.harbor.task import HarborTask
from envs.harbor.verifier import Verdict, verify
from envs.swe.calls import Call
from envs.swe.sandbox.workspace import copy_tree, remove_tree
from envs.swe.shell import Finding
from envs.swe.tools import MAX_COMMAND_BYTES

_CHUNK = 3 * (MAX_COMMAND_BYTES // 8)
"""Bytes of a file that one command writes, so that their base64 form fits into it."""


def check_references(name: str, settings: HarborSettings) -> Iterator[Finding]:
    """Run the reference solution of a task, or of all tasks of `*`, and judge it and the untouched files."""
    for task in select_tasks(name, settings):
        try:
            yield _check(task, settings)
        except SlimeVerlogError as error:
            yield Finding(task.name, str(error).removeprefix(f"{task.name}: "))


def _check(task: HarborTask, settings: HarborSettings) -> Finding:
    untouched = _judge(task, settings, solved=False)
    if untouched.reward > 0:
        return Finding(task.name, f"the untouched files are paid {untouched.reward:g}")
    if not task.has_solution:
        return Finding(task.name, note="there is no solution/solve.sh, so it is not known whether it can be solved")
    solved = _judge(task, settings, solved=True)
    if solved.reward <= 0:
        why = solved.reason or "the tests pay 0"
        printed = " ".join(solved.output.split())[-300:] or "nothing"
        return Finding(task.name, f"the reference solution is not paid: {why}; it printed: {printed}")
    return Finding(task.name, note="" if solved.reward == 1 else f"the reference solution is paid {solved.reward:g}")


def _judge(task: HarborTask, settings: HarborSettings, *, solved: bool) -> Verdict:
    machine = start(task, settings)
    try:
        if not solved:
            return verify(machine)
        part = machine.tree / part_of(SOLUTION)
        remove_tree(part)
        copy_tree(task.folder / "solution", part)
        done = machine.for_solution().run(["bash", f"{SOLUTION}/solve.sh"])
        if done.stopped:
            return Verdict(reason=f"solve.sh was stopped by its {done.stopped} limit", output=done.output)
        verdict = verify(machine)
        return replace(verdict, output=f"{done.output}\n{verdict.output}")
    finally:
        machine.close()


def expert_action(env: HarborEnv) -> str:
    """The next response of an expert that copies the reference solution into /solution, runs it, and submits."""
    calls = list(_calls(env.task))
    first = env.steps * env.settings.max_calls
    chosen = calls[first : first + env.settings.max_calls] or calls[-1:]
    return "\n".join(call.text() for call in chosen)


def _calls(task: HarborTask) -> Iterator[Call]:
    """What the expert does. Without a solution, it submits the untouched files."""
    folder = task.folder / "solution"
    for file in sorted(folder.rglob("*")) if task.has_solution else ():
        if file.is_file():
            yield from _written(file, f"{SOLUTION}/{file.relative_to(folder).as_posix()}")
    if task.has_solution:
        exports = "".join(f"export {key}={shlex.quote(value)}; " for key, value in task.solution_variables.items())
        yield Call("run", {"command": f"{exports}bash {SOLUTION}/solve.sh"})
    yield Call("submit", {})


def _written(file: Path, target: str) -> Iterator[Call]:
    """Commands that write a file: as text where it is text, or in base64."""
    data, place = file.read_bytes(), shlex.quote(target)
    folder, mark = shlex.quote(target.rpartition("/")[0]), "END_OF_FILE"
    text = data.decode("utf-8", "replace")
    is_plain = text.encode() == data and text.endswith("\n") and "\0" not in text and mark not in text
    if is_plain and len(data) < MAX_COMMAND_BYTES // 2:
        yield Call("run", {"command": f"mkdir -p {folder} && cat > {place} <<'{mark}'\n{text}{mark}"})
        return
    yield Call("run", {"command": f"mkdir -p {folder} && : > {place}"})
    for start_at in range(0, len(data), _CHUNK):
        piece = base64.b64encode(data[start_at : start_at + _CHUNK]).decode()
        yield Call("run", {"command": f"printf %s {piece} | base64 -d >> {place}"})
