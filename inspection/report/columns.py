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
from inspection.report.invalid import Rejections, sort_rejections
from inspection.report.numbers import MEASURES, QUESTIONS, Value, Verdict, find_repeats, measure
from inspection.report.reading import EXCERPT, Episode, Place, place_of, read_run

_FEW_EPISODES = 20
_MAX_ACTIONS = 50
"""With more kinds of executed actions, actions count as free text, which has no near matches."""
_MAX_EXAMPLES = 3
_UPDATE = re.compile(r"(?<![a-z.])(?:update|step|iter|iteration|rollout|epoch|checkpoint|ckpt)s?[^a-z=\d]*(\d+)", re.I)
LONGER = 1.5
"""Growth of the median response that counts as an explosion, if validity falls as well."""
VALIDITY_LOSS = 0.05
VARIANCE_LEFT = 0.25
"""Share of the first evaluation's standard deviation of returns below which the variance has vanished."""
COLLAPSE = 0.5
"""Share of the first evaluation's number below which diversity has collapsed."""
SOLVED = 0.95
"""Success from which on equal returns mean that the tasks are solved."""


@dataclass(frozen=True)
class Column:
    """One column of the report: the episodes of a run, a setting and a player."""

    label: str
    run: str
    setting: str
    player: str
    episodes: Sequence[Episode]
    rejections: Rejections
    values: Mapping[str, Value]
    verdicts: Mapping[str, Verdict]

    @property
    def turns(self) -> int:
        return sum(len(episode.turns) for episode in self.episodes)

    @property
    def is_scripted(self) -> bool:
        """Whether a scripted player gave the responses, without reasoning."""
        return self.player in ("random", "expert") and not self.values["answers_with_reasoning"].number

    @property
    def by_task(self) -> Mapping[str, Sequence[Episode]]:
        found: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            found.setdefault(episode.task, []).append(episode)
        return found

    @property
    def questions(self) -> Mapping[int, Verdict]:
        """The verdict on each question: the worst of its numbers."""
        worst = dict.fromkeys(QUESTIONS, Verdict.NONE)
        for item in MEASURES:
            worst[item.question] = max(worst[item.question], self.verdicts[item.key], key=list(Verdict).index)
        return worst

    @property
    def cautions(self) -> Sequence[str]:
        """What limits the numbers, in sentences."""
        found = []
        if len(self.episodes) < _FEW_EPISODES:
            few = f"Only {len(self.episodes)} episodes: success and the spread of returns mean little."
            found.append(f"{few} Evaluate at least 50.")
        if not self.turns:
            found.append("No episode has a turn: all failed before the first answer.")
        elif self.is_scripted:
            found.append(f"The {self.player} player is a baseline: it gives no reasons, and is not judged.")
        elif not self.values["reasoning_words"].number:
            found.append("The answers hold no reasoning, so its diversity is not measured.")
        return found

    @property
    def examples(self) -> Sequence[tuple[str, Place]]:
        """The episodes with the most repeated attempts, and the first failures."""
        stuck, failed = [], []
        for episode in self.episodes:
            if repeated := find_repeats(episode):
                stuck.append((len(repeated), place_of(episode, repeated[0])))
            if episode.fault:
                number = episode.turns[-1].number if episode.turns else 0
                failed.append(("failed", Place(episode.task, episode.seed, number, episode.fault[:EXCERPT])))
        stuck.sort(key=lambda item: -item[0])
        found = [(f"{count} repeated attempts", place) for count, place in stuck[:_MAX_EXAMPLES]]
        return found + failed[:_MAX_EXAMPLES]


@dataclass(frozen=True)
class Alarm:
    """One alarm over updates."""

    name: str
    verdict: Verdict
    sentence: str
    advice: str


def read_columns(runs: Sequence[Path]) -> list[Column]:
    """Read all runs; columns keep the order of the files. Raises ConfigError if a run is unreadable or empty."""
    found: dict[tuple[str, str, str], list[Episode]] = {}
    for path, name in zip(runs, names_of(runs), strict=True):
        for episode in tqdm(read_run(path), desc=name, unit="episode", leave=False, disable=None):
            found.setdefault((name, *episode.group), []).append(episode)
    differs = [len(set(names)) > 1 for names in zip(*found, strict=True)]
    columns = []
    for names, episodes in found.items():
        # Only those parts that differ; the setting if there is one.
        parts = dict.fromkeys(name for name, differ in zip(names, differs, strict=True) if differ and name != "-")
        run, setting, player = names
        label = ", ".join(parts) or next((name for name in (setting, player) if name != "-"), run)
        executed = Counter(turn.executed for episode in episodes for turn in episode.turns if turn.valid)
        rejections = sort_rejections(episodes, list(executed) if len(executed) <= _MAX_ACTIONS else ())
        values = measure(episodes, rejections.translatable)
        verdicts = {item.key: item.judge(values[item.key]) for item in MEASURES}
        column = Column(label, run, setting, player, episodes, rejections, values, verdicts)
        if column.is_scripted:
            verdicts.update(dict.fromkeys(verdicts, Verdict.NONE))
        columns.append(column)
    return columns


def find_alarms(columns: Sequence[Column]) -> list[Alarm]:
    """Compare the last evaluation of each player with the first, if settings (`update 20`) or runs count updates."""
    players: dict[str, list[tuple[int, Column]]] = {}
    for column in columns:
        match = _UPDATE.search(column.setting) or _UPDATE.search(column.run)
        if match and not column.is_scripted:
            players.setdefault(column.player, []).append((int(match[1]), column))
    found: list[Alarm] = []
    for evaluations in players.values():
        evaluations.sort(key=lambda item: item[0])
        first, last = evaluations[0][1], evaluations[-1][1]
        if len({updates for updates, _ in evaluations}) == len(evaluations) > 1:
            found += [*_lengths(first, last), *_variance(first, last), *_diversity(first, last)]
    return found


def _return_deviation(column: Column) -> float | None:
    """Standard deviation of returns within tasks (root mean square over tasks)."""
    by_task = [[episode.episode_return for episode in group] for group in column.by_task.values()]
    variances = [statistics.variance(returns) for returns in by_task if len(returns) > 1]
    return statistics.fmean(variances) ** 0.5 if variances else None


def _lengths(first: Column, last: Column) -> Iterator[Alarm]:
    has_words = all(column.values["reasoning_words"].number for column in (first, last))
    key, unit = ("reasoning_words", "words") if has_words else ("response_tokens", "tokens")
    before, after = first.values[key].number, last.values[key].number
    was_valid, is_valid = first.values["valid_actions"].number, last.values["valid_actions"].number
    if not before or after is None or was_valid is None or is_valid is None or after < LONGER * before:
        return
    grew = f"answers grew from {before:g} to {after:g} {unit}, and validity went from {was_valid:.1%} to {is_valid:.1%}"
    if was_valid - is_valid >= VALIDITY_LOSS:
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
    if success >= SOLVED:
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
