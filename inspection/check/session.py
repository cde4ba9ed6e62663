"""Checks every task of a target: builds it, plays it twice, compares replays, and prints what was
found."""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.mixture import TaskSpec
from inspection.check import findings
from inspection.check.findings import Encoders, Finding, Status, ok, warning
from inspection.check.playthrough import Playthrough, play, replay_difference
from inspection.records import Record
from inspection.target import Target
from inspection.text import bold, paint, printable
from rollout.errors import ConfigError, EnvironmentFault, MissingDependencyError, SlimeVerlogError
from rollout.play.memory import Message
from rollout.spec import EpisodeSpec
from rollout.tasks import make_episode
from rollout.workers.abilities import abilities, draw, tools
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
    differences: dict[str, int | None] = field(default_factory=dict)
    """The first step at which each replay differs; None if it does not."""

    def add(self, name: str, status: Status, detail: str) -> None:
        self.findings.append(Finding(name, status, detail))

    def count(self, status: Status) -> int:
        return sum(finding.status == status for finding in self.findings)


async def check_task(
    target: Target, task: TaskSpec, seed: int, most: int, encoders: Encoders
) -> TaskReport:
    """Play the expert, if there is one, and the random player; judge, and replay in another
    process.

    A fault of the environment is a finding. Raises ConfigError or MissingDependencyError if it
    cannot be tried.
    """
    episode = make_episode(target.settings, task, 0, seed)
    report = TaskReport(task.name, seed)
    try:
        plays = await _play(target, episode, most, encoders, report)
        await _play_again(target, task, seed, plays, report)
    except (ConfigError, MissingDependencyError):
        raise
    except ServiceError as error:
        report.add("service", Status.WARNING, f"{error} (the rest was not checked)")
    except SlimeVerlogError as error:
        report.add("contract", Status.ERROR, str(error))
    report.findings += [*_references(task), *_capacity(task, target)]
    return report


async def _play(
    target: Target, episode: EpisodeSpec, most: int, encoders: Encoders, report: TaskReport
) -> list[Playthrough]:
    """Play in one process: the expert, random answers, a replay, and answers without an action."""
    async with _trial(target, episode) as trial:
        most = min(most, target.settings.max_turns or most)
        has_expert = (await trial.ask(episode, abilities)).has_expert
        plays: list[Playthrough] = []
        for player in ["expert", "random"] if has_expert else ["random"]:
            plays.append(await play(trial, target.settings, episode, player, most))
            report.first_prompt = plays[0].first_prompt
            report.tools = plays[0].replies[0].tools
        check_pictures(episode, [reply for play in plays for reply in play.replies])
        offered = await trial.ask(episode, abilities)  # reset fills in the actions and max_steps
        for said in offered.warnings:
            report.add("warning", Status.WARNING, said)
        await _draw(trial, episode, report)
        step = await replay_difference(trial, episode, plays[0])
        report.differences["after a second reset"] = step
        if offered.actions and not plays[0].replies[0].whole_prompts:
            report.findings.append(await findings.answer_freely(trial, episode))
        await trial.close(episode)
        _, left = await start_again(trial, episode)
    report.findings += findings.judge(plays, offered, target.settings, encoders)
    if left:
        report.add("threads", Status.WARNING, threads_left(left))
    else:
        report.add("threads", Status.OK, "none outlives an episode")
    return plays


async def _play_again(
    target: Target, task: TaskSpec, seed: int, plays: Sequence[Playthrough], report: TaskReport
) -> None:
    """Replay in another process, beside a second episode, and with other seeds; try the
    environment's tools."""
    episode = make_episode(target.settings, task, 0, seed)
    async with _trial(target, episode) as trial:
        step = await replay_difference(trial, episode, plays[-1])
        report.differences["in another process"] = step
        if plays[0].replies[-1].deterministic:
            neighbour = make_episode(target.settings, task, 1, seed + 1)
            step = await replay_difference(trial, episode, plays[-1], neighbour)
            report.differences[_BESIDE] = step
        report.findings.append(_determinism(plays[0], report.differences))
        report.findings.append(await _other_seeds(trial, target, task, seed, plays[-1]))
        await trial.build(episode)
        await trial.reset(episode)
        for name, worked, detail in await trial.ask(episode, tools):
            report.add(name, Status.OK if worked else Status.WARNING, detail)


@contextlib.asynccontextmanager
async def _trial(target: Target, episode: EpisodeSpec) -> AsyncIterator[Trial]:
    trial = Trial(target.settings)
    try:
        with target.explained():
            await trial.build(episode)
        yield trial
    finally:
        trial.end()


async def _draw(trial: Trial, episode: EpisodeSpec, report: TaskReport) -> None:
    """Try the viewer's drawing; a drawing that fails costs no episode."""
    try:
        drawn = await trial.ask(episode, draw)
    except EnvironmentFault as error:
        report.add("render", Status.WARNING, str(error))
    else:
        if drawn:
            report.add("render", Status.OK, drawn)


async def _other_seeds(
    trial: Trial, target: Target, task: TaskSpec, seed: int, played: Playthrough
) -> Finding:
    """Whether the same responses show something else with other seeds."""
    for number in (2, 3, 4):
        episode = make_episode(target.settings, task, number, seed + number)
        await trial.build(episode)
        if await replay_difference(trial, episode, played) is not None:
            return ok("seeds", "another seed is another episode")
    if task.env_path in _ONE_EPISODE:
        return ok("seeds", "the task itself is the episode; a seed does not change it")
    same = f"seed {seed} and three others are the same episode, so held-out episodes repeat those of training"
    advice = "take the seed from describe_task(sample)[1] and draw the episode from it in reset"
    if task.env_path.startswith("envs."):
        advice = (
            "draw the episode from the seed that the game gets, such as Gymnasium's reset(seed=...)"
        )
    return warning("seeds", f"{same}; unless there is only one, {advice}")


def _determinism(played: Playthrough, steps: Mapping[str, int | None]) -> Finding:
    where, step = next(
        ((where, step) for where, step in steps.items() if step is not None), ("", None)
    )
    if step is None:
        return ok("replay", "the same seed and answers show the same, also in another process")
    differs = (
        f"the first observation {where} differs"
        if step == 0
        else f"a replay {where} differs at step {step}"
    )
    if not played.replies[-1].deterministic:
        return ok("replay", f"{differs}, as deterministic = False says; lost episodes are given up")
    advice = (
        "draw everything random in reset from the seed, avoid sets and the clock, or set "
        "deterministic = False (for SWE and Harbor tasks, env.deterministic: false)"
    )
    if where == _BESIDE:
        advice = "keep the state in self, not in the class, the module or a global random generator"
    return Finding("replay", Status.ERROR, f"{differs}; {advice}")


_PAUSES_S = (0.0, 0.5, 2.0)
"""Before each count of free sessions: a server ends those of this check a moment after they were
left."""


def _capacity(task: TaskSpec, target: Target) -> Iterator[Finding]:
    """Whether OpenEnv servers have a session for every slot."""
    if task.env_path != "envs.openenv":
        return
    from envs.openenv.session import count_sessions
    from envs.openenv.settings import OpenEnvSettings

    slots = target.settings.n_env
    sessions = 0
    try:
        settings = read_settings(OpenEnvSettings, task.options, "env.")
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            sessions = max(sessions, count_sessions(settings, slots))
            if sessions >= slots:
                break
    except SlimeVerlogError as error:
        yield warning("capacity", f"could not be asked for: {error}")
        return
    if sessions >= slots:
        yield ok("capacity", f"the servers have a session for each of the {slots} slots")
        return
    advice = (
        "allow three per slot, often with the server's variable MAX_CONCURRENT_ENVS, or lower n_env"
    )
    found = f"the servers have {sessions} free sessions for {slots} slots (n_env); {advice}"
    yield warning("capacity", found)


def _references(task: TaskSpec) -> Iterator[Finding]:
    """Whether the reference solution of a SWE or Harbor task is rewarded and the untouched files
    are not."""
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
        status = Status.OK
        detail = "the reference solution is paid 1 and the untouched files 0"
        if found.note:  # of a SWE task: how long a verdict takes, and what limits it
            is_swe = task.env_path == "envs.swe"
            detail = f"the reference patch is rewarded, {found.note}" if is_swe else found.note
            status = Status.WARNING
        if found.problem:
            status = Status.ERROR
            detail = found.problem
        yield Finding(
            "reference", status, detail if found.task == task.task else f"{found.task}: {detail}"
        )


def print_prompt(report: TaskReport, encoder: Callable[..., Any] | None) -> None:
    """Print a task's first prompt: with roles, or as the chat template renders it with its number
    of tokens."""
    if not report.first_prompt:
        return
    heading = f"first prompt of task {report.name!r}, seed {report.seed}"
    if encoder is not None:
        own = encoder(tools=report.tools)
        ids = list(own.prompt(report.first_prompt).token_ids)
        print(f"--- {heading} ({len(ids):,} tokens) ---")
        print(printable(own.tokenizer.decode(ids)))
    else:
        shown = shown_messages(report.first_prompt)
        print(f"--- {heading} ({sum(len(text) for _, text in shown):,} characters) ---")
        for role, text in shown:
            print(f"{bold(f'[{role}]')}\n{printable(text)}\n")
        for tool in report.tools:
            print(f"{bold('[tool]')} {json.dumps(tool)}")
    print("---\n")


def shown_messages(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return role and text of each message; images appear as their size."""
    shown = []
    for message in messages:
        text = message["content"]
        if not isinstance(text, str):
            text = "".join(map(_text_of_part, text))
        shown.append((message["role"], text))
    return shown


def _text_of_part(part: Record) -> str:
    if part["type"] == "image":
        return f"[picture {part['image'].width} x {part['image'].height}]\n"
    return part["text"]


def rows_of(report: TaskReport, brief: bool) -> str:
    """Return the task's name and one row per finding; `brief` counts those that are ok instead."""
    shown = [row for row in report.findings if not brief or row.status != Status.OK]
    hidden = len(report.findings) - len(shown)
    lines = [bold(f"task {report.name}") + (f": {hidden} checks ok" if hidden else "")]
    for row in shown:
        status = paint(f"{row.status:<8}", _COLORS[row.status])
        lines.append(f"  {status} {row.name:<12} {printable(row.detail)}")
    return "\n".join(lines)


def sum_of(reports: Sequence[TaskReport]) -> str:
    """Say how many tasks, errors and warnings there are."""
    errors, warnings = (
        sum(report.count(status) for report in reports) for status in (Status.ERROR, Status.WARNING)
    )
    return f"{_counted(len(reports), 'task')}: {_counted(errors, 'error')}, {_counted(warnings, 'warning')}"


def as_json(target: str, reports: Sequence[TaskReport]) -> Record:
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
                "first_prompt": [
                    {"role": role, "text": text}
                    for role, text in shown_messages(report.first_prompt)
                ],
            }
            for report in reports
        ],
    }


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
