"""BabaIsAI as a text game: BALROG's 40 tasks, without the original package.

Text, rewards and endings equal BALROG's for the same seed and actions, with two exceptions. When no
YOU rule is left, BALROG prints a Python object; this game says so in a sentence and shows the next
level. And the 100th step is `truncated` unless `preset: balrog` is set; BALROG reports
`terminated`, as after a loss.

The scripted player, for demonstrations and to check that levels can be won, is a best-first search
over pushes. A node is a world right after a push. Walking without a push does not change the world,
so only pushes branch. Worlds with several YOU things or with `noun is noun` rules are not searched.
"""

import heapq
import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from envs.babaisai.levels import find_task, make_level
from envs.babaisai.world import BORDER, DIRECTIONS, Cell, World, draw_world
from envs.errors import EnvironmentFault
from envs.text_game import ANSWER_FORMAT, Frame, GameSettings, PlannedGame, offset_in_words, towards

ACTIONS = {
    "idle": "stay where you are for this turn",
    "up": "go one step up",
    "right": "go one step to the right",
    "down": "go one step down",
    "left": "go one step to the left",
}
YOU_BROKEN = "The [...] IS YOU rule was broken, so nothing could move and the level was reset."
Plan = list[str]
"""Moves that win."""
_GUIDANCE = 3
"""Weight of the estimated remaining distance against the steps made; above 1 is faster, with longer
plans."""
_FAR = 30
"""Distance assumed if no block could complete a win rule."""
_LOCKED = 6
"""Extra distance while something is STOP."""


class BabaIsAISettings(GameSettings):
    """Settings of BabaIsAI."""

    binary_reward: bool = True
    """Replace every positive reward by 1; the game's own reward falls with the number of steps."""


class BabaIsAI(PlannedGame):
    """One BabaIsAI episode. Breaking the last YOU rule leads to the next level of the same seed.

    That level has all its steps, so only the run's `max_turns` bounds an episode that breaks one
    rule after another.
    """

    settings: BabaIsAISettings
    settings_model = BabaIsAISettings
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = ANSWER_FORMAT.replace("one allowed action", f"one of {', '.join(ACTIONS)}")
    actions = ACTIONS
    default_action = "idle"
    max_steps = 100

    def __init__(self, task: str, seed: int, settings: BabaIsAISettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self._task = find_task(task)
        self._text = ""
        self._plans: dict[tuple[Cell, ...], Plan] = {}
        self.world: World

    def start(self) -> Frame:
        # NumPy's legacy generator is seeded with 32 bits.
        self._rng = np.random.RandomState(self.seed % 2**32)
        self._next_level()
        return self._frame(self._text)

    def play(self, action: str) -> Frame:
        won = lost = broken = False
        if action in DIRECTIONS:
            won, lost = self.world.step(action)
            broken = not self._look()
        reward = -1.0 if lost else 0.0
        if won:
            reward = 1 - 0.9 * (self._turns / self.max_steps)
        late = self._turns >= self.max_steps
        ended = won or lost or (late and self.settings.preset == "balrog")
        if broken:
            self._next_level()
        return self._frame(
            f"{YOU_BROKEN}\n\n{self._text}" if broken else self._text,
            reward=reward,
            terminated=ended,
            truncated=late and not ended,
            progression=float(won),
            metrics={"you_rule_broken": float(broken)},
        )

    def translate(self, candidate: str) -> str | None:
        words = candidate.lower().replace("_", " ")
        return words if words in ACTIONS else None

    def explain(self) -> str:
        """Return the reasoning behind `advice`: what wins, where it is, and the purpose of the next
        push."""
        winners = [noun for noun, prop in self.world.rules.listed if prop == "win"]
        goal = f"{winners[0]} is win, but I see none." if winners else "Nothing is win yet."
        for noun in reversed(winners):
            if line := re.search(rf"^{noun} (?!is ).*", self._text, re.MULTILINE):
                goal = f"{noun} is win, and I see {line[0]}."
        plan = self.plan()
        if not plan:
            return f"{goal} I find no way to win from here, so I wait."
        return f"{goal} {_purpose(self.world, plan)} go one step {towards(plan[0])}."

    def render(self) -> np.ndarray:
        """Draw the level as a uint8 array (32 * height, 32 * width, 3)."""
        return np.asarray(draw_world(self.world))

    def plan(self) -> Plan:
        """Return moves that win from here. The rest of the plan is kept for the state after its
        first move."""
        world = self.world
        here = tuple(world.cells)
        if here not in self._plans:
            self._plans[here] = find_plan(world) or []
        plan = self._plans[here]
        if plan:
            after = world.copy()
            after.step(plan[0])
            self._plans[tuple(after.cells)] = plan[1:]
        return plan

    def _next_level(self) -> None:
        """Draw the next level; steps are counted from zero again, as in BALROG."""
        self.world = make_level(self._task, self._rng)
        self._turns = self._whole_way = 0
        self._plans.clear()
        if not self._look():
            raise EnvironmentFault(
                f"BabaIsAI task {self.task!r}, seed {self.seed}: nothing is YOU in the drawn level"
            )

    def _look(self) -> bool:
        """Describe the world in `_text`; False, leaving the old text, if no YOU thing is
        visible."""
        speaker = self.world.find_speaker()
        if speaker is not None:
            self._text = describe(self.world, speaker)
        return speaker is not None

    def _frame(self, text: str, **outcome: Any) -> Frame:
        return Frame(
            long_term=text, image=draw_world(self.world) if self.settings.vlm else None, **outcome
        )


SETTINGS = BabaIsAISettings
DEFAULT_TASK = "goto_win"
build_env = BabaIsAI.from_sample
expert_action = BabaIsAI.advice
explain_action = BabaIsAI.explain


def describe(world: World, speaker: tuple[int, int]) -> str:
    """List the active rules, then every visible thing and text block row by row, offset from the
    speaker's (x, y)."""
    x0, y0 = speaker
    lines = []
    for index, x, y in world.interior:
        cell = world.cells[index]
        if cell and cell[-1].label is not None:
            lines.append(_describe_piece(cell[-1].label, x - x0, y - y0))
    rules = "\n".join(map(" is ".join, world.rules.listed))
    return f"Active rules:\n{rules}\n\nObjects on the map:\n" + "\n".join(lines)


@cache
def _describe_piece(label: str, dx: int, dy: int) -> str:
    """Return one line, blank for the speaker. BALROG compares signed offsets, so left and up say
    "step"."""
    right = "steps to the right" if dx > 1 else "step to the right"
    down = "steps down" if dy > 1 else "step down"
    place = offset_in_words(dx, dy, ("step to the left", right, "step up", down), " and ")
    return f"{label} {place}" if place else ""


def _purpose(world: World, plan: Plan) -> str:
    """Say what the plan's first push is, and which change of the rules comes first."""
    world, rules = world.copy(), set(world.rules.listed)
    pushed = ""
    for number, move in enumerate(plan):
        x, y = world.find_speaker() or (0, 0)
        dx, dy = DIRECTIONS[move]
        ahead = world.top(x + dx, y + dy)
        if (
            not pushed
            and ahead is not None
            and ahead.label is not None
            and world.rules.moves_when_pushed(ahead)
        ):
            pushed = f"{'I walk to where I can push' if number else 'I push'} {ahead.label} {towards(move)}"
        world.step(move)
        now = set(world.rules.listed)
        if now != rules:
            made = now - rules
            broken = rules - now
            return f"{pushed} to {'make' if made else 'break'} {' is '.join(min(made or broken))}. Next: I"
    return f"{pushed} out of the way. Next: I" if pushed else "Nothing has to be pushed, so I"


def find_plan(world: World, max_nodes: int = 4000) -> Plan | None:
    """Return moves that win from here; None if `max_nodes` expanded nodes do not lead to a win."""
    start = _locate_you(world)
    if start is None:
        return None
    ticket = count()
    frontier = [(0, next(ticket), 0, world, start, [])]
    seen: set[tuple[tuple[Cell, ...], int]] = set()
    for _ in range(max_nodes):
        if not frontier:
            return None
        _, _, cost, world, start, plan = heapq.heappop(frontier)
        paths, goal = _walk(world, start)
        if goal is not None:
            return plan + goal
        key = (tuple(_without(world, start).cells), min(paths))
        if key in seen:
            continue
        seen.add(key)
        for moves, after, place, won in _pushes(world, start, paths):
            if won:
                return plan + moves
            if place is not None:
                spent = cost + len(moves)
                rank = spent + _GUIDANCE * _distance(after)
                heapq.heappush(frontier, (rank, next(ticket), spent, after, place, plan + moves))
    return None


def _locate_you(world: World) -> int | None:
    """Return the index of the only visible YOU thing; None unless there is one, and no thing turns
    into another."""
    if world.rules.swaps:
        return None
    places = [
        index for index, top in world.tops() if top.kind == "thing" and top.name in world.rules.you
    ]
    return places[0] if len(places) == 1 else None


def _without(world: World, place: int) -> World:
    floor = world.copy()
    floor.cells[place] = floor.cells[place][:-1]
    return floor


def _walk(world: World, start: int) -> tuple[dict[int, Plan], Plan | None]:
    """Return shortest paths to all cells reachable without a push, and the path to a win if there
    is one."""
    rules = world.rules
    cells = world.cells
    paths: dict[int, Plan] = {start: []}
    queue = [start]
    for place in queue:
        for direction, (dx, dy) in DIRECTIONS.items():
            ahead = place + dy * world.width + dx
            top = cells[ahead][-1] if cells[ahead] else None
            if ahead in paths or (top and (rules.moves_when_pushed(top) or not rules.lets_in(top))):
                continue
            if top and top.name in rules.win:
                return paths, [*paths[place], direction]
            if top is None or top.name not in rules.lose:
                paths[ahead] = [*paths[place], direction]
                queue.append(ahead)
    return paths, None


def _pushes(
    world: World, start: int, paths: dict[int, Plan]
) -> Iterator[tuple[Plan, World, int | None, bool]]:
    """Yield all possible pushes: (moves, world afterwards, index of YOU or None if the search ends
    there, won)."""
    you = world.cells[start][-1]
    floor = _without(world, start)
    for place, path in paths.items():
        before = floor.copy()
        before.cells[place] += (you,)
        for direction, (dx, dy) in DIRECTIONS.items():
            ahead = before.cells[place + dy * world.width + dx]
            if not ahead or not world.rules.moves_when_pushed(ahead[-1]):
                continue
            after = before.copy()
            outcome = after.step(direction)
            if after.cells == before.cells and not outcome.won:
                continue
            where = None if outcome.lost else _locate_you(after)
            yield [*path, direction], after, where, outcome.won


def _distance(world: World) -> int:
    """Estimate the pushes needed until something reachable is WIN; may overestimate."""
    locked = _LOCKED if world.rules.stop else 0
    tops = dict(world.tops())
    present = {top.name for top in tops.values() if top.kind == "thing"} - world.rules.you
    if present & world.rules.win:
        return locked
    nouns = [index for index, top in tops.items() if top.kind == "noun" and top.name in present]
    gaps = []
    for index, top in tops.items():
        if top.kind != "property" or top.name != "win":
            continue
        for stride in (1, world.width):  # where a noun would complete `noun is win`
            link = tops.get(index - stride)
            slot = index - 2 * stride
            if link is not None and link.kind == "is" and world.cells[slot] != (BORDER,):
                gaps += [world.gap(slot, noun) for noun in nouns]
    return min(gaps, default=_FAR) + locked
