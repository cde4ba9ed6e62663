"""The pieces on the grid: things, text blocks and the border. A piece is immutable; only its cell changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["thing", "noun", "is", "property", "border"]

THING_COLORS = {"ball": "green", "key": "blue", "door": "red", "wall": "grey", "baba": "white"}
"""Every thing, with the color it has unless a level chooses one."""

PROPERTIES = ("you", "win", "lose", "stop", "push")


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One piece, compared by identity: two red keys are two pieces.

    `label` is its name in observations, None for baba and the border, which are never listed.
    """

    kind: Kind
    name: str
    color: str | None = None
    label: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is a text block; those form rules and can always be pushed."""
        return self.kind in ("noun", "is", "property")


BORDER = Piece("border", "border", "grey")


def thing(name: str, color: str | None = None) -> Piece:
    """Make a thing (`key`, `baba`, ...); raises KeyError for an unknown name."""
    return Piece("thing", name, color or THING_COLORS[name], None if name == "baba" else name)


def text_block(word: str) -> Piece:
    """Make the block that shows `word`: a thing's name, `is`, or one of `PROPERTIES`.

    Raises:
        ValueError: no such word.
    """
    if word in THING_COLORS:
        kind: Kind = "noun"
    elif word == "is":
        kind = "is"
    elif word in PROPERTIES:
        kind = "property"
    else:
        raise ValueError(f"no text block says {word!r}; words: {', '.join([*THING_COLORS, 'is', *PROPERTIES])}")
    return Piece(kind, word, None, f"rule `{word}`")
