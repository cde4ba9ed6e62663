"""The episodes of one column (a run, a setting and a player), and what several of its numbers need."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from inspection.report.invalid import Place, Rejected, find_match
from inspection.report.reading import EXCERPT, Episode, Turn

SAMPLED_TURNS = 4000  # turns that the measures that compare texts look at
LOOP = 3
"""Turns in a row with the same action, and an observation that stays the same, that count as a loop."""
_REPEATS = 2  # earlier occurrences of an attempt after which it counts as repeated
_MAX_CANDIDATES = 20_000


class Played:
    """The episodes of one column in the order in which they were played."""

    def __init__(self, player: str, episodes: Sequence[Episode]) -> None:
        self.player, self.episodes = player, episodes
        self.turns = [turn for episode in episodes for turn in episode.turns]
        self.valid = [turn for turn in self.turns if turn.valid]
        self.reasoned = [turn for turn in self.turns if turn.words]
        self.by_task: dict[str, list[Episode]] = {}
        for episode in episodes:
            self.by_task.setdefault(episode.task, []).append(episode)
        self.env_paths = list(dict.fromkeys(episode.env_path for episode in episodes))
        """Environments of the episodes; several if tasks are mixed."""
        self.actions = Counter(turn.executed for turn in self.valid)
        """Executed actions of valid responses."""
        self.is_scripted = player in ("random", "expert") and not self.reasoned
        """Whether a scripted player gave the responses, without reasoning."""
        self.looped = self.stuck = 0
        """Turns in loops, and turns that repeat an earlier attempt, of episodes that were not won."""
        self.loops: list[tuple[int, Place]] = []
        for episode in episodes:
            if not episode.success:
                self._count_repeats(episode)

    def _count_repeats(self, episode: Episode) -> None:
        """Count turns in loops, and turns that repeat an earlier attempt: an action in an observation.

        A stretch of equal attempts that ends in another observation had an effect, such as a walk through an empty
        room, and counts as one attempt.
        """
        seen: Counter[tuple[int, str]] = Counter()
        groups = itertools.groupby(episode.turns, lambda turn: (turn.state, turn.executed))
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
                    place = Place(episode.task, episode.seed, start + 1, f"{executed[:EXCERPT]} x {length}")
                    self.loops.append((length, place))
            start += length

    def sample(self) -> list[Turn]:
        """Return up to `SAMPLED_TURNS` turns in the order in which they were played."""
        if len(self.turns) <= SAMPLED_TURNS:
            return self.turns
        return [self.turns[k] for k in sorted(random.Random(0).sample(range(len(self.turns)), SAMPLED_TURNS))]

    def by_words(self) -> list[tuple[int, Place]]:
        """Return the number of words of each reasoning and its place, the shortest first."""
        found = [(turn.words, place) for turn, place in self._places() if turn.words]
        return sorted(found, key=lambda item: item[0])

    def rejected(self) -> list[Rejected]:
        """Return the invalid responses, those with the same text in place of the action together."""
        found: dict[tuple[Any, ...], Rejected] = {}
        for turn, place in self._places():
            if turn.valid:
                continue
            parts, cut = turn.parts, bool(turn.cut)
            commands = turn.commands if find_match(parts.action, turn.commands) else ()
            candidate = f"{parts.action}\n{parts.after}".strip()[:EXCERPT]
            key = (candidate.lower(), parts.has_marker, cut, commands)
            if key not in found and len(found) >= _MAX_CANDIDATES:
                key = ("", True, cut, ())
            new = Rejected(candidate, parts.has_marker, turn.asked_for_marker, cut, commands, place)
            found.setdefault(key, new).count += 1
        return list(found.values())

    def _places(self) -> list[tuple[Turn, Place]]:
        numbered = [(e, number, turn) for e in self.episodes for number, turn in enumerate(e.turns, 1)]
        return [(turn, Place(e.task, e.seed, number, turn.ending)) for e, number, turn in numbered]
