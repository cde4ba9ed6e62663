"""The grid as text, exactly as in BALROG, including its singular "step" to the left and up."""

from __future__ import annotations

from functools import cache

from envs.babaisai.world import World

YOU_BROKEN = "The [...] IS YOU rule was broken, so nothing could move and the level was reset."


def describe(world: World, speaker: tuple[int, int]) -> str:
    """Active rules, then every visible thing and text block row by row, offset from the speaker's (x, y)."""
    x0, y0 = speaker
    cells = world.cells
    lines = []
    for index, x, y in world.interior:
        cell = cells[index]
        if cell and cell[-1].label is not None:
            lines.append(_line(cell[-1].label, x - x0, y - y0))
    rules = "\n".join([f"{noun} is {prop}" for noun, prop in world.rules.listed])
    objects = "\n".join(lines)
    return f"Active rules:\n{rules}\n\nObjects on the map:\n{objects}"


@cache
def _line(label: str, dx: int, dy: int) -> str:
    """One object's line; BALROG lists the speaker itself as a blank line."""
    parts = []
    if dx:
        parts.append(f"{abs(dx)} {_steps(dx)} to the {'right' if dx > 0 else 'left'}")
    if dy:
        parts.append(f"{abs(dy)} {_steps(dy)} {'down' if dy > 0 else 'up'}")
    return f"{label} {' and '.join(parts)}" if parts else ""


def _steps(offset: int) -> str:
    # BALROG compares the signed offset, so distances to the left or up always read "step".
    return "steps" if offset > 1 else "step"
