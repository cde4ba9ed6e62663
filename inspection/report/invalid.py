"""Sorts the invalid responses by cause, and finds the legal action that each probably meant."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from inspection.report.reading import Episode, Place, Turn, place_of

CHANGES = {
    "near a legal action": "accept these forms in the environment (`translate`), or show the exact names in the prompt",
    "empty answer": "raise the length limit or change the stop strings; the model answers nothing",
    "cut at the length limit": "raise the length limit, or ask for shorter reasoning",
    "no ACTION line": "ask for the line ACTION: in the prompt, or imitate demonstrations first",
    "unknown action": "list the actions in the prompt, or offer these actions",
}
"""Causes of invalid responses, with the change that each suggests."""
_MAX_WORDS = 12
"""Words of a line in which an action is looked for."""
_MIN_SIMILARITY = 0.85


@lru_cache(maxsize=20_000)
def find_match(candidate: str, actions: tuple[str, ...]) -> str | None:
    """Return the legal action that the candidate's first line probably means; None if there is
    none.

    That is the first action that the line names among other words, or else the only one that is
    spelled nearly so.
    """
    words = _plain(candidate.partition("\n")[0]).split()[:_MAX_WORDS]
    line = f" {' '.join(words)} "
    names = {_plain(action): action for action in actions}
    named = [name for name in names if name and f" {name} " in line]
    if named:
        first = min(named, key=lambda name: (line.index(f" {name} "), -len(name)))
        return names[first]
    near = difflib.get_close_matches(line.strip(), list(names), n=2, cutoff=_MIN_SIMILARITY)
    return names[near[0]] if len(near) == 1 else None


def _plain(text: str) -> str:
    """Lower case; letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w' ]|_", " ", text.lower()).replace("'", "").split())


@dataclass
class Rejections:
    """The invalid responses of one column."""

    causes: Counter[str] = field(default_factory=Counter)
    aliases: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Near matches: the text and the legal action that it means."""
    unknown: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Place] = field(default_factory=dict)
    """The first response of each cause."""

    @property
    def translatable(self) -> int:
        """Responses that a translation would catch."""
        return self.aliases.total()


def sort_rejections(episodes: Iterable[Episode], actions: Sequence[str]) -> Rejections:
    """Find the cause of every invalid response; `actions` are legal where the observation lists no
    commands."""
    found = Rejections()
    for episode in episodes:
        for turn in episode.turns:
            if turn.valid:
                continue
            match = None if turn.cut else find_match(turn.action, turn.commands or tuple(actions))
            cause = "near a legal action" if match else _find_cause(turn)
            text = " ".join(turn.action.lower().split())
            found.causes[cause] += 1
            found.examples.setdefault(cause, place_of(episode, turn))
            if match:
                found.aliases[text, match] += 1
            elif cause == "unknown action":
                found.unknown[text] += 1
    return found


def _find_cause(turn: Turn) -> str:
    if turn.cut:
        return "cut at the length limit"
    if not turn.ending:
        return "empty answer"
    lacks_marker = turn.asked_for_marker and not turn.has_marker
    return "no ACTION line" if lacks_marker or not turn.action else "unknown action"
