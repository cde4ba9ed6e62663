"""The pieces, the rules that their text blocks form, the grid with its moves, and how it is drawn.

The semantics are those of the published baba-is-ai environment (MIT), which BALROG uses. Three of
them are unexpected: a cell is a stack of which only the top piece counts; with several YOU pieces
the last one to move decides whether the step wins or loses; `noun is noun` covers a thing with the
new one instead of removing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from envs.base import import_pillow

Kind = Literal["thing", "noun", "is", "property", "border"]

THING_COLORS = {"ball": "green", "key": "blue", "door": "red", "wall": "grey", "baba": "white"}
"""Every thing, with the color it has unless a level chooses one."""

PROPERTIES = ("you", "win", "lose", "stop", "push")


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """One piece, compared by identity. `label` is its name in observations; None: never listed."""

    kind: Kind
    name: str
    color: str | None = None
    label: str | None = None

    @property
    def is_text(self) -> bool:
        """Return whether it is a text block; those form rules and can always be pushed."""
        return self.kind in ("noun", "is", "property")


BORDER = Piece("border", "border", "grey")


def thing(name: str, color: str | None = None) -> Piece:
    """Make a thing (`key`, `baba`, ...); raises KeyError for an unknown name."""
    return Piece("thing", name, color or THING_COLORS[name], None if name == "baba" else name)


def text_block(word: str) -> Piece:
    """Make the block that shows a thing's name, `is` or one of `PROPERTIES`."""
    kind: Kind = "noun" if word in THING_COLORS else "is" if word == "is" else "property"
    return Piece(kind, word, None, f"rule `{word}`")


Cell = tuple[Piece, ...]
"""Pieces stacked in one cell, top last; only the top one is visible and takes part in rules and
moves."""


@dataclass(frozen=True)
class Rules:
    """Active rules in reading order: `listed` (noun, property) and `swaps` (noun, noun that
    replaces it).

    `you`, `win`, `lose`, `stop`, `push` hold the names of the things with that property.
    """

    listed: tuple[tuple[str, str], ...]
    swaps: tuple[tuple[str, str], ...]
    you: frozenset[str]
    win: frozenset[str]
    lose: frozenset[str]
    stop: frozenset[str]
    push: frozenset[str]

    def moves_when_pushed(self, piece: Piece) -> bool:
        return piece.is_text or (piece.kind == "thing" and piece.name in self.push)

    def lets_in(self, piece: Piece) -> bool:
        """Return whether another piece may enter this one's cell."""
        return piece.kind == "thing" and piece.name not in self.stop


@lru_cache(maxsize=4096)
def make_rules(
    listed: tuple[tuple[str, str], ...], swaps: tuple[tuple[str, str], ...] = ()
) -> Rules:
    """Build `Rules` from the rules read; equal input returns the same object."""
    return Rules(
        listed,
        swaps,
        **{prop: frozenset(noun for noun, p in listed if p == prop) for prop in PROPERTIES},
    )


def read_rules(cells: Sequence[Cell], width: int) -> Rules:
    """Read all `noun is property` and `noun is noun`; for each `is` in row order, rightwards, then
    downwards."""
    listed: list[tuple[str, str]] = []
    swaps: list[tuple[str, str]] = []
    for index, cell in enumerate(cells):
        if not cell or cell[-1].kind != "is":
            continue
        for stride in (1, width):
            before = cells[index - stride]
            after = cells[index + stride]
            if not before or not after or before[-1].kind != "noun":
                continue
            if after[-1].kind == "property":
                listed.append((before[-1].name, after[-1].name))
            elif after[-1].kind == "noun":
                swaps.append((before[-1].name, after[-1].name))
    return make_rules(tuple(listed), tuple(swaps))


DIRECTIONS: dict[str, tuple[int, int]] = {
    "up": (0, -1),
    "right": (1, 0),
    "down": (0, 1),
    "left": (-1, 0),
}
"""(dx, dy) of each direction; y grows downwards."""


class Outcome(NamedTuple):
    """Result of a step, by the rules that were active before it."""

    won: bool
    lost: bool


class World:
    """A walled grid of `width` x `height` cells, index = y * width + x."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        inner_rows = range(1, height - 1)
        inner_columns = range(1, width - 1)
        self.interior = [(y * width + x, x, y) for y in inner_rows for x in inner_columns]
        self.cells: list[Cell] = [(BORDER,)] * (width * height)
        for index, _, _ in self.interior:
            self.cells[index] = ()
        self.rules: Rules = make_rules(())
        self._moved: set[Piece] = set()
        self._text_moved = False

    def copy(self) -> World:
        """Return an independent copy with the same pieces, cheap enough for search."""
        twin = World.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.cells = self.cells.copy()
        twin._moved = self._moved.copy()
        return twin

    def top(self, x: int, y: int) -> Piece | None:
        cell = self.cells[y * self.width + x]
        return cell[-1] if cell else None

    def tops(self) -> Iterator[tuple[int, Piece]]:
        """Yield the index and the visible piece of each cell that is not empty, without the
        border."""
        for index, _, _ in self.interior:
            if self.cells[index]:
                yield index, self.cells[index][-1]

    def gap(self, one: int, other: int) -> int:
        """Return the steps between two cells."""
        (y, x) = divmod(one, self.width)
        (other_y, other_x) = divmod(other, self.width)
        return abs(x - other_x) + abs(y - other_y)

    def put(self, piece: Piece, x: int, y: int) -> None:
        """Put a piece on top of the cell; call `reread` when the level is complete."""
        self.cells[y * self.width + x] += (piece,)

    def lift(self, x: int, y: int) -> Piece:
        """Remove and return the top piece of a cell."""
        *rest, piece = self.cells[y * self.width + x]
        self.cells[y * self.width + x] = tuple(rest)
        return piece

    def reread(self) -> None:
        """Read the rules again from the grid."""
        self.rules = read_rules(self.cells, self.width)

    def find_speaker(self) -> tuple[int, int] | None:
        """Return the (x, y) of the first visible thing that the last YOU rule names; None if there
        is none."""
        speaker = next((noun for noun, prop in reversed(self.rules.listed) if prop == "you"), None)
        for index, x, y in self.interior:
            cell = self.cells[index]
            if cell and cell[-1].name == speaker and cell[-1].kind == "thing":
                return x, y
        return None

    def step(self, direction: str) -> Outcome:
        """Move every YOU piece one cell if nothing stops it, then apply the new rules."""
        dx, dy = DIRECTIONS[direction]
        stride = dy * self.width + dx
        outcome = Outcome(False, False)
        you = self.rules.you
        moved = self._moved
        for index, _, _ in self.interior:
            cell = self.cells[index]
            if cell and cell[-1].name in you:
                moved.discard(cell[-1])
        self._text_moved = False
        for index, _, _ in self.interior:
            cell = self.cells[index]  # read here: an earlier mover may have changed it
            if (
                not cell
                or cell[-1].name not in you
                or cell[-1].kind != "thing"
                or cell[-1] in moved
            ):
                continue
            moved.add(cell[-1])
            outcome = self._move(index, stride)
        if self._text_moved:
            self.reread()
        for old, new in self.rules.swaps:
            for index, top in self.tops():
                if top.name == old and top.kind == "thing":
                    self.cells[index] += (thing(new),)
        return outcome

    def _move(self, index: int, stride: int) -> Outcome:
        cells = self.cells
        rules = self.rules
        ahead = index + stride
        if cells[ahead] and rules.moves_when_pushed(cells[ahead][-1]):
            self._move(ahead, stride)
        free = not cells[ahead] or rules.lets_in(cells[ahead][-1])
        target = ahead if free else index
        entered = cells[target][-1] if cells[target] else None
        if free:
            piece = cells[index][-1]
            cells[index] = cells[index][:-1]
            cells[ahead] += (piece,)
            if piece.is_text or (cells[index] and cells[index][-1].is_text):
                self._text_moved = True
        if entered is None or entered.kind != "thing":
            return Outcome(False, False)
        return Outcome(entered.name in rules.win, entered.name in rules.lose)


TILE_PIXELS = 32
_COLORS = {
    "red": (220, 60, 60),
    "green": (70, 190, 90),
    "blue": (80, 120, 240),
    "grey": (120, 120, 120),
    "white": (245, 245, 245),
}


def draw_world(world: World) -> Any:
    """Draw the top pieces as an RGB PIL image, 32 x 32 pixels per cell; raises as
    `import_pillow`."""
    image = import_pillow().new("RGB", (world.width * TILE_PIXELS, world.height * TILE_PIXELS))
    for index, cell in enumerate(world.cells):
        if cell:
            y, x = divmod(index, world.width)
            top = cell[-1]
            tile = _draw_tile(top.kind, top.name, _COLORS[top.color or "white"])
            image.paste(tile, (x * TILE_PIXELS, y * TILE_PIXELS))
    return image


@cache
def _draw_tile(kind: Kind, word: str, color: tuple[int, int, int]) -> Any:
    """Draw a thing as its name in a frame of its color, a text block as dark letters on a light
    ground."""
    from PIL import Image, ImageDraw, ImageFont

    tile = Image.new("RGB", (TILE_PIXELS, TILE_PIXELS))
    pen = ImageDraw.Draw(tile)
    if kind == "border" or (kind == "thing" and word == "wall"):
        pen.rectangle((0, 0, 31, 31), fill=color)
        return tile
    ground, letters = (None, color) if kind == "thing" else ((245, 225, 160), (30, 30, 30))
    pen.rectangle((1, 1, 30, 30), fill=ground, outline=letters, width=2)
    pen.text(
        (16, 16), word.upper(), fill=letters, anchor="mm", font=ImageFont.load_default(size=10)
    )
    return tile
