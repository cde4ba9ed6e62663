"""Reasoning of the scripted player: the goal, whether the next thing is visible, and why this command."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BETWEEN = re.compile(r" (?:with|from|on|into|in) ")


def explain_plan(observation: str, plan: Sequence[str]) -> str:
    """Return the reasoning behind the first command of a plan that wins from here."""
    if not plan:
        return "I know no way to win from here, so I look around."
    command, goal = plan[0], plan[-1]
    # Walking serves the first command that is not a move.
    deed = next((step for step in plan if not step.startswith("go ")), goal)
    walking = command != deed
    parts = ["" if command == goal else f"My last step will be: {goal}.", _seen(observation, deed, walking)]
    if command == goal:
        parts.append(f"This is the last step: {command}.")
    elif walking:
        before = "That" if deed == goal else f"Before that comes: {deed}. It"
        parts.append(f"{before} cannot be done in this room: {command}.")
    else:
        parts.append(f"Before that comes: {command}.")
    return " ".join(part for part in parts if part)


def _seen(observation: str, deed: str, walking: bool) -> str:
    """Say whether the observation names the thing that the command is about."""
    thing = _BETWEEN.split(deed.partition(" ")[2])[0]
    if not thing or deed.startswith("go "):
        return ""
    if re.search(rf"\b{re.escape(thing)}\b", observation, re.IGNORECASE):
        return f"I see the {thing}."
    return f"I do not see the {thing}." if walking else ""
