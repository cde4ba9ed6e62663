"""Finds the legal action that an invalid answer probably meant, and says what kind of translation would catch it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPELLING = "case, punctuation or markup"
FILLER = "filler words"
PLURAL = "plural or verb form"
SEVERAL = "several actions in one answer"
AFTER = "words after the action"
AROUND = "words before the action"
SYNONYM = "synonym"
TYPO = "misspelt"
KINDS = {
    SPELLING: "strip case, quotes, markup and final punctuation before comparing",
    FILLER: "drop words such as 'the' and 'to' before comparing",
    PLURAL: "drop a final 's' before comparing",
    SEVERAL: "execute the first action, and say in the prompt that one action is allowed",
    AFTER: "accept an action that is followed by other words",
    AROUND: "accept an action that follows words such as 'go to' or 'I will'",
    SYNONYM: "map these words to the action",
    TYPO: "show the exact names in the prompt, or accept the nearest name",
}
"""Kinds of near matches, with the change that catches each."""
ALIAS_KINDS = (FILLER, PLURAL, SYNONYM, TYPO)
"""Kinds that a table of aliases can catch."""

_FILLER_WORDS = (
    "the a an to towards toward of your my i ill will should would now please then step steps one time times action "
    "next is it this that with in direction lets let me"
)
_FILLER = frozenset(_FILLER_WORDS.split())
_PHRASES = {"put down": "drop", "do nothing": "idle", "no op": "idle", "no operation": "idle", "stand still": "idle"}
_GROUPS = (
    ("go", "move walk head run advance proceed travel continue"),
    ("turn", "rotate face spin pivot"),
    ("forward", "forwards ahead straight"),
    ("up", "north upward upwards northward"),
    ("down", "south downward downwards southward"),
    ("left", "west leftward leftwards westward"),
    ("right", "east rightward rightwards eastward"),
    ("pick", "grab take get lift collect pickup"),
    ("drop", "release discard"),
    ("toggle", "open close unlock use activate interact press switch"),
    ("idle", "noop wait stay pass nothing rest"),
    ("make", "craft build create construct"),
    ("do", "attack hit fight interact drink eat mine chop cut collect gather"),
    ("look", "examine inspect observe"),
)
_MOTION = frozenset({"go", "turn"})
_TAKES_OBJECT = frozenset({"pick", "drop", "toggle", "do"})
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Match:
    """A legal action and the kind of near match."""

    action: str
    kind: str


def find_match(candidate: str, actions: Sequence[str]) -> Match | None:
    """The legal action that the candidate probably means; None if there is none, or more than one.

    Args:
        candidate: the text that was read as the action.
        actions: the legal actions, as the environment names them.
    """
    text = candidate.strip()[:_MOST_CHARACTERS]
    if "\ufffd" in text:  # half a character: the rest of the answer cannot be trusted either
        return None
    names = {_plain(action): action for action in actions if _plain(action)}
    parts = [part for part in re.split(r"[,;\n]|->|→|\band\b|\bthen\b", _plain_parts(text)) if part.strip()]
    named = [names[_plain(part)] for part in parts if _plain(part) in names]
    line = _plain(text.partition("\n")[0])
    if not line or not names:
        return None
    if len(named) > 1:
        return Match(named[0], SEVERAL)
    if line in names:
        return Match(names[line], AFTER if "\n" in text else SPELLING)
    return _by_words(line, names) or _by_synonyms(line, names) or _by_letters(line, names)


def _by_words(line: str, names: Mapping[str, str]) -> Match | None:
    bare = _drop_filler(line)
    for kind, form in ((FILLER, _drop_filler), (PLURAL, _stem)):
        same = {action for name, action in names.items() if form(name) == form(line) or form(name) == form(bare)}
        if len(same) == 1:
            return Match(same.pop(), kind)
    longest = sorted(names, key=len, reverse=True)
    for name in longest:
        if line.startswith(name + " "):
            return Match(names[name], AFTER)
    inside = [name for name in longest if re.search(rf"\b{re.escape(name)}$", line)]
    return Match(names[inside[0]], AROUND) if inside and len(line.split()) <= 12 else None


def _by_synonyms(line: str, names: Mapping[str, str]) -> Match | None:
    meant = _meanings(line)
    found = {action for name, action in names.items() if meant and _means(meant, name)}
    return Match(found.pop(), SYNONYM) if len(found) == 1 else None


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


def _by_letters(line: str, names: Mapping[str, str]) -> Match | None:
    near = difflib.get_close_matches(line, list(names), n=2, cutoff=0.85)
    return Match(names[near[0]], TYPO) if len(near) == 1 else None


def _plain_parts(text: str) -> str:
    """Lower case without markup, but with the punctuation that separates actions."""
    return re.sub(r"[*`\"'_()\[\]{}<>]", " ", text.lower())


def _plain(text: str) -> str:
    """Lower case; letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w' ]|_", " ", text.lower()).replace("'", "").split())


def _drop_filler(text: str) -> str:
    return " ".join(word for word in text.split() if word not in _FILLER and not word.isdigit())


def _stem(text: str) -> str:
    """Without a final 's' or 'ing' on any word."""
    return " ".join(re.sub(r"(?<=\w\w)(?:ing|s)$", "", word) for word in text.split())


def _meanings(line: str) -> list[frozenset[str]]:
    for phrase, word in _PHRASES.items():
        line = line.replace(phrase, word)
    return [_canonical(word) for word in line.split() if word not in _FILLER and not word.isdigit()]


def _canonical(word: str) -> frozenset[str]:
    """The groups of synonyms that contain the word, or the word itself."""
    return frozenset(name for name, others in _GROUPS if word == name or word in others.split()) or frozenset({word})
