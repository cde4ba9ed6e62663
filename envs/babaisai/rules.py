"""The pieces on the grid, and the active rules, which are read from its text blocks.

A piece is immutable; only its cell changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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


Cell = tuple[Piece, ...]
"""Pieces stacked in one cell, top last; only the top one is visible and takes part in rules and moves."""


@dataclass(frozen=True)
class Rules:
    """Active rules in reading order: `listed` (noun, property) and `swaps` (noun, noun that replaces it).

    `you`, `win`, `lose`, `stop`, `push` hold the names of the things with that property.
    """

    listed: tuple[tuple[str, str], ...]
    swaps: tuple[tuple[str, str], ...]
    you: frozenset[str]
    win: frozenset[str]
    lose: frozenset[str]
    stop: frozenset[str]
    push: frozenset[str]

    @property
    def speaker(self) -> str | None:
        """The thing from whose position observations are described: the subject of the last YOU rule."""
        return next((noun for noun, prop in reversed(self.listed) if prop == "you"), None)

    def moves_when_pushed(self, piece: Piece) -> bool:
        return piece.is_text or (piece.kind == "thing" and piece.name in self.push)

    def lets_in(self, piece: Piece) -> bool:
        """Whether another piece may enter this one's cell."""
        return piece.kind == "thing" and piece.name not in self.stop


@lru_cache(maxsize=4096)
def make_rules(listed: tuple[tuple[str, str], ...], swaps: tuple[tuple[str, str], ...] = ()) -> Rules:
    """Build `Rules` from the rules read; equal input returns the same object."""
    named = {prop: frozenset(noun for noun, p in listed if p == prop) for prop in PROPERTIES}
    return Rules(listed, swaps, **named)


def read_rules(cells: Sequence[Cell], width: int) -> Rules:
    """Read all `noun is property` and `noun is noun`; for each `is` in row order, rightwards, then downwards."""
    listed: list[tuple[str, str]] = []
    swaps: list[tuple[str, str]] = []
    for index, cell in enumerate(cells):
        if not cell or cell[-1].kind != "is":
            continue
        for stride in (1, width):
            before, after = cells[index - stride], cells[index + stride]
            if not before or not after or before[-1].kind != "noun":
                continue
            if after[-1].kind == "property":
                listed.append((before[-1].name, after[-1].name))
            elif after[-1].kind == "noun":
                swaps.append((before[-1].name, after[-1].name))
    return make_rules(tuple(listed), tuple(swaps))
