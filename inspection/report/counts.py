"""Counts over the episodes of one column (a run, a setting and a player), filled one episode at a time."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inspection.report.invalid import Place, Rejected, find_match
from inspection.report.reading import Episode, Turn

SAMPLED_TURNS = 4000
"""Turns that are kept for the measures that compare texts."""
LOOP = 3
"""Turns in a row with the same action, and an observation that stays the same, that count as a loop."""
_REPEATS = 2
"""Earlier occurrences of an attempt after which it counts as repeated."""
_MAX_CANDIDATES = 20_000
_MAX_TEXT = 2000
_EXCERPT = 160
_THIRDS = 3


class SampledTurn(NamedTuple):
    """A turn of the sample, with the start of its texts."""

    order: int
    observation: str
    state: int | None
    reasoning: str
    executed: str
    valid: bool


@dataclass
class Counts:
    """One column of the report."""

    player: str
    env_paths: dict[str, None] = field(default_factory=dict)
    """Environments of the episodes, in order; several if tasks are mixed."""
    episodes: list[Episode] = field(default_factory=list)
    words: array[int] = field(default_factory=lambda: array("i"))
    """Words of reasoning of each response."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of each response, where they are recorded."""
    actions: Counter[str] = field(default_factory=Counter)
    """Executed actions of valid responses."""
    thirds: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(_THIRDS)])
    """Valid responses and all responses, in each third of the episodes."""
    rejected: dict[tuple[Any, ...], Rejected] = field(default_factory=dict)
    same_state: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    openings: Counter[str] = field(default_factory=Counter)
    """First eight words of the reasoning."""
    shortest: list[tuple[int, Place]] = field(default_factory=list)
    longest: list[tuple[int, Place]] = field(default_factory=list)
    loops: list[tuple[int, Place]] = field(default_factory=list)
    turns = valid = reasoned = late = cut = finish_known = states_known = 0
    looped = stuck = 0
    """Turns in loops, and turns that repeat an earlier attempt, of episodes that were not won."""
    sample: list[SampledTurn] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def is_scripted(self) -> bool:
        """Whether a scripted player gave the responses, without reasoning."""
        return self.player in ("random", "expert") and not self.reasoned

    def add(self, episode: Episode, turns: Sequence[Turn]) -> None:
        """Count an episode."""
        self.env_paths[episode.env_path] = None
        self.episodes.append(episode)
        if not episode.success:
            self._count_repeats(episode, turns)
        for index, turn in enumerate(turns):
            self._add_turn(episode, index, turn)

    def _add_turn(self, episode: Episode, index: int, turn: Turn) -> None:
        words = turn.parts.reasoning.split()
        self.turns += 1
        self.words.append(len(words))
        self.valid += turn.valid
        self.late += bool(turn.parts.after)
        self.states_known += turn.state is not None
        if turn.cut is not None:
            self.finish_known += 1
            self.cut += turn.cut
        if turn.tokens is not None:
            self.tokens.append(turn.tokens)
        third = self.thirds[index * _THIRDS // episode.turns]
        third[0] += turn.valid
        third[1] += 1
        if words:
            self.reasoned += 1
            self.openings[" ".join(words[:8])[:_EXCERPT]] += 1
            place = functools.partial(_place, episode, index, turn.response)
            _keep_largest(self.shortest, -len(words), place)
            _keep_largest(self.longest, len(words), place)
        if not turn.valid:
            self._reject(episode, index, turn)
        else:
            self.actions[turn.executed] += 1
            if turn.state is not None:
                self.same_state[turn.state][turn.executed] += 1
        self._sample(turn)

    def _reject(self, episode: Episode, index: int, turn: Turn) -> None:
        commands = turn.commands if find_match(turn.parts.action, turn.commands) else ()
        candidate = f"{turn.parts.action}\n{turn.parts.after}".strip()[:_EXCERPT]
        key = (candidate.lower(), turn.parts.has_marker, bool(turn.cut), commands)
        if key not in self.rejected:
            if len(self.rejected) >= _MAX_CANDIDATES:
                key = ("", True, bool(turn.cut), ())
            place = _place(episode, index, turn.response)
            new = Rejected(candidate, turn.parts.has_marker, turn.asked_for_marker, bool(turn.cut), commands, place)
            self.rejected.setdefault(key, new)
        self.rejected[key].count += 1

    def _count_repeats(self, episode: Episode, turns: Sequence[Turn]) -> None:
        """Count turns in loops, and turns that repeat an earlier attempt: an action in an observation.

        A stretch of equal attempts that ends in another observation had an effect, such as a walk through an empty
        room, and counts as one attempt.
        """
        seen: Counter[tuple[int, str]] = Counter()
        groups = itertools.groupby(turns, lambda turn: (turn.state, turn.executed))
        stretches = [(attempt, len(list(group))) for attempt, group in groups]
        start = 0
        for number, ((state, executed), length) in enumerate(stretches, 1):
            changed = number < len(stretches) and stretches[number][0][0] != state
            if state is not None:
                repeats = 1 if changed else length
                self.stuck += sum(seen[state, executed] + k >= _REPEATS for k in range(repeats))
                seen[state, executed] += repeats
                if length >= LOOP and not changed:
                    self.looped += length
                    text = f"{executed[:_EXCERPT]} x {length}"
                    _keep_largest(self.loops, length, functools.partial(_place, episode, start, text))
            start += length

    def _sample(self, turn: Turn) -> None:
        """Keep each turn with equal probability (Vitter's algorithm R)."""
        place = len(self.sample) if self.turns <= SAMPLED_TURNS else self._rng.randrange(self.turns)
        if place < SAMPLED_TURNS:
            observation, reasoning = turn.observation[:_MAX_TEXT], turn.parts.reasoning[:_MAX_TEXT]
            kept = SampledTurn(self.turns, observation, turn.state, reasoning, turn.executed, turn.valid)
            self.sample[place : place + 1] = [kept]

    def ordered_sample(self) -> list[SampledTurn]:
        """Return the sampled turns in the order in which they were played."""
        return sorted(self.sample)


def _keep_largest(found: list[tuple[int, Place]], size: int, place: Callable[[], Place]) -> None:
    if len(found) < 3 or size > found[-1][0]:
        found[:] = heapq.nlargest(3, [*found, (size, place())], key=lambda item: item[0])


def _place(episode: Episode, index: int, text: str) -> Place:
    return Place(episode.task, episode.seed, index + 1, text[-_EXCERPT:].strip())
