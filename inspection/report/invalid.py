"""Sorts the invalid responses by cause, and finds the legal action that each probably meant."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml

from inspection.report.reading import Episode, Place, Turn, place_of

_DATA = yaml.safe_load(Path(__file__).with_name("invalid.yaml").read_text(encoding="utf-8"))
CHANGES: dict[str, str] = _DATA["causes"]
"""Causes of invalid responses, with the change that each suggests."""
_FILLER = frozenset(_DATA["filler_words"].split())
_SEPARATOR = re.compile(r"[,;\n]|->|→|\band\b|\bthen\b")
_MAX_CHARACTERS = 200
_MAX_WORDS = 12
"""Words of a line in which an action is looked for."""
_MIN_SIMILARITY = 0.85


@lru_cache(maxsize=20_000)
def find_match(candidate: str, actions: tuple[str, ...]) -> str | None:
    """Return the legal action that the candidate probably means; None if there is none, or more than one.

    Of several actions in one answer, it is the first. Otherwise the first line is compared: without filler words, with
    other words before or after the action, and misspelt.
    """
    text = candidate.strip()[:_MAX_CHARACTERS]
    names = {_plain(action): action for action in actions}
    names.pop("", None)
    if "\ufffd" in text:  # a broken character
        return None
    for part in _SEPARATOR.split(text.lower()):
        if _plain(part) in names:
            return names[_plain(part)]
    line = _plain(text.partition("\n")[0])
    if not line or not names:
        return None
    same = [name for name in names if _drop_filler(name) == _drop_filler(line)]
    if len(same) == 1:
        return names[same[0]]
    if inside := _find_inside(line, names):
        return names[inside]
    near = difflib.get_close_matches(line, list(names), n=2, cutoff=_MIN_SIMILARITY)
    return names[near[0]] if len(near) == 1 else None


def _find_inside(line: str, names: Iterable[str]) -> str | None:
    """Return the action with which a short line begins or ends; the longest, if one contains the others."""
    if len(line.split()) > _MAX_WORDS:
        return None
    found = [name for name in names if line.startswith(name + " ") or line.endswith(" " + name)]
    longest = max(found, key=len, default=None)
    return longest if longest and all(name in longest for name in found) else None


def _plain(text: str) -> str:
    """Lower case; letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w' ]|_", " ", text.lower()).replace("'", "").split())


def _drop_filler(text: str) -> str:
    return " ".join(word for word in text.split() if word not in _FILLER)


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
    """Find the cause of every invalid response; `actions` are legal where the observation lists no commands."""
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
