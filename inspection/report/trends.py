"""Compares evaluations of one training run in the order of its updates, and raises the alarms of multi-turn training.

Growing answers with falling validity, and vanishing variance of returns, precede the collapse of multi-turn runs in
RAGEN (arXiv 2504.20073) and RAGEN-2 (arXiv 2604.06268).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from inspection.report.columns import Column
from inspection.report.measures import Verdict

_UPDATE = re.compile(r"(?:update|step|iter|iteration|rollout|epoch|checkpoint|ckpt)s?[\W_]*(\d+)", re.IGNORECASE)
LONGER = 1.5
"""Growth of the median answer that counts as an explosion, if validity falls as well."""
VALIDITY_LOSS = 0.05
VARIANCE_LEFT = 0.25
"""Share of the first evaluation's standard deviation of returns below which the variance has vanished."""
COLLAPSE = 0.5
"""Share of the first evaluation's number below which diversity has collapsed."""


@dataclass(frozen=True)
class Alarm:
    """One alarm over updates."""

    name: str
    verdict: Verdict
    sentence: str
    advice: str


@dataclass(frozen=True)
class Series:
    """Evaluations of one player in the order of updates."""

    name: str
    updates: Sequence[int]
    columns: Sequence[Column]


def find_series(columns: Sequence[Column]) -> list[Series]:
    """Columns of one player whose settings (`update 20`), or else runs, differ in a number of updates."""
    players: dict[str, list[tuple[int, Column]]] = {}
    for column in columns:
        match = _UPDATE.search(column.setting) or _UPDATE.search(column.run)
        if match and not column.tally.is_scripted:
            players.setdefault(column.tally.player, []).append((int(match[1]), column))
    series = []
    for name, found in players.items():
        found.sort(key=lambda item: item[0])
        updates = [number for number, _ in found]
        if len(set(updates)) == len(updates) > 1:
            series.append(Series(name, updates, [column for _, column in found]))
    return series


def find_alarms(series: Sequence[Series]) -> list[Alarm]:
    """Compare the last evaluation of each series with the first."""
    found: list[Alarm | None] = []
    for one in series:
        first, last = one.columns[0], one.columns[-1]
        found += [_lengths(first, last), _variance(first, last), *_diversity(first, last)]
    return [alarm for alarm in found if alarm is not None]


def return_deviation(column: Column) -> float | None:
    """Standard deviation of returns within tasks (root mean square over tasks)."""
    by_task: dict[str, list[float]] = {}
    for episode in column.tally.episodes:
        by_task.setdefault(episode.task, []).append(episode.episode_return)
    variances = [statistics.variance(returns) for returns in by_task.values() if len(returns) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else None


def _lengths(first: Column, last: Column) -> Alarm | None:
    unit = "words" if all(column.values["reasoning_words"].number for column in (first, last)) else "tokens"
    key = {"words": "reasoning_words", "tokens": "response_tokens"}[unit]
    before, after = first.values[key].number, last.values[key].number
    valid = [column.values["valid_actions"].number for column in (first, last)]
    if not before or after is None or valid[0] is None or valid[1] is None:
        return None
    if after < LONGER * before:
        return None
    loss = valid[0] - valid[1]
    sentence = (
        f"answers grew from {before:g} to {after:g} {unit}, and validity went from {valid[0]:.1%} to {valid[1]:.1%}"
    )
    advice = "Stop the run, go back to the last good checkpoint, lower the learning rate or raise the KL penalty, and "
    advice += "limit the length of answers."
    if loss >= VALIDITY_LOSS:
        return Alarm("exploding length", Verdict.ACT, sentence, advice)
    return Alarm("growing length", Verdict.LOOK, sentence, "Read the longest answers: is the new text reasoning?")


def _variance(first: Column, last: Column) -> Alarm | None:
    before, after = return_deviation(first), return_deviation(last)
    if not before or after is None or after > VARIANCE_LEFT * before:
        return None
    success = last.values["success"].number or 0.0
    solved = success >= 0.95
    return Alarm(
        "vanishing variance of returns",
        Verdict.LOOK if solved else Verdict.ACT,
        f"within tasks, returns' standard deviation fell from {before:.3g} to {after:.3g} at {success:.0%} success",
        "The tasks are solved; take harder ones."
        if solved
        else "All episodes now earn the same, so there is nothing to learn from: go back, and mix in easier tasks.",
    )


def _diversity(first: Column, last: Column) -> list[Alarm]:
    found = []
    for key, name in (
        ("effective_actions", "fewer kinds of actions"),
        ("observation_retrieval", "reasoning that forgets the observation"),
        ("distinct_reasoning", "repeated reasoning"),
    ):
        before, after = first.values[key].number, last.values[key].number
        if not before or after is None or after > COLLAPSE * before:
            continue
        sentence = f"{name}: from {before:.3g} to {after:.3g}"
        advice = "This is how template collapse begins: lower the learning rate, or raise the entropy bonus, and read "
        found.append(Alarm("collapsing diversity", Verdict.LOOK, sentence, advice + "the last episodes."))
    return found
