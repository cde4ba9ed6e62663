"""A scripted BabyAI player for demonstrations: minigrid's BabyAIBot, extended to continue after
other actions.

The bot plans once and expects to be followed; after other actions it may assert, loop or stop too
early. Here it is told every action taken. When its plan breaks, it makes a new one for the rest of
the mission from the current world. An object that the agent already carries is used or put down
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from minigrid.envs.babyai.core.verifier import AfterInstr, Instr, OpenInstr, PutNextInstr, SeqInstr
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError, DropSubgoal, GoNextToSubgoal

_MAX_SUBGOALS = 100
"""Limit of subgoals added within one turn; only a plan that goes in circles exceeds it."""
_BROKEN_PLAN = (AssertionError, AttributeError, DisappearedBoxError, IndexError, TypeError)
"""Errors of BabyAIBot when the world differs from what its plan assumes; it has no error class for
that."""


class Expert:
    """Advises on one running MiniGrid level. Call `watch` after every step; `advice` is optional at
    every turn."""

    def __init__(self, game: Any) -> None:
        self._game = game
        self._planner: _Planner | None = None
        self._advice: int | None = None
        self._seen: np.ndarray | None = None
        self._failures = self._pause = 0
        self._plan(game.actions.done)

    def advice(self) -> int:
        """Return the index of the action to take now; without a plan, walk on if possible, turning
        now and then."""
        if self._advice is not None:
            return self._advice
        game = self._game
        ahead = self._game.grid.get(*self._game.front_pos)
        free = ahead is None or ahead.can_overlap()
        return int(game.actions.forward if free and game.step_count % 5 else game.actions.right)

    def watch(self, action: int) -> None:
        """Record the action that the game executed; the game must still be running."""
        self._plan(self._game.actions(action))

    def _plan(self, action: Any) -> None:
        self._advice = self._continue(self._planner, action) if self._planner is not None else None
        if self._advice is not None:
            return
        if self._pause:
            self._pause -= 1
            return
        if self._planner is not None:
            self._seen = self._planner.vis_mask
        try:
            self._planner = _Planner(self._game, self._seen)
        except _BROKEN_PLAN:
            self._planner = None
        else:
            self._advice = self._continue(self._planner, self._game.actions.done)
        if self._advice is None:
            # Some worlds cannot be won (a key behind its own door), and every attempt to plan is
            # expensive.
            self._planner = None
            self._failures = self._failures + 1
            self._pause = 2**self._failures

    def _continue(self, planner: _Planner, action: Any) -> int | None:
        """Return the plan's next action after `action`; None if the plan has broken or ended."""
        try:
            suggestion = planner.replan(action)
        except _BROKEN_PLAN:
            return None
        return None if suggestion == self._game.actions.done else int(suggestion)


class _Planner(BabyAIBot):
    """BabyAIBot that can start in mid-episode, knowing the cells in `seen`, and raises instead of
    looping."""

    bfs_counter = bfs_step_counter = 0

    def __init__(self, game: Any, seen: np.ndarray | None) -> None:
        super().__init__(game)
        self.stack = _BoundedStack(self.stack)
        if seen is not None:
            self.vis_mask |= seen
        self._process_obs()
        first = _remaining(game.instrs)[:1]
        if game.carrying is not None and not (first and _needs(first[0], game.carrying)):
            self.stack.append(DropSubgoal(self))
            self.stack.append(GoNextToSubgoal(self, self._find_drop_pos()))

    def replan(self, action_taken: Any = None) -> Any:
        self.stack.pushes = 0
        return super().replan(action_taken)

    def _process_instr(self, instr: Instr) -> None:
        """Stack the subgoals of the rest of the mission, the first on top."""
        carrying = self.mission.unwrapped.carrying
        remaining = _remaining(instr)
        for place, part in reversed(list(enumerate(remaining))):
            if place == 0 and isinstance(part, PutNextInstr) and _needs(part, carrying):
                self.stack.append(DropSubgoal(self))
                self.stack.append(GoNextToSubgoal(self, part.desc_fixed, reason="PutNext"))
            else:
                super()._process_instr(part)


def _remaining(instr: Instr) -> list[Instr]:
    """Return the parts of a mission that are not done yet, in order of execution."""
    if not isinstance(instr, SeqInstr):
        return [instr]
    sequence: Any = instr  # minigrid sets its attributes outside of the constructor
    parts = [(sequence.instr_a, sequence.a_done), (sequence.instr_b, sequence.b_done)]
    if isinstance(instr, AfterInstr):
        parts.reverse()
    return [left for part, done in parts if done != "success" for left in _remaining(part)]


def _needs(part: Instr, thing: Any) -> bool:
    """Return whether a part of the mission needs the agent to carry `thing`."""
    if isinstance(part, PutNextInstr):
        return any(thing is wanted for wanted in part.desc_move.obj_set)
    if isinstance(part, OpenInstr) and thing is not None and thing.type == "key":
        return any(door.is_locked and door.color == thing.color for door in part.desc.obj_set)
    return False


class _BoundedStack(list):
    """The planner's stack; it limits the subgoals added within one turn."""

    pushes = 0

    def append(self, subgoal: Any) -> None:
        self.pushes += 1
        assert self.pushes <= _MAX_SUBGOALS, "the plan goes in circles"
        super().append(subgoal)
