"""The grid and its moves: push, enter, read the rules again.

The semantics are those of the published baba-is-ai environment (MIT), which BALROG uses. Three of them are unexpected:
a cell is a stack of which only the top piece counts; with several YOU pieces the last one to move decides whether the
step wins or loses; `noun is noun` covers a thing with the new one instead of removing it.
"""

from __future__ import annotations

from typing import NamedTuple

from envs.babaisai.rules import BORDER, Cell, Piece, Rules, make_rules, read_rules, thing

DIRECTIONS: dict[str, tuple[int, int]] = {"up": (0, -1), "right": (1, 0), "down": (0, 1), "left": (-1, 0)}
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
        inner_rows, inner_columns = range(1, height - 1), range(1, width - 1)
        self.interior = [(y * width + x, x, y) for y in inner_rows for x in inner_columns]
        self.cells: list[Cell] = [(BORDER,)] * (width * height)
        for index, _, _ in self.interior:
            self.cells[index] = ()
        self.rules: Rules = make_rules(())
        self.facing: dict[Piece, str] = {}
        self._moved: set[Piece] = set()
        self._text_moved = False

    def copy(self) -> World:
        """Return an independent copy with the same pieces, cheap enough for search."""
        twin = World.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.cells = self.cells.copy()
        twin.facing = self.facing.copy()
        twin._moved = self._moved.copy()
        return twin

    def top(self, x: int, y: int) -> Piece | None:
        cell = self.cells[y * self.width + x]
        return cell[-1] if cell else None

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
        """Return the (x, y) of the first visible thing that the last YOU rule names; None if there is none."""
        speaker = self.rules.speaker
        if speaker is None:
            return None
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
        you, moved = self.rules.you, self._moved
        for index, _, _ in self.interior:
            cell = self.cells[index]
            if cell and cell[-1].name in you:
                moved.discard(cell[-1])
        self._text_moved = False
        for index, _, _ in self.interior:
            cell = self.cells[index]  # read here: an earlier mover may have changed it
            if not cell or cell[-1].name not in you or cell[-1].kind != "thing" or cell[-1] in moved:
                continue
            self.facing[cell[-1]] = direction
            moved.add(cell[-1])
            outcome = self._move(index, stride)
        if self._text_moved:
            self.reread()
        for old, new in self.rules.swaps:
            for index, _, _ in self.interior:
                cell = self.cells[index]
                if cell and cell[-1].name == old and cell[-1].kind == "thing":
                    self.cells[index] = (*cell, thing(new))
        return outcome

    def _move(self, index: int, stride: int) -> Outcome:
        """Move the top piece of a cell by one cell, pushing pieces ahead of it if possible."""
        cells, rules = self.cells, self.rules
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
