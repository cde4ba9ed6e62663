"""The 40 tasks of BALROG, each as a set of properties of its levels."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from envs.errors import ConfigError

Layout = Literal["one_room", "two_rooms", "make_you", "make_wall_win"]
Side = Literal["left_anywhere", "right_anywhere", "anywhere"]


@dataclass(frozen=True)
class Task:
    """Contents of a task's levels."""

    layout: Layout
    break_win: bool = False
    """The win rule has one block displaced."""
    break_stop: bool = False
    """The stop rule has one block displaced."""
    other_thing: bool = False
    """There is a second thing."""
    spare_noun: Literal["other", "absent"] | None = None
    """A loose noun block names the second thing, or one that is absent."""
    second_win: bool = False
    """There is another complete win rule, for an absent thing."""
    side: Side = "left_anywhere"
    """Where the things lie."""


_DISTRACTORS: dict[str, dict[str, object]] = {
    "": {},
    "-distr_obj": {"other_thing": True},
    "-distr_rule": {"spare_noun": "other"},
    "-distr_obj_rule": {"other_thing": True, "spare_noun": "other"},
    "-distr_obj-irrelevant_rule": {"other_thing": True, "spare_noun": "absent"},
    "-distr_win_rule": {"other_thing": True, "spare_noun": "other", "second_win": True},
}
_BASES = {
    "goto_win": Task("one_room"),
    "make_win": Task("one_room", break_win=True),
    "two_room-goto_win": Task("two_rooms", break_stop=True),
    "two_room-break_stop-goto_win": Task("two_rooms", side="right_anywhere"),
    "two_room-maybe_break_stop-goto_win": Task("two_rooms", side="anywhere"),
    "two_room-make_win": Task("two_rooms", break_win=True, break_stop=True),
    "two_room-break_stop-make_win": Task("two_rooms", break_win=True, side="right_anywhere"),
}
_WITH_SECOND_WIN = ("two_room-goto_win", "two_room-make_win")
_FAR = {"other_thing": True, "spare_noun": "other", "side": "right_anywhere"}

TASKS: dict[str, Task] = {
    **{
        base + suffix: replace(task, **distractors)
        for base, task in _BASES.items()
        for suffix, distractors in _DISTRACTORS.items()
        if suffix != "-distr_win_rule" or base in _WITH_SECOND_WIN
    },
    "two_room-make_you": Task("make_you", **_FAR),
    "two_room-make_you-make_win": Task("make_you", break_win=True, **_FAR),
    "two_room-make_wall_win": Task("make_wall_win", break_win=True, **{**_FAR, "spare_noun": "absent"}),
}
"""Tasks by short name; BALROG's names have the prefix `env/`."""


def find_task(name: str) -> Task:
    """Return the task with this short name or BALROG name.

    Raises:
        ConfigError: unknown task; the message lists the nearest names.
    """
    short = name.removeprefix("env/")
    if short in TASKS:
        return TASKS[short]
    near = difflib.get_close_matches(short, TASKS, n=3, cutoff=0.4) or list(TASKS)[:3]
    raise ConfigError(f"unknown BabaIsAI task {name!r}; nearest: {', '.join(near)} ({len(TASKS)} tasks in all)")
