"""Sorts the invalid responses by cause, and finds the legal action that each probably meant."""

import difflib
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_DATA = yaml.safe_load(Path(__file__).with_name("invalid.yaml").read_text(encoding="utf-8"))
CAUSES: Mapping[str, str] = _DATA["near_matches"] | _DATA["others"]
"""Causes of invalid responses, with the change for each."""
FILLER = "filler words"
PLURAL = "plural or verb form"
AFTER = "words after the action"
SYNONYM = "synonym"
TYPO = "misspelt"
NO_LINE = "no ACTION line"
UNKNOWN = "unknown action"
ALIAS_KINDS = (FILLER, PLURAL, SYNONYM, TYPO)  # near matches that a table of aliases can catch

_FILLER = frozenset(_DATA["filler_words"].split())
_SYNONYMS = [(name, words.split()) for name, words in _DATA["synonyms"].items()]
_MOTION = frozenset({"go", "turn"})
_TAKES_OBJECT = frozenset({"pick", "drop", "toggle", "do"})
_MAX_CHARACTERS, _MAX_OBSERVED = 200, 50


class Match(NamedTuple):
    """A legal action and the kind of near match."""

    action: str
    kind: str


def find_match(candidate: str, actions: Sequence[str]) -> Match | None:
    """Return the legal action that the candidate probably means; None if there is none, or more than one."""
    text = candidate.strip()[:_MAX_CHARACTERS]
    if "\ufffd" in text:  # half a character: the rest of the response cannot be trusted either
        return None
    names = {_plain(action): action for action in actions if _plain(action)}
    unmarked = re.sub(r"[*`\"'_()\[\]{}<>]", " ", text.lower())
    parts = [_plain(part) for part in re.split(r"[,;\n]|->|→|\band\b|\bthen\b", unmarked)]
    named = [names[part] for part in parts if part in names]
    line = _plain(text.partition("\n")[0])
    if not line or not names:
        return None
    if len(named) > 1:
        return Match(named[0], "several actions in one answer")
    if line in names:
        return Match(names[line], AFTER if "\n" in text else "case, punctuation or markup")
    if (match := _by_words(line, names)) is not None:
        return match
    said = line
    for phrase, word in _DATA["phrases"].items():
        said = said.replace(phrase, word)
    meant = [_canonical(word) for word in said.split() if word not in _FILLER and not word.isdigit()]
    same = {action for name, action in names.items() if meant and _means(meant, name)}
    if len(same) == 1:
        return Match(same.pop(), SYNONYM)
    near = difflib.get_close_matches(line, list(names), n=2, cutoff=0.85)
    return Match(names[near[0]], TYPO) if len(near) == 1 else None


def _by_words(line: str, names: Mapping[str, str]) -> Match | None:
    bare = _drop_filler(line)
    # Without a final 's' or 'ing' on any word.
    stem = lambda text: " ".join(re.sub(r"(?<=\w\w)(?:ing|s)$", "", word) for word in text.split())
    for kind, form in ((FILLER, _drop_filler), (PLURAL, stem)):
        same = {action for name, action in names.items() if form(name) == form(line) or form(name) == form(bare)}
        if len(same) == 1:
            return Match(same.pop(), kind)
    longest = sorted(names, key=len, reverse=True)
    for name in longest:
        if line.startswith(name + " "):
            return Match(names[name], AFTER)
    inside = [name for name in longest if re.search(rf"\b{re.escape(name)}$", line)]
    return Match(names[inside[0]], "words before the action") if inside and len(line.split()) <= 12 else None


def _means(meant: Sequence[frozenset[str]], name: str) -> bool:
    """Whether the words mean the action: they agree but for verbs of motion, or add an object to a verb like `open`.

    The `up` of `pick up` may be missing, but no direction: `go` does not mean `go north`.
    """
    wanted = [_canonical(word) for word in name.split()]
    missing = [word for word in wanted if not any(word & other for other in meant)]
    extra = [word for word in meant if not any(word & other for other in wanted)]
    spare = _MOTION | ({"up"} if "up" in name.split() and not wanted[0] & _MOTION else set())
    if any(not word & spare for word in missing) or len(missing) == len(wanted):
        return False
    takes_object = bool(meant[0] & wanted[0] & _TAKES_OBJECT)
    return takes_object or all(word & _MOTION for word in extra)


def _plain(text: str) -> str:
    """Lower case; letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w' ]|_", " ", text.lower()).replace("'", "").split())


def _drop_filler(text: str) -> str:
    return " ".join(word for word in text.split() if word not in _FILLER and not word.isdigit())


def _canonical(word: str) -> frozenset[str]:
    """The groups of synonyms that contain the word, or the word itself."""
    return frozenset(name for name, others in _SYNONYMS if word == name or word in others) or frozenset({word})


@dataclass(frozen=True, slots=True)
class Place:
    """Where an example is; `turn` counts from 1, as the viewer does."""

    task: str
    seed: Any
    turn: int
    text: str


@dataclass
class Rejected:
    """Invalid responses with the same text in place of the action."""

    candidate: str
    """The text after the marker."""
    has_marker: bool
    asked: bool
    cut: bool
    commands: tuple[str, ...]
    place: Place
    count: int = 0


@dataclass(frozen=True)
class Alias:
    """A text that was rejected, the action that it means, and the kind of near match."""

    text: str
    action: str
    kind: str
    count: int


@dataclass(frozen=True)
class Rejections:
    """The invalid responses of one column."""

    causes: Mapping[str, int]
    aliases: Sequence[Alias]
    """Near matches of legal actions, the most frequent first."""
    unknown: Sequence[tuple[str, int]]
    examples: Mapping[str, Rejected]
    """The most frequent rejected response of each cause."""

    @property
    def catchable(self) -> int:
        """Responses that a translation would catch."""
        return sum(self.causes.get(kind, 0) for kind in _DATA["near_matches"])


def legal_actions(env_paths: Iterable[str], executed: Counter[str], given: Sequence[str] = ()) -> list[str]:
    """Return the legal actions: those given, else those of our environments, and of others the executed ones.

    The environment of a record is imported only if it is one of this package, because a data file must not run code.
    Empty if actions are free text.
    """
    if given:
        return list(given)
    known: list[Sequence[str]] = []
    for path in env_paths:
        known.append(())
        if re.fullmatch(r"envs\.\w+", path):
            with suppress(ImportError):
                known[-1] = getattr(importlib.import_module(path), "ACTIONS", ())
    seen = [action for action, _ in executed.most_common()] if len(executed) <= _MAX_OBSERVED else []
    return list(dict.fromkeys([*itertools.chain(*known), *(() if all(known) else seen)]))


def sort_rejections(rejected: Iterable[Rejected], actions: Sequence[str]) -> Rejections:
    """Find the cause of every invalid response."""
    causes: Counter[str] = Counter()
    aliases: Counter[tuple[str, str, str]] = Counter()
    unknown: Counter[str] = Counter()
    examples: dict[str, Rejected] = {}
    for answer in rejected:
        cause, action = _find_cause(answer, actions)
        text = " ".join(answer.candidate.lower().split())[:60]
        causes[cause] += answer.count
        if action is not None:
            aliases[(text, action, cause)] += answer.count
        elif cause == UNKNOWN:
            unknown[text] += answer.count
        if cause not in examples or answer.count > examples[cause].count:
            examples[cause] = answer
    found = [Alias(*key, count) for key, count in aliases.most_common()]
    return Rejections(dict(causes.most_common()), found, unknown.most_common(), examples)


def _find_cause(rejected: Rejected, actions: Sequence[str]) -> tuple[str, str | None]:
    if rejected.cut:
        return "cut at the length limit", None
    match = find_match(rejected.candidate, rejected.commands or actions)
    if match is not None:
        return match.kind, match.action
    if not rejected.candidate and not rejected.place.text:
        return "empty answer", None
    if (rejected.asked and not rejected.has_marker) or not rejected.candidate:
        return NO_LINE, None
    return UNKNOWN, None
