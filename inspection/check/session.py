"""Checks every task of a target: builds it, plays it twice, compares replays, and prints what was found."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.mixture import TaskSpec
from inspection.check import findings
from inspection.check.findings import Encoders, Finding, Playthrough, Status
from inspection.target import Target
from inspection.text import bold, paint, printable
from rollout.errors import ConfigError, EnvironmentFault, MissingDependencyError, SlimeVerlogError
from rollout.play.memory import Message
from rollout.spec import EpisodeSpec
from rollout.tasks import make_episode
from rollout.workers.trial import ServiceError, Trial, check_pictures, start_again, threads_left
from slime_verlog import read_settings

ALL_ROWS = 3
"""With more tasks than this, a command counts findings that are ok instead of printing them."""
_BESIDE = "beside another episode in the same process"
_ONE_EPISODE = ("envs.swe", "envs.harbor")
"""Environments in which a task is one problem, so that held-out episodes are other tasks."""
_COLORS = {Status.OK: "32", Status.WARNING: "33", Status.ERROR: "31"}


@dataclass
class TaskReport:
    """What was found out about one task."""

    name: str
    seed: int
    findings: list[Finding] = field(default_factory=list)
    first_prompt: list[Message] = field(default_factory=list)
    tools: Sequence[Any] = ()

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)


async def check_task(target: Target, task: TaskSpec, seed: int, most: int, encoders: Encoders) -> TaskReport:
    """Play the expert, if there is one, and the random player; judge, and replay in another process.

    A fault of the environment is a finding. Raises ConfigError or MissingDependencyError if it cannot be tried.
    """
    episode = make_episode(target.settings, task, 0, seed)
    report = TaskReport(task.name, seed)
    try:
        async with _trial(target, episode) as trial:
            most = min(most, target.settings.max_turns or most)
            has_expert = (await trial.abilities(episode)).has_expert
            plays = []
            for player in ["expert"] * has_expert + ["random"]:
                plays.append(await findings.play(trial, target.settings, episode, player, most))
                report.first_prompt, report.tools = plays[0].first_prompt, plays[0].replies[0].tools
            check_pictures(episode, [reply for play in plays for reply in play.replies])
            abilities = await trial.abilities(episode)  # reset fills in the actions and max_steps
            report.findings += [Finding("warning", Status.WARNING, said) for said in abilities.warnings]
            report.findings += await _drawing(trial, episode)
            twice = await findings.replay_difference(trial, episode, plays[0])
            if abilities.actions and not plays[0].replies[0].whole_prompts:
                report.findings.append(await findings.answer_freely(trial, episode))
            await trial.close(episode)
            _, left = await start_again(trial, episode)
        report.findings += findings.judge(plays, abilities, target.settings, encoders)
        status = Status.WARNING if left else Status.OK
        report.findings.append(Finding("threads", status, threads_left(left) if left else "none outlives an episode"))
        async with _trial(target, episode) as other:
            differs = {"after a second reset": twice}
            differs["in another process"] = await findings.replay_difference(other, episode, plays[-1])
            if plays[0].replies[-1].deterministic:
                neighbour = make_episode(target.settings, task, 1, seed + 1)
                differs[_BESIDE] = await findings.replay_difference(other, episode, plays[-1], neighbour)
            report.findings.append(_determinism(plays[0], differs))
            report.findings.append(await _other_seeds(other, target, task, seed, plays[-1]))
            await other.build(episode)
            await other.reset(episode)
            for name, worked, detail in await other.tools(episode):
                report.findings.append(Finding(name, Status.OK if worked else Status.WARNING, detail))
    except (ConfigError, MissingDependencyError):
        raise
    except ServiceError as error:
        report.findings.append(Finding("service", Status.WARNING, f"{error} (the rest was not checked)"))
    except SlimeVerlogError as error:
        report.findings.append(Finding("contract", Status.ERROR, str(error)))
    report.findings += [*_references(task), *_capacity(task, target)]
    return report


@contextlib.asynccontextmanager
async def _trial(target: Target, episode: EpisodeSpec) -> AsyncIterator[Trial]:
    trial = Trial(target.settings)
    try:
        with target.explained():
            await trial.build(episode)
        yield trial
    finally:
        trial.end()


async def _drawing(trial: Trial, episode: EpisodeSpec) -> list[Finding]:
    """What the viewer's drawing does; a drawing that fails costs no episode."""
    try:
        drawn = await trial.draw(episode)
    except EnvironmentFault as error:
        return [Finding("render", Status.WARNING, str(error))]
    return [Finding("render", Status.OK, drawn)] if drawn else []


async def _other_seeds(trial: Trial, target: Target, task: TaskSpec, seed: int, played: Playthrough) -> Finding:
    """Whether the same responses show something else with other seeds."""
    for number in (2, 3, 4):
        episode = make_episode(target.settings, task, number, seed + number)
        await trial.build(episode)
        if await findings.replay_difference(trial, episode, played) is not None:
            return Finding("seeds", Status.OK, "another seed is another episode")
    if task.env_path in _ONE_EPISODE:
        return Finding("seeds", Status.OK, "the task itself is the episode; a seed does not change it")
    same = f"seed {seed} and three others are the same episode, so held-out episodes repeat those of training"
    advice = "take the seed from describe_task(sample)[1] and draw the episode from it in reset"
    if task.env_path.startswith("envs."):
        advice = "draw the episode from the seed that the game gets, such as Gymnasium's reset(seed=...)"
    return Finding("seeds", Status.WARNING, f"{same}; unless there is only one, {advice}")


def _determinism(played: Playthrough, steps: Mapping[str, int | None]) -> Finding:
    where, step = next(((where, step) for where, step in steps.items() if step is not None), ("", None))
    if step is None:
        return Finding("replay", Status.OK, "the same seed and answers show the same, also in another process")
    differs = f"the first observation {where} differs" if step == 0 else f"a replay {where} differs at step {step}"
    if not played.replies[-1].deterministic:
        return Finding("replay", Status.OK, f"{differs}, as deterministic = False says; lost episodes are given up")
    advice = (
        "draw everything random in reset from the seed, avoid sets and the clock, or set deterministic = False "
        "(for SWE and Harbor tasks, env.deterministic: false)"
    )
    if where == _BESIDE:
        advice = "keep the state in self, not in the class, the module or a global random generator"
    return Finding("replay", Status.ERROR, f"{differs}; {advice}")


_PAUSES_S = (0.0, 0.5, 2.0)
"""Before each count of free sessions: a server ends those of this check a moment after they were left."""


def _capacity(task: TaskSpec, target: Target) -> Iterator[Finding]:
    """Whether OpenEnv servers have a session for every slot."""
    if task.env_path != "envs.openenv":
        return
    from envs.openenv.session import count_sessions
    from envs.openenv.settings import OpenEnvSettings

    slots, sessions = target.settings.n_env, 0
    try:
        settings = read_settings(OpenEnvSettings, task.options, "env.")
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            sessions = max(sessions, count_sessions(settings, slots))
            if sessions >= slots:
                break
    except SlimeVerlogError as error:
        yield Finding("capacity", Status.WARNING, f"could not be asked for: {error}")
        return
    if sessions >= slots:
        yield Finding("capacity", Status.OK, f"the servers have a session for each of the {slots} slots")
        return
    advice = "allow three per slot, often with the server's variable MAX_CONCURRENT_ENVS, or lower n_env"
    found = f"the servers have {sessions} free sessions for {slots} slots (n_env); {advice}"
    yield Finding("capacity", Status.WARNING, found)


def _references(task: TaskSpec) -> Iterator[Finding]:
    """Whether the reference solution of a SWE or Harbor task is rewarded and the untouched files are not."""
    results: Iterable[Any] = ()
    if task.env_path == "envs.swe":
        from envs.swe import SWESettings
        from envs.swe.validate import validate_instances

        results = validate_instances(read_settings(SWESettings, task.options, "env."), [task.task])
    elif task.env_path == "envs.harbor":
        from envs.harbor import check_references
        from envs.harbor.settings import HarborSettings

        results = check_references(task.task, read_settings(HarborSettings, task.options, "env."))
    for found in results:
        # The note of a SWE task says how long a verdict takes, and what limits it.
        note = f"the reference patch is rewarded, {found.note}" if task.env_path == "envs.swe" else found.note
        status = Status.ERROR if found.problem else Status.WARNING if note else Status.OK
        detail = found.problem or note or "the reference solution is paid 1 and the untouched files 0"
        yield Finding("reference", status, detail if found.task == task.task else f"{found.task}: {detail}")


def print_prompt(report: TaskReport, encoder: Callable[..., Any] | None) -> None:
    """Print a task's first prompt: with roles, or as the chat template renders it with its number of tokens."""
    if not report.first_prompt:
        return
    heading = f"first prompt of task {report.name!r}, seed {report.seed}"
    if encoder is None:
        chars = sum(len(text) for _, text in shown_messages(report.first_prompt))
        print(f"--- {heading} ({chars:,} characters) ---")
        for role, text in shown_messages(report.first_prompt):
            print(f"{bold(f'[{role}]')}\n{printable(text)}\n")
        for tool in report.tools:
            print(f"{bold('[tool]')} {json.dumps(tool)}")
    else:
        own = encoder(tools=report.tools) if report.tools else encoder()
        ids = list(own.prompt(report.first_prompt).token_ids)
        print(f"--- {heading} ({len(ids):,} tokens) ---")
        print(printable(own.tokenizer.decode(ids)))
    print("---\n")


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return role and text of each message; images appear as their size."""
    size = lambda image: f"[picture {image.width} x {image.height}]\n"
    text = lambda part: size(part["image"]) if part["type"] == "image" else part["text"]
    contents = [(message["role"], message["content"]) for message in messages]
    return [(role, parts if isinstance(parts, str) else "".join(map(text, parts))) for role, parts in contents]


def rows_of(report: TaskReport, brief: bool) -> str:
    """Return the task's name and one row per finding; `brief` counts those that are ok instead."""
    rows = [row for row in report.findings if not brief or row.status != Status.OK]
    hidden = len(report.findings) - len(rows)
    lines = [bold(f"task {report.name}") + (f": {hidden} checks ok" if hidden else "")]
    mark = lambda status: paint(f"{status:<8}", _COLORS[status])
    return "\n".join([*lines, *(f"  {mark(row.status)} {row.name:<12} {printable(row.detail)}" for row in rows)])


def sum_of(reports: Sequence[TaskReport]) -> str:
    """Say how many tasks, errors and warnings there are."""
    counts = {"error": 0, "warning": 0} | Counter(finding.status for report in reports for finding in report.findings)
    found = (f"{counts[noun] or 'no'} {noun}{'s' * (counts[noun] != 1)}" for noun in ("error", "warning"))
    return f"{len(reports)} task{'s' * (len(reports) != 1)}: {', '.join(found)}"


def as_json(target: str, reports: Sequence[TaskReport]) -> dict[str, Any]:
    """Return the same as JSON."""
    return {
        "target": target,
        "errors": sum(report.count(Status.ERROR) for report in reports),
        "warnings": sum(report.count(Status.WARNING) for report in reports),
        "tasks": [
            {
                "task": report.name,
                "seed": report.seed,
                "checks": [vars(finding) for finding in report.findings],
                "first_prompt": [{"role": role, "text": text} for role, text in shown_messages(report.first_prompt)],
            }
            for report in reports
        ],
    }
