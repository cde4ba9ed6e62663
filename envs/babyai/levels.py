"""BabyAI's levels on PyPI's minigrid, all registered ones by id and the five mixed local tasks, and
what an agent sees.

The mixed tasks draw random numbers in the order of the fork that BALROG uses
(BartekCupial/Minigrid, `Level_MixedTrainLocal`), so the same seed gives the same world in both. The
agent's view is described in BALROG's words, directly from the grid. It is a square of `size` x
`size` cells with the agent in the middle of its lowest row, looking up; cell (i, j) is column i,
row j. The text equals that of the fork (`gen_graph`) without "You see ".
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers its levels with gymnasium
from gymnasium.envs.registration import load_env_creator
from minigrid.envs.babyai.core import roomgrid_level, verifier
from minigrid.envs.babyai.core.levelgen import LevelGen
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

from envs.errors import ConfigError, check_known


def describe_view(game: Any) -> str:
    """Return BALROG's description of what the agent of this MiniGrid game sees now, one fact per
    line."""
    grid, _ = game.gen_obs_grid()  # cells that the agent does not see are empty
    carried = game.carrying
    lines = [] if carried is None else [f"You carry a {carried.color} {carried.type}"]
    return "\n".join([*lines, *_describe_cells(grid, game.agent_view_size)])


def _describe_cells(grid: Any, size: int) -> Iterator[str]:
    """Yield the nearest visible walls in front, left and right, then the visible objects in scan
    order."""
    middle = size // 2
    last = size - 1
    sights = {
        "forward": [(middle, last - n) for n in range(1, size)],
        "left": [(middle - n, last) for n in range(1, middle + 1)],
        "right": [(middle + n, last) for n in range(1, middle + 1)],
    }
    for direction, cells in sights.items():
        seen = ((n, grid.get(i, j)) for n, (i, j) in enumerate(cells, 1))
        nearest = next(((n, cell) for n, cell in seen if cell is not None), None)
        if nearest is not None and nearest[1].type == "wall":
            yield f"a wall {_steps(nearest[0], direction)}"
    for i in range(size):
        for j in range(size):
            cell = grid.get(i, j)
            # The agent's own cell is not described, nor is an open door that it stands in.
            if cell is not None and cell.type != "wall" and (i, j) != (middle, last):
                yield f"{_name(cell)} {_place(i - middle, last - j)}"


def _name(cell: Any) -> str:
    if cell.type != "door":
        return f"a {cell.color} {cell.type}"
    # "a open" as in the recordings of the text fork.
    state = "open" if cell.is_open else "locked" if cell.is_locked else "closed"
    return f"a {state} {cell.color} door"


def _place(aside: int, ahead: int) -> str:
    """Return a position in words; `aside` grows to the right."""
    parts = [_steps(abs(aside), "right" if aside > 0 else "left")] if aside else []
    parts += [_steps(ahead, "forward")] if ahead else []
    return " and ".join(parts)


def _steps(count: int, direction: str) -> str:
    return f"{count} step{'s' if count > 1 else ''} {direction}"


MIXED_PREFIX = "BabyAI-MixedTrainLocal-v0/"
MIXED_GOALS = ("goto", "pickup", "open", "putnext", "pick_up_seq_go_to")
HELD_OUT = ("yellow box", "red key", "red door", "green ball", "grey door")
"""Never named in a mixed mission; the fork reserves them for tests of generalisation."""
DOOR_COLORS = ("yellow", "green", "blue", "purple")

# Level generation prints every world that it rejects; send that to the debug log instead of stdout.
roomgrid_level.__dict__["print"] = lambda *words: logging.getLogger(__name__).debug(
    " ".join(map(str, words))
)


def make_level(task: str, num_dists: int | None = None) -> RoomGridLevel:
    """Build a task's level, whose `reset(seed=...)` draws a world; raises ConfigError for an
    unknown task."""
    goal = task.removeprefix(MIXED_PREFIX)
    if goal in MIXED_GOALS:
        return _without_image(MixedLocalLevel)(goal, num_dists=num_dists or 0)
    names = level_names()
    if task not in names:
        known = [*MIXED_GOALS, *(MIXED_PREFIX + goal for goal in MIXED_GOALS), *names]
        examples = f"for example {', '.join(MIXED_GOALS)}, GoToObj"  # BALROG's fork of minigrid has no other levels
        check_known(task, known, f"unknown BabyAI task {task!r}", examples, cutoff=0.5)
    spec = gymnasium.spec(names[task])
    level_class: Any = load_env_creator(str(spec.entry_point))
    if num_dists is None:
        return _without_image(level_class)(**spec.kwargs)
    if "num_dists" not in inspect.signature(level_class.__init__).parameters:
        raise ConfigError(f"BabyAI task {task!r} has no env.num_dists; remove it")
    return _without_image(level_class)(**{**spec.kwargs, "num_dists": num_dists})


@functools.cache
def level_names() -> dict[str, str]:
    """Map the short (`GoToObj`) and full names of all registered BabyAI levels to the full ones."""
    ids = [name for name in gymnasium.registry if name.startswith("BabyAI-")]
    short = {name.removeprefix("BabyAI-").rpartition("-v")[0]: name for name in ids}
    return {**short, **{name: name for name in ids}}


@functools.cache
def _without_image(level_class: type[RoomGridLevel]) -> Callable[..., RoomGridLevel]:
    """Subclass a level to skip the encoding of its view at every step; the text is made from the
    grid itself."""
    return type(level_class.__name__, (level_class,), {"gen_obs": lambda self: {}})


class MixedLocalLevel(LevelGen):
    """One room (two for `open`), one of five goals, and `num_dists` more objects than the goal
    needs."""

    def __init__(self, goal: str, num_dists: int = 0) -> None:
        super().__init__(
            room_size=8,
            num_rows=1,
            num_cols=2 if goal == "open" else 1,
            num_dists=num_dists,
            locations=False,
            unblocking=False,
            implicit_unlock=False,
            action_kinds=(goal,),
        )

    def gen_mission(self) -> None:
        """Draw worlds until all objects are reachable and the mission names no held-out object."""
        self._rand_elem(self.action_kinds)
        while True:
            # Walls, doors and objects are drawn again, also in the first round, which draws door
            # positions.
            super(RoomGridLevel, self)._gen_grid(self.width, self.height)
            if self.action_kinds == ("open",):
                self.instrs, reachable = self._draw_open()
            else:
                self.instrs, reachable = self._draw_one_room(self.action_kinds[0])
            if reachable and not any(name in self.instrs.surface(self) for name in HELD_OUT):
                return

    def _draw_open(self) -> tuple[verifier.Instr, bool]:
        door_color = self._rand_elem(DOOR_COLORS)
        # PyPI's `add_locked_room` draws the color itself, after the door, which would shift all
        # later draws.
        while True:
            column = self._rand_int(0, self.num_cols)
            row = self._rand_int(0, self.num_rows)
            side = self._rand_int(0, 4)
            self.locked_room = self.get_room(column, row)
            if self.locked_room.neighbors[side] is not None:
                break
        self.add_door(column, row, side, color=door_color, locked=True)
        while self.get_room(column, row) is self.locked_room:
            column = self._rand_int(0, self.num_cols)
            row = self._rand_int(0, self.num_rows)
        self.add_object(column, row, "key", door_color)
        self.connect_all()
        for column in range(self.num_cols):
            if self.get_room(column, 0) is not self.locked_room:
                self.add_distractors(column, 0, num_distractors=self.num_dists, all_unique=False)
        self.place_agent()
        while self.room_from_pos(*self.agent_pos) is self.locked_room:
            self.place_agent()
        reachable = self.check_objs_reachable(raise_exc=False)
        return verifier.OpenInstr(
            verifier.ObjDesc("door", self._rand_elem([None, door_color]))
        ), reachable

    def _draw_one_room(self, goal: str) -> tuple[verifier.Instr, bool]:
        self.place_agent()
        count = self.num_dists + (1 if goal in ("goto", "pickup") else 2)
        objects = self.add_distractors(num_distractors=count, all_unique=False)
        reachable = self.check_objs_reachable(raise_exc=False)
        first = self._rand_elem(objects)
        target = verifier.ObjDesc(first.type, first.color)
        if goal == "goto":
            return verifier.GoToInstr(target), reachable
        if goal == "pickup":
            return verifier.PickupInstr(target), reachable
        kind = (first.type, first.color)
        twins = sum((thing.type, thing.color) == kind for thing in objects) > 1
        second: Any = self._rand_elem(objects)
        while not twins and (second.type, second.color) == kind:
            second = self._rand_elem(objects)
        other = verifier.ObjDesc(second.type, second.color)
        if goal == "putnext":
            return verifier.PutNextInstr(target, other), reachable
        pick_up = verifier.PickupInstr(target)
        go_to = verifier.GoToInstr(other)
        before = self._rand_elem(("Before", "After")) == "Before"
        return (
            verifier.BeforeInstr(pick_up, go_to) if before else verifier.AfterInstr(go_to, pick_up)
        ), reachable
