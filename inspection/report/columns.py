"""Reads runs into columns (one per run, setting and player), and judges each of them."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from inspection.records import names_of
from inspection.report.invalid import Rejections, sort_rejections
from inspection.report.numbers import MEASURES, QUESTIONS, Values, Verdict, find_repeats, measure
from inspection.report.reading import EXCERPT, Episode, Place, place_of, read_run

_FEW_EPISODES = 20
_MAX_ACTIONS = 50
"""With more kinds of executed actions, actions count as free text, which has no near matches."""
_MAX_EXAMPLES = 3


@dataclass(frozen=True)
class Column:
    """One column of the report: the episodes of a run, a setting and a player."""

    label: str
    player: str
    episodes: Sequence[Episode]
    rejections: Rejections
    values: Values
    verdicts: Mapping[str, Verdict]

    @property
    def turns(self) -> int:
        return sum(len(episode.turns) for episode in self.episodes)

    @property
    def is_scripted(self) -> bool:
        """Whether a scripted player gave the responses, without reasoning."""
        return self.player in ("random", "expert") and not self.values["answers_with_reasoning"]

    @property
    def questions(self) -> Mapping[int, Verdict]:
        """The verdict on each question: the worst of its numbers."""
        worst = dict.fromkeys(QUESTIONS, Verdict.NONE)
        for item in MEASURES:
            verdicts = worst[item.question], self.verdicts[item.key]
            worst[item.question] = max(verdicts, key=list(Verdict).index)
        return worst

    @property
    def cautions(self) -> Sequence[str]:
        """What limits the numbers, in sentences."""
        found = []
        if len(self.episodes) < _FEW_EPISODES:
            few = f"Only {len(self.episodes)} episodes: progression and the spread of returns mean little."
            found.append(f"{few} Evaluate at least 50.")
        if not self.turns:
            found.append("No episode has a turn: all failed before the first answer.")
        elif self.is_scripted:
            found.append(
                f"The {self.player} player is a baseline: it gives no reasons, and is not judged."
            )
        elif not self.values["reasoning_words"]:
            found.append("The answers hold no reasoning, so its diversity is not measured.")
        return found

    @property
    def examples(self) -> Sequence[tuple[str, Place]]:
        """The episodes with the most repeated attempts, and the first failures."""
        stuck = []
        failed = []
        for episode in self.episodes:
            if repeated := find_repeats(episode):
                stuck.append((len(repeated), place_of(episode, repeated[0])))
            if episode.fault:
                number = episode.turns[-1].number if episode.turns else 0
                failed.append(
                    ("failed", Place(episode.task, episode.seed, number, episode.fault[:EXCERPT]))
                )
        stuck.sort(key=lambda item: -item[0])
        found = [(f"{count} repeated attempts", place) for count, place in stuck[:_MAX_EXAMPLES]]
        return found + failed[:_MAX_EXAMPLES]


def read_columns(runs: Sequence[Path]) -> list[Column]:
    """Read all runs; columns keep the order of the files. Raises ConfigError if a run is unreadable
    or empty."""
    found: dict[tuple[str, str, str], list[Episode]] = defaultdict(list)
    for path, name in zip(runs, names_of(runs), strict=True):
        for episode in tqdm(read_run(path), desc=name, unit="episode", leave=False, disable=None):
            found[name, *episode.group].append(episode)
    differ = [len(set(names)) > 1 for names in zip(*found, strict=True)]
    columns = []
    for names, episodes in found.items():
        run, setting, player = names
        # Only those parts that differ; the setting if there is one.
        parts = [name for name in itertools.compress(names, differ) if name != "-"]
        label = ", ".join(dict.fromkeys(parts)) or next(
            (name for name in (setting, player) if name != "-"), run
        )
        columns.append(_judge(label, player, episodes))
    return columns


def _judge(label: str, player: str, episodes: Sequence[Episode]) -> Column:
    executed = Counter(
        turn.executed for episode in episodes for turn in episode.turns if turn.valid
    )
    rejections = sort_rejections(episodes, list(executed) if len(executed) <= _MAX_ACTIONS else ())
    values = measure(episodes, rejections.translatable)
    verdicts = {item.key: item.judge(values[item.key]) for item in MEASURES}
    column = Column(label, player, episodes, rejections, values, verdicts)
    if column.is_scripted:
        verdicts.update(dict.fromkeys(verdicts, Verdict.NONE))
    return column
