"""Reasoning of the scripted player: what wins, where it is, and the purpose of the plan's next push."""

from __future__ import annotations

from collections.abc import Sequence

from envs.babaisai.world import DIRECTIONS, World


def explain_plan(world: World, observation: str, plan: Sequence[str]) -> str:
    """Return the reasoning behind the first move of a plan that wins from here; `observation` is the world as text."""
    if not plan:
        return f"{_goal(world, observation)} I find no way to win from here, so I wait."
    return f"{_goal(world, observation)} {_purpose(world, plan)} go one step {_name(plan[0])}."


def _goal(world: World, observation: str) -> str:
    """Say which thing wins now and where it is visible."""
    winners = [noun for noun, prop in world.rules.listed if prop == "win"]
    for noun in winners:
        for line in observation.splitlines():
            if line.startswith(f"{noun} ") and not line.startswith(f"{noun} is "):
                return f"{noun} is win, and I see {line}."
    return f"{winners[0]} is win, but I see none." if winners else "Nothing is win yet."


def _purpose(world: World, plan: Sequence[str]) -> str:
    """Say what the next push is and which rule it helps to make or break, or that no push is needed.

    The text goes on with the next step.
    """
    push = _next_push(world, plan)
    if push is None:
        return "Nothing has to be pushed, so I"
    number, label, direction = push
    begin = "I push" if number == 0 else "I walk to where I can push"
    return f"{begin} {label} {_name(direction)}{_rule_change(world, plan)}. Next:"


def _next_push(world: World, plan: Sequence[str]) -> tuple[int, str, str] | None:
    """Return the first push of the plan: its number among the moves, the pushed piece, and the direction."""
    world = world.copy()
    for number, move in enumerate(plan):
        place = world.find_speaker()
        if place is None:
            return None
        dx, dy = DIRECTIONS[move]
        ahead = world.top(place[0] + dx, place[1] + dy)
        if ahead is not None and ahead.label is not None and world.rules.moves_when_pushed(ahead):
            return number, ahead.label, move
        world.step(move)
    return None


def _rule_change(world: World, plan: Sequence[str]) -> str:
    """Say which change of the rules comes first in the plan, as the end of a sentence."""
    now, world = set(world.rules.listed), world.copy()
    for move in plan:
        world.step(move)
        made, broken = set(world.rules.listed) - now, now - set(world.rules.listed)
        if made:
            return f" to make {' is '.join(sorted(made)[0])}"
        if broken:
            return f" to break {' is '.join(sorted(broken)[0])}"
    return " out of the way"


def _name(direction: str) -> str:
    return direction if direction in ("up", "down") else f"to the {direction}"
