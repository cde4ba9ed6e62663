"""Sokoban: push every box onto a target, in levels that are drawn from the seed or read from files.

The symbols of the map are RAGEN's (or those of level files), and `reward: native` pays what
gym-sokoban pays, which RAGEN trains on. Levels come from our own generator, so a seed gives other
levels here than there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from envs.base import make_image
from envs.errors import ConfigError, check_known
from envs.sokoban.board import (
    SYMBOLS,
    Push,
    Room,
    State,
    draw_room,
    find_pushes,
    is_stuck,
    moves_of,
)
from envs.sokoban.levels import TASKS, make_level, read_level
from envs.text_game import ANSWER_FORMAT, Frame, GameSettings, PlannedGame, offset_in_words, towards
from slime_verlog import Field

ACTIONS = {
    "up": "go one step up, and push the box if one stands there",
    "down": "go one step down, and push the box if one stands there",
    "left": "go one step to the left, and push the box if one stands there",
    "right": "go one step to the right, and push the box if one stands there",
    "stay": "stay where you are for this turn",
}
_MEANINGS = ("a wall", "floor", "a target", "a box", "a box on a target", "you", "you on a target")


class SokobanSettings(GameSettings):
    """Settings of Sokoban. The size and number of boxes are null by default: the task then sets
    them."""

    width: int | None = Field(None, ge=4, le=20)
    """Cells from left to right, outer walls included."""
    height: int | None = Field(None, ge=4, le=20)
    """Cells from top to bottom, outer walls included."""
    boxes: int | None = Field(None, ge=1, le=8)
    """Boxes, and targets."""
    least_pushes: int | None = Field(None, ge=1)
    """Use only levels whose solution, as the search finds it, has at least this many pushes."""
    levels_path: str | None = None
    """Text file in Boxoban's format, or folder of such files, whose levels are played instead of
    generated ones; the seed chooses one, and the task may have any name."""
    reward: Literal["sparse", "native"] = "sparse"
    """`sparse`: 1 for solving the level. `native`: gym-sokoban's rewards: -0.1 per turn, 1 for a
    box pushed onto a target, -1 for one pushed off, and 10 for solving the level."""
    end_when_stuck: bool = False
    """End the episode as a loss when a box can no longer reach a target. Most such positions are
    recognized."""
    symbols: Literal["ragen", "xsb"] = "ragen"
    """Symbols of the map: RAGEN's `#_OX√PS`, or those of level files, `# .$*@+`, each for wall,
    floor, target, box, box on a target, player, player on a target."""
    spaced: bool = False
    """Put a space between the symbols of a row, so that a tokenizer does not join them into one
    token."""

    @model_validator(mode="after")
    def _check(self) -> SokobanSettings:
        if self.levels_path is not None:
            for key in self.shape:
                raise ConfigError(
                    f"env.{key} shapes generated levels; remove it to play those of env.levels_path"
                )
        return self

    @property
    def shape(self) -> dict[str, int]:
        """Return the settings that shape generated levels and are set."""
        return self.model_dump(
            include={"width", "height", "boxes", "least_pushes"}, exclude_none=True
        )


class Sokoban(PlannedGame):
    """One Sokoban episode."""

    settings: SokobanSettings
    settings_model = SokobanSettings
    room: Room
    template_path = Path(__file__).with_name("prompt.j2")
    answer_format = ANSWER_FORMAT.replace("one allowed action", f"one of {', '.join(ACTIONS)}")
    actions = ACTIONS
    default_action = "stay"

    def __init__(self, task: str, seed: int, settings: SokobanSettings) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self._written = read_level(settings.levels_path, seed) if settings.levels_path else None
        if not self._written:
            check_known(
                task, TASKS, f"unknown Sokoban task {task!r}", f"there are {', '.join(TASKS)}", n=1
            )
        # Levels of files get the limit of Boxoban's size.
        self._shape = replace(TASKS["four_boxes" if self._written else task], **settings.shape)
        self.max_steps = settings.max_steps or self._shape.max_steps
        self._plans: dict[tuple[int, int], tuple[Push, ...] | None] = {}
        self.state = State(0, 0)

    def start(self) -> Frame:
        self.room, self.state = self._written or make_level(self._shape, self.seed)
        return self._frame("")

    def play(self, action: str) -> Frame:
        before = self.state
        if action in self.room.strides:
            self.state = self.room.move(before, action)
        gained = self.room.placed(self.state.boxes) - self.room.placed(before.boxes)
        solved = self.state.boxes == self.room.targets
        reward = gained + 10.0 * solved - 0.1 if self.settings.reward == "native" else float(solved)
        if action == "stay":
            event = "You stayed."
        elif self.state == before:
            event = f"You could not go {towards(action)}: something is in the way."
        else:
            deed = "went" if self.state.boxes == before.boxes else "pushed a box"
            event = f"You {deed} {towards(action)}."
        return self._frame(event, reward, solved)

    def translate(self, candidate: str) -> str | None:
        words = (
            candidate.lower()
            .strip(" .,!'\"`*[]")
            .removeprefix("move ")
            .removeprefix("push ")
            .removeprefix("go ")
        )
        return words if words in ACTIONS else None

    def plan(self) -> list[str]:
        """Return the moves that solve the level from here; empty if the search finds none."""
        return moves_of(self.room, self.state, self._pushes() or ())

    def explain(self) -> str:
        """Return the reasoning behind `advice`: how many pushes are left, and which box is next."""
        room = self.room
        state = self.state
        pushes = self._pushes()
        if not pushes:
            return "I find no way to bring all boxes onto targets, so I wait."
        first = pushes[0]
        how = (
            "First I walk behind it" if moves_of(room, state, (first,))[1:] else "I stand behind it"
        )
        left = f"{len(pushes)} push{'es are' if len(pushes) > 1 else ' is'} left"
        y, x = divmod(first.box, room.width)
        y0, x0 = divmod(state.player, room.width)
        place = offset_in_words(x - x0, y - y0, ("to the left", "to the right", "up", "down"))
        return f"{left}. Next I push the box ({place} from me) {towards(first.direction)}. {how}."

    def render(self) -> np.ndarray:
        """Draw the room as a uint8 array (32 * height, 32 * width, 3)."""
        return draw_room(self.room, self.state)

    def prompt_variables(self) -> dict[str, Any]:
        legend = list(zip(SYMBOLS[self.settings.symbols], _MEANINGS, strict=True))
        return {
            **super().prompt_variables(),
            "legend": legend,
            "picture_only": self.settings.vlm == "only",
        }

    def _pushes(self) -> tuple[Push, ...] | None:
        """Return pushes that solve the level; keep the rest of the plan for the state after its
        first push."""
        here = self.state.boxes, self.room.reach(self.state)
        if here not in self._plans:
            self._plans[here] = find_pushes(self.room, self.state)
        pushes = self._plans[here]
        if pushes:
            cell, direction = pushes[0]
            behind = State(cell - self.room.strides[direction], self.state.boxes)
            after = self.room.move(behind, direction)
            self._plans.setdefault((after.boxes, self.room.reach(after)), pushes[1:])
        return pushes

    def _frame(self, event: str, reward: float = 0.0, solved: bool = False) -> Frame:
        room = self.room
        boxes = self.state.boxes
        placed = room.placed(boxes)
        total = room.targets.bit_count()
        stuck = is_stuck(room, boxes)
        lost = stuck and self.settings.end_when_stuck
        told = f"{event} Boxes on targets: {placed} of {total}.".strip()
        if lost:
            told += " A box can no longer reach a target."
        symbols = SYMBOLS[self.settings.symbols]
        gap = " " if self.settings.spaced else ""
        return Frame(
            long_term=told,
            short_term=room.draw(self.state, symbols, gap),
            reward=reward,
            terminated=solved or lost,
            progression=placed / total,
            image=make_image(self.render()) if self.settings.vlm else None,
            metrics={"boxes_on_targets": float(placed), "stuck": float(stuck)},
        )


SETTINGS = SokobanSettings
DEFAULT_TASK = "one_box"
build_env = Sokoban.from_sample
expert_action = Sokoban.advice
explain_action = Sokoban.explain
