"""Reads the active rules from the text blocks on the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from envs.babaisai.pieces import PROPERTIES, Piece

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
