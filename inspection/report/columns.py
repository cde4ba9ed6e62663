"""Reads runs into columns (one per run, setting and player), judges each of them, and compares them over updates.

Growing responses with falling validity, and vanishing variance of returns, precede the collapse of multi-turn runs in
RAGEN (arXiv 2504.20073) and RAGEN-2 (arXiv 2604.06268).
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from inspection.records import names_of
from inspection.report.invalid import Rejections, legal_actions, sort_rejections
from inspection.report.numbers import BY_KEY, MEASURES, QUESTIONS, Measure, Value, Verdict, measure
from inspection.report.reading import Episode, Played, read_run

_JUDGED_IF_SCRIPTED = ("valid_actions", "valid_task_gap", "lost_environment")
_NOT_JUDGED_ALONE = ("mean_progression", "out_of_time", "out_of_context", "early_losses", "valid_drop")
"""Numbers of episodes, which are not judged with a single one."""
_FEW_EPISODES = 20
_UPDATE = re.compile(r"(?<![a-z.])(?:update|step|iter|iteration|rollout|epoch|checkpoint|ckpt)s?[^a-z=\d]*(\d+)", re.I)
LONGER = 1.5
"""Growth of the median response that counts as an explosion, if validity falls as well."""
VALIDITY_LOSS = 0.05
VARIANCE_LEFT = 0.25
"""Share of the first evaluation's standard deviation of returns below which the variance has vanished."""
COLLAPSE = 0.5
"""Share of the first evaluation's number below which diversity has collapsed."""


@dataclass(frozen=True)
class Answer:
    """The answer to one of the four questions."""

    verdict: Verdict
    sentence: str
    advice: Sequence[str]


@dataclass(frozen=True)
class Column:
    """One column of the report."""

    label: str
    run: str
    setting: str
    played: Played
    rejections: Rejections
    values: Mapping[str, Value]
    verdicts: Mapping[str, Verdict]
    answers: Mapping[int, Answer]
    cautions: Sequence[str]


@dataclass(frozen=True)
class Alarm:
    """One alarm over updates."""

    name: str
    verdict: Verdict
    sentence: str
    advice: str


def read_columns(runs: Sequence[Path], actions: Sequence[str] = ()) -> list[Column]:
    """Read all runs; columns keep the order of the files. Raises ConfigError if a run is unreadable or empty."""
    found: dict[tuple[str, str, str], list[Episode]] = {}
    for path, name in zip(runs, names_of(runs), strict=True):
        for episode in tqdm(read_run(path), desc=name, unit="episode", leave=False, disable=None):
            found.setdefault((name, *episode.group), []).append(episode)
    columns, differs = [], [len({key[part] for key in found}) > 1 for part in range(3)]
    for (run, setting, player), episodes in found.items():
        # Only those parts that differ; the setting if there is one.
        named = zip((run, setting, player), differs, strict=True)
        parts = dict.fromkeys(name for name, differ in named if differ and name != "-")
        label = ", ".join(parts) or next((name for name in (setting, player) if name != "-"), run)
        played = Played(player, episodes)
        legal = legal_actions(played.env_paths, played.actions, actions)
        rejections = sort_rejections(played.rejected(), legal)
        values = measure(played, legal, rejections)
        verdicts = {item.key: _judge(item, values[item.key], played) for item in MEASURES}
        answers = {question: _answer(question, played, values, verdicts) for question in QUESTIONS}
        cautions = _cautions(played)
        columns.append(Column(label, run, setting, played, rejections, values, verdicts, answers, cautions))
    return columns


def _judge(item: Measure, value: Value, played: Played) -> Verdict:
    if played.is_scripted and item.key not in _JUDGED_IF_SCRIPTED:
        return Verdict.NONE
    if len(played.episodes) == 1 and item.key in _NOT_JUDGED_ALONE:
        return Verdict.NONE
    if item.key == "valid_drop" and value.number is not None and value.number < 2 * (value.error or 0.0):
        return Verdict.GOOD
    return item.judge(value)


def _answer(question: int, played: Played, values: Mapping[str, Value], verdicts: Mapping[str, Verdict]) -> Answer:
    items = [item for item in MEASURES if item.question == question]
    verdict = max((verdicts[item.key] for item in items), key=list(Verdict).index)
    off = [item for item in items if verdicts[item.key] in (Verdict.LOOK, Verdict.ACT)]
    off.sort(key=lambda item: verdicts[item.key] != Verdict.ACT)
    advice = list(dict.fromkeys(item.advice for item in off if item.advice))
    if played.is_scripted and question in (1, 2):
        return Answer(verdict, f"the {played.player} player gives no reasons; a baseline, not judged", advice)
    if played.is_scripted and question == 4 and not off:
        verdict = Verdict.NONE
    if off:
        found = [f"{i.title} {i.show(values[i.key].number)} (healthy: {i.healthy()})" for i in off[:3]]
        more = f"; {len(off) - 3} more" if len(off) > 3 else ""
        ends = f"{_ends(played)}; " if question == 4 else ""
        return Answer(verdict, ends + "; ".join(found) + more, advice)
    parts = [_ends(played)] if question == 4 else []
    for item in (BY_KEY[key] for key in QUESTIONS[question].headlines if values[key].number is not None):
        parts.append(f"{item.title} {item.show(values[item.key].number)}")
    return Answer(verdict, "; ".join(parts) or "not measured", advice)


def _ends(played: Played) -> str:
    ends = Counter("success" if e.success else f"{e.stop} without success" for e in played.episodes)
    return ", ".join(f"{count / len(played.episodes):.0%} {name}" for name, count in ends.most_common(4))


def _cautions(played: Played) -> list[str]:
    found = []
    if (n := len(played.episodes)) < _FEW_EPISODES:
        nothing = "standard errors, shares of episodes, success and the spread of returns mean nothing yet"
        few = f"There are only {n} episodes: differences below two standard errors mean nothing."
        found.append(few if n > 1 else f"There is only 1 episode: {nothing}. Evaluate at least 50.")
    if not played.turns:
        found.append("No episode has a turn: all failed before the first answer.")
    elif played.is_scripted:
        found.append(f"The player is '{played.player}': it gives no reasons, so reasoning is not judged.")
    elif not played.reasoned:
        found.append("The answers hold no reasoning, so its diversity is not measured.")
    return found


def find_alarms(columns: Sequence[Column]) -> list[Alarm]:
    """Compare the last evaluation of each player with the first, if settings (`update 20`) or runs count updates."""
    players: dict[str, list[tuple[int, Column]]] = {}
    for column in columns:
        match = _UPDATE.search(column.setting) or _UPDATE.search(column.run)
        if match and not column.played.is_scripted:
            players.setdefault(column.played.player, []).append((int(match[1]), column))
    found: list[Alarm] = []
    for evaluations in players.values():
        evaluations.sort(key=lambda item: item[0])
        if len({updates for updates, _ in evaluations}) == len(evaluations) > 1:
            (_, first), *_, (_, last) = evaluations
            found += [*_lengths(first, last), *_variance(first, last), *_diversity(first, last)]
    return found


def _return_deviation(column: Column) -> float | None:
    """Standard deviation of returns within tasks (root mean square over tasks)."""
    by_task = [[episode.episode_return for episode in group] for group in column.played.by_task.values()]
    variances = [statistics.variance(returns) for returns in by_task if len(returns) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else None


def _lengths(first: Column, last: Column) -> Iterator[Alarm]:
    unit = "words" if all(column.values["reasoning_words"].number for column in (first, last)) else "tokens"
    key = {"words": "reasoning_words", "tokens": "response_tokens"}[unit]
    before, after = first.values[key].number, last.values[key].number
    valid = [column.values["valid_actions"].number for column in (first, last)]
    if not before or after is None or valid[0] is None or valid[1] is None or after < LONGER * before:
        return
    grew = f"answers grew from {before:g} to {after:g} {unit}, and validity went from {valid[0]:.1%} to {valid[1]:.1%}"
    if valid[0] - valid[1] >= VALIDITY_LOSS:
        advice = "Stop the run, go back to the last good checkpoint, lower the learning rate or raise the KL penalty"
        yield Alarm("exploding length", Verdict.ACT, grew, f"{advice}, and limit the length of answers.")
    else:
        yield Alarm("growing length", Verdict.LOOK, grew, "Read the longest answers: is the new text reasoning?")


def _variance(first: Column, last: Column) -> Iterator[Alarm]:
    before, after = _return_deviation(first), _return_deviation(last)
    if not before or after is None or after > VARIANCE_LEFT * before:
        return
    name, success = "vanishing variance of returns", last.values["success"].number or 0.0
    fell = f"within tasks, returns' standard deviation fell from {before:.3g} to {after:.3g} at {success:.0%} success"
    advice = "All episodes now earn the same, so there is nothing to learn from: go back, and mix in easier tasks."
    if success >= 0.95:
        yield Alarm(name, Verdict.LOOK, fell, "The tasks are solved; take harder ones.")
    else:
        yield Alarm(name, Verdict.ACT, fell, advice)


def _diversity(first: Column, last: Column) -> Iterator[Alarm]:
    advice = "This is how template collapse begins: lower the learning rate, or raise the entropy bonus"
    for key, name in (
        ("effective_actions", "fewer kinds of actions"),
        ("observation_retrieval", "reasoning that forgets the observation"),
        ("distinct_reasoning", "repeated reasoning"),
    ):
        before, after = first.values[key].number, last.values[key].number
        if before and after is not None and after <= COLLAPSE * before:
            fell = f"{name}: from {before:.3g} to {after:.3g}"
            yield Alarm("collapsing diversity", Verdict.LOOK, fell, f"{advice}, and read the last episodes.")
