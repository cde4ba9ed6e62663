"""Reasoning of the scripted player: how many pushes are left, which box is next, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence

from envs.sokoban.board import Room, State
from envs.sokoban.solver import Push, moves_of


def explain_pushes(room: Room, state: State, pushes: Sequence[Push] | None) -> str:
    """Return the reasoning behind the first move of the pushes that solve the room; None means that none are known."""
    if not pushes:
        return "I find no way to bring all boxes onto targets, so I wait."
    first = pushes[0]
    moves = moves_of(room, state, pushes[:1])
    how = "I stand behind it" if len(moves) == 1 else "First I walk behind it"
    left = f"{len(pushes)} push{'es are' if len(pushes) > 1 else ' is'} left"
    return f"{left}. Next I push the box {_where(room, state.player, first.box)} {towards(first.direction)}. {how}."


def _where(room: Room, player: int, cell: int) -> str:
    (y, x), (y0, x0) = divmod(cell, room.width), divmod(player, room.width)
    across = f"{abs(x - x0)} to the {'right' if x > x0 else 'left'}" if x != x0 else ""
    along = f"{abs(y - y0)} {'down' if y > y0 else 'up'}" if y != y0 else ""
    return f"({', '.join(filter(None, (across, along)))} from me)"


def towards(direction: str) -> str:
    """Return the words for a move: up, down, to the left, to the right."""
    return direction if direction in ("up", "down") else f"to the {direction}"
