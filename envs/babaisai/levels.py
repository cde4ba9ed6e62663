"""The 40 tasks of BALROG, and their levels: where the rules, things and distractors lie.

Random numbers are drawn from NumPy's legacy generator in the order of the published baba-is-ai
environment (MIT), so the same seed gives the same level in both.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from envs.babaisai.world import Piece, World, text_block, thing
from envs.errors import check_known

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
    "two_room-make_wall_win": Task(
        "make_wall_win", break_win=True, **{**_FAR, "spare_noun": "absent"}
    ),
}
"""Tasks by short name; BALROG's names have the prefix `env/`."""


def find_task(name: str) -> Task:
    """Return the task with this short name or BALROG name; raises ConfigError for an unknown
    one."""
    short = name.removeprefix("env/")
    examples = f"there are {len(TASKS)}, such as {', '.join(_BASES)}"
    check_known(short, TASKS, f"unknown BabaIsAI task {name!r}", examples, cutoff=0.4)
    return TASKS[short]


_NAMES = ("ball", "key", "door")
_COLORS = ("red", "blue", "green")

Position = tuple[int, int]


class Area(NamedTuple):
    """A rectangle to draw cells from, clipped at the edge of the grid."""

    left: int
    top: int
    width: int
    height: int


# Two rooms of 13 x 9 with the dividing wall at x = 6.
_LEFT_PUSHABLE = Area(2, 3, 4, 3)
_RIGHT_PUSHABLE = Area(7, 3, 4, 3)
_LEFT_NARROW = Area(2, 3, 3, 3)
_RIGHT_NARROW = Area(8, 3, 3, 3)
_SIDES = {
    "left_anywhere": Area(1, 1, 4, 7),
    "right_anywhere": Area(7, 2, 4, 7),
    "anywhere": Area(1, 2, 11, 7),
}
_DIVIDE = 6
_RIGHT_EDGES: list[Position] = [(11, y) for y in range(2, 7)] + [(x, 7) for x in range(11, 7, -1)]
"""Cells from which a block cannot be pushed into a rule."""


class _Builder:
    def __init__(self, width: int, height: int, rng: np.random.RandomState) -> None:
        self.world = World(width, height)
        self.rng = rng

    def sample_things(self) -> list[Piece]:
        names = self.rng.choice(_NAMES, size=3, replace=False)
        colors = self.rng.choice(_COLORS, size=3, replace=True)
        return list(map(thing, names.tolist(), colors.tolist()))

    def put_rule(self, noun: str, prop: str, x: int, y: int) -> None:
        """Lay `noun is prop` rightwards from (x, y)."""
        for offset, word in enumerate((noun, "is", prop)):
            self.world.put(text_block(word), x + offset, y)

    def draw_empty(self, area: Area) -> Position:
        right = min(area.left + area.width, self.world.width)
        bottom = min(area.top + area.height, self.world.height)
        while True:  # every area has an empty cell
            x = self.rng.randint(area.left, right)
            y = self.rng.randint(area.top, bottom)
            if self.world.top(x, y) is None:
                return x, y

    def place(self, piece: Piece, area: Area) -> None:
        self.world.put(piece, *self.draw_empty(area))

    def displace(self, source: Position, target: Position) -> None:
        self.world.put(self.world.lift(*source), *target)

    def pick(self, positions: list[Position]) -> Position:
        return positions[self.rng.choice(len(positions))]


def make_level(task: Task, rng: np.random.RandomState) -> World:
    """Draw one level of the task; `rng` advances, so a second call gives the next level."""
    draw = {"one_room": _one_room, "two_rooms": _two_rooms}.get(task.layout, _make_rule)
    world = draw(task, rng)
    world.reread()
    return world


def _one_room(task: Task, rng: np.random.RandomState) -> World:
    build = _Builder(8, 8, rng)
    goal, other, absent = build.sample_things()
    build.put_rule("baba", "you", 1, 6)
    build.put_rule(goal.name, "win", 1, 1)
    if task.break_win:
        build.displace((1, 1), build.draw_empty(Area(2, 2, 4, 4)))
    if task.spare_noun:
        # At the edges the block cannot become part of a rule; corners count twice.
        edges = [(4, 6), (5, 6), (6, 6), (4, 1), (5, 1), (6, 1), *((6, y) for y in range(1, 7))]
        noun = absent if task.spare_noun == "absent" else other
        build.world.put(text_block(noun.name), *build.pick(edges))
    floor = Area(1, 2, 8, 8)
    build.place(thing("baba"), floor)
    build.place(goal, floor)
    if task.other_thing:
        build.place(other, floor)
    return build.world


def _divided(
    rng: np.random.RandomState, you: Position, stop: Position
) -> tuple[_Builder, Piece, Piece, Piece]:
    """Draw three things; build two rooms with the rules of baba (at `you`), wall (at `stop`) and
    the first thing."""
    build = _Builder(13, 9, rng)
    for y in range(1, 8):
        build.world.put(thing("wall"), _DIVIDE, y)
    goal, other, absent = build.sample_things()
    build.put_rule("baba", "you", *you)
    build.put_rule("wall", "stop", *stop)
    build.put_rule(goal.name, "win", 9, 1)
    return build, goal, other, absent


def _settle(build: _Builder, task: Task, area: Area, goal: Piece, other: Piece) -> None:
    """Place baba in the area and the things on their side."""
    build.place(thing("baba"), area)
    build.place(goal, _SIDES[task.side])
    if task.other_thing:
        build.place(other, _SIDES[task.side])


def _two_rooms(task: Task, rng: np.random.RandomState) -> World:
    build, goal, other, absent = _divided(rng, (1, 7), (1, 2))
    if task.spare_noun == "absent":
        build.place(text_block(absent.name), _RIGHT_PUSHABLE)
    elif task.spare_noun and task.other_thing:
        # The other thing could be won with, so its noun must stay out of reach.
        build.world.put(text_block(other.name), *build.pick(_RIGHT_EDGES))
    elif task.spare_noun:
        build.place(text_block(other.name), _RIGHT_PUSHABLE)
    if task.break_stop:
        aside = build.draw_empty(_LEFT_PUSHABLE)
        build.displace(build.pick([(2, 2), (3, 2)]), aside)
    if task.break_win:
        build.displace((9, 1), build.draw_empty(_RIGHT_PUSHABLE))
    _settle(build, task, _LEFT_PUSHABLE, goal, other)
    if task.second_win:
        build.put_rule(absent.name, "win", 9, 4)
    return build.world


def _make_rule(task: Task, rng: np.random.RandomState) -> World:
    """Two rooms in which a rule has to be made first."""
    if task.layout == "make_you":
        build, goal, other, _ = _divided(rng, (1, 6), (1, 1))
        build.place(text_block(other.name), _LEFT_NARROW)
        if task.break_win:
            build.displace((9, 1), build.draw_empty(_RIGHT_NARROW))
    else:
        build, goal, other, absent = _divided(rng, (1, 7), (2, 2))
        build.place(text_block(absent.name), _RIGHT_NARROW)
        build.displace((9, 1), build.pick(_RIGHT_EDGES))
    _settle(build, task, _LEFT_NARROW, goal, other)
    return build.world
