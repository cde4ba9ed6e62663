"""Sorts the invalid answers by cause: what a translation would catch, what was cut, what names no action."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inspection.report.tally import Rejected, Tally
from inspection.report.translations import KINDS, find_match

EMPTY = "empty answer"
CUT = "cut at the length limit"
NO_LINE = "no ACTION line"
UNKNOWN = "unknown action"
CAUSES = {
    EMPTY: "raise the length limit or change the stop strings; the model answers nothing",
    CUT: "raise the length limit, or ask for shorter reasoning",
    NO_LINE: "ask for the line ACTION: in the prompt, or imitate demonstrations first",
    **KINDS,
    UNKNOWN: "list the actions in the prompt, or offer these actions",
}
"""Causes of invalid answers, with the change for each."""

_OURS = re.compile(r"envs\.\w+")
_MOST_OBSERVED = 50


@dataclass(frozen=True)
class Alias:
    """A text that was rejected, the action that it means, and the kind of near match."""

    text: str
    action: str
    kind: str
    count: int


@dataclass(frozen=True)
class Rejections:
    """The invalid answers of one column."""

    causes: Mapping[str, int]
    aliases: Sequence[Alias]
    """Near matches of legal actions, the most frequent first."""
    unknown: Sequence[tuple[str, int]]
    examples: Mapping[str, Rejected]
    """The most frequent rejected answer of each cause."""

    @property
    def catchable(self) -> int:
        """Answers that a translation would catch."""
        return sum(self.causes.get(kind, 0) for kind in KINDS)


def legal_actions(tally: Tally, given: Sequence[str] = ()) -> list[str]:
    """The legal actions: those given, else those of our own environments, and of others those that were executed.

    The environment of a record is imported only if it is one of this package, because a data file must not run code.
    Empty if actions are free text.
    """
    if given:
        return list(given)
    known = [_own_actions(path) for path in tally.env_paths]
    seen = [action for action, _ in tally.actions.most_common()] if len(tally.actions) <= _MOST_OBSERVED else []
    return list(dict.fromkeys([*itertools.chain(*known), *(() if all(known) else seen)]))


def _own_actions(path: str) -> Sequence[str]:
    """The actions of an environment of this package; empty if it has no fixed ones, or is not ours."""
    if not _OURS.fullmatch(path):
        return ()
    try:
        return list(getattr(importlib.import_module(path), "ACTIONS", ()))
    except ImportError:
        return ()


def sort_rejections(tally: Tally, actions: Sequence[str]) -> Rejections:
    """Find the cause of every invalid answer."""
    causes: Counter[str] = Counter()
    aliases: Counter[tuple[str, str, str]] = Counter()
    unknown: Counter[str] = Counter()
    examples: dict[str, Rejected] = {}
    for rejected in tally.rejected.values():
        cause, action = _find_cause(rejected, actions)
        causes[cause] += rejected.count
        if action is not None:
            aliases[(_shorten(rejected.candidate), action, cause)] += rejected.count
        elif cause == UNKNOWN:
            unknown[_shorten(rejected.candidate)] += rejected.count
        if cause not in examples or rejected.count > examples[cause].count:
            examples[cause] = rejected
    return Rejections(
        dict(causes.most_common()),
        [Alias(*key, count) for key, count in aliases.most_common()],
        unknown.most_common(),
        examples,
    )


def _find_cause(rejected: Rejected, actions: Sequence[str]) -> tuple[str, str | None]:
    """The cause, and the action that was probably meant."""
    match = find_match(rejected.candidate, rejected.commands or actions)
    if rejected.cut:
        return CUT, None
    if match is not None:
        return match.kind, match.action
    if not rejected.candidate and not rejected.place.text:
        return EMPTY, None
    if (rejected.asked and not rejected.has_marker) or not rejected.candidate:
        return NO_LINE, None
    return UNKNOWN, None


def _shorten(text: str) -> str:
    return " ".join(text.lower().split())[:60]


def alias_place(tally: Tally) -> str:
    """Where the environment keeps its aliases."""
    path = next(iter(tally.env_paths), "") if len(tally.env_paths) == 1 else ""
    if path == "envs.crafter":
        return "`_SYNONYMS` in `envs/crafter/vocabulary.py`"
    name = f"`{path}`" if re.fullmatch(r"[\w./ -]{1,100}", path) else "the environment"
    return f"the method `translate` of {name}"
