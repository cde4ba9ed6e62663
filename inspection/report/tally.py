"""Counts over the episodes of one column (a run, a setting and a player), filled one episode at a time."""

from __future__ import annotations

import functools
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspection.report.reading import EpisodeRecord, TurnRecord
from inspection.report.translations import find_match

SAMPLED_TURNS = 4000
"""Turns that are kept for the measures that compare texts."""
LOOP = 3
"""Turns in a row with the same action, and an observation that stays the same, that count as a loop."""
_REPEATS = 2
"""Earlier occurrences of an attempt after which it counts as repeated."""
_MOST_CANDIDATES = 20_000
_TEXT = 2000
_EXCERPT = 160
_THIRDS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where an example is; `turn` counts from 1, as the viewer does."""

    task: str
    seed: Any
    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeLine:
    """What is kept of an episode."""

    task: str
    seed: Any
    stop: str
    fault: str | None
    episode_return: float
    success: bool
    progression: float
    turns: int
    valid: int
    looped: int
    stuck: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn of the sample."""

    order: int
    observation: str
    state: int | None
    reasoning: str
    executed: str
    valid: bool


@dataclass
class Rejected:
    """Invalid answers with the same text in place of the action."""

    candidate: str
    """The text after the marker."""
    has_marker: bool
    asked: bool
    cut: bool
    commands: tuple[str, ...]
    place: Place
    count: int = 0


@dataclass
class Tally:
    """One column of the report."""

    player: str
    env_paths: dict[str, None] = field(default_factory=dict)
    """Environments of the episodes, in order; several if tasks are mixed."""
    episodes: list[EpisodeLine] = field(default_factory=list)
    words: array[int] = field(default_factory=lambda: array("i"))
    """Words of reasoning of each answer."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of each answer, where they are recorded."""
    actions: Counter[str] = field(default_factory=Counter)
    """Executed actions of valid answers."""
    thirds: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(_THIRDS)])
    """Valid answers and all answers, in each third of the episodes."""
    rejected: dict[tuple[Any, ...], Rejected] = field(default_factory=dict)
    same_state: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    openings: Counter[str] = field(default_factory=Counter)
    """First eight words of the reasoning."""
    shortest: list[tuple[int, Place]] = field(default_factory=list)
    longest: list[tuple[int, Place]] = field(default_factory=list)
    loops: list[tuple[int, Place]] = field(default_factory=list)
    turns = valid = reasoned = late = cut = finish_known = states_known = 0
    sample: list[Sampled] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, episode: EpisodeRecord) -> None:
        """Count an episode."""
        self.env_paths[episode.env_path] = None
        looped, stuck = self._count_repeats(episode)
        for index, turn in enumerate(episode.turns):
            self._add_turn(episode, index, turn)
        self.episodes.append(
            EpisodeLine(
                episode.task,
                episode.seed,
                episode.stop,
                episode.fault,
                episode.episode_return,
                episode.success,
                episode.progression,
                len(episode.turns),
                sum(turn.valid for turn in episode.turns),
                looped,
                stuck,
            )
        )

    @property
    def is_scripted(self) -> bool:
        """Whether a scripted player gave the answers, without reasoning."""
        return self.player in ("random", "expert") and not self.reasoned

    def _add_turn(self, episode: EpisodeRecord, index: int, turn: TurnRecord) -> None:
        words = turn.answer.reasoning.split()
        self.turns += 1
        self.words.append(len(words))
        self.valid += turn.valid
        self.late += bool(turn.answer.after)
        self.states_known += turn.state is not None
        if turn.cut is not None:
            self.finish_known += 1
            self.cut += turn.cut
        if turn.tokens is not None:
            self.tokens.append(turn.tokens)
        third = self.thirds[index * _THIRDS // len(episode.turns)]
        third[0] += turn.valid
        third[1] += 1
        if words:
            self.reasoned += 1
            self.openings[" ".join(words[:8])[:_EXCERPT]] += 1
            self._keep(self.shortest, -len(words), lambda: _place(episode, index, turn.response))
            self._keep(self.longest, len(words), lambda: _place(episode, index, turn.response))
        if turn.valid:
            self.actions[turn.executed] += 1
            if turn.state is not None:
                self.same_state[turn.state][turn.executed] += 1
        else:
            self._reject(episode, index, turn)
        self._sample(turn)

    def _reject(self, episode: EpisodeRecord, index: int, turn: TurnRecord) -> None:
        commands = turn.commands if find_match(turn.answer.action, turn.commands) else ()
        candidate = f"{turn.answer.action}\n{turn.answer.after}".strip()[:_EXCERPT]
        key = (candidate.lower(), turn.answer.has_marker, bool(turn.cut), commands)
        if key not in self.rejected:
            if len(self.rejected) >= _MOST_CANDIDATES:
                key = ("", True, bool(turn.cut), ())
            place = _place(episode, index, turn.response)
            new = Rejected(candidate, turn.answer.has_marker, turn.asked_for_marker, bool(turn.cut), commands, place)
            self.rejected.setdefault(key, new)
        self.rejected[key].count += 1

    def _count_repeats(self, episode: EpisodeRecord) -> tuple[int, int]:
        """Turns in loops, and turns that repeat an earlier attempt; both 0 in an episode that was won.

        An attempt is an action in an observation. A stretch of equal attempts that ends in another observation had an
        effect, such as a walk through an empty room, and counts as one attempt.
        """
        looped = stuck = 0
        seen: Counter[tuple[int, str]] = Counter()
        for start, attempt, length, changed in [] if episode.success else _stretches(episode.turns):
            repeats = 1 if changed else length
            stuck += sum(seen[attempt] + k >= _REPEATS for k in range(repeats))
            seen[attempt] += repeats
            if length >= LOOP and not changed:
                looped += length
                text = f"{attempt[1][:_EXCERPT]} x {length}"
                self._keep(self.loops, length, functools.partial(_place, episode, start, text))
        return looped, stuck

    def _keep(self, worst: list[tuple[int, Place]], size: int, place: Callable[[], Place], most: int = 3) -> None:
        if len(worst) < most or size > worst[-1][0]:
            worst.append((size, place()))
            worst.sort(key=lambda item: -item[0])
            del worst[most:]

    def _sample(self, turn: TurnRecord) -> None:
        """Keep each turn with equal probability (Vitter's algorithm R)."""
        place = len(self.sample) if self.turns <= SAMPLED_TURNS else self._rng.randrange(self.turns)
        if place >= SAMPLED_TURNS:
            return
        kept = Sampled(
            self.turns,
            turn.observation[:_TEXT],
            turn.state,
            turn.answer.reasoning[:_TEXT],
            turn.executed,
            turn.valid,
        )
        self.sample[place : place + 1] = [kept]

    def ordered_sample(self) -> list[Sampled]:
        """The sampled turns in the order in which they were played."""
        return sorted(self.sample, key=lambda turn: turn.order)


def _place(episode: EpisodeRecord, index: int, text: str) -> Place:
    return Place(episode.task, episode.seed, index + 1, text[-_EXCERPT:].strip())


def _stretches(turns: Sequence[TurnRecord]) -> Iterator[tuple[int, tuple[int, str], int, bool]]:
    """Turns in a row with one action and one observation: start, (observation, action), length, and whether the
    observation after them differs. Turns whose observation is not known are left out."""
    start = 0
    while start < len(turns):
        end, state = start + 1, turns[start].state
        while end < len(turns) and (turns[end].state, turns[end].executed) == (state, turns[start].executed):
            end += 1
        if state is not None:
            changed = end < len(turns) and turns[end].state != state
            yield start, (state, turns[start].executed), end - start, changed
        start = end
