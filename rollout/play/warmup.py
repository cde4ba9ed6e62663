"""Critic warm-up: while the actor is frozen, batches are collected and kept, then drawn from again.

For `w_epoch` rollouts, new batches are played and kept. For `w_iter` rollouts, each batch is drawn from the kept
segments without any generation. The advantage hook computes returns with the current critic, so the targets of kept
turns are never stale. The actor is frozen during the warm-up, so kept turns stay on-policy.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

from advantage.settings import WarmupSettings
from rollout.errors import ConfigError
from rollout.turn import Segment, StopReason


class Phase(enum.StrEnum):
    """The phase of the critic's warm-up that a rollout belongs to."""

    COLLECT = "collect"
    """Play a batch and keep it; only the critic trains."""
    DRAW = "draw"
    """Draw a batch from the kept turns; only the critic trains."""
    TRAIN = "train"
    """The warm-up is over: play a batch, train both."""


def phase_of(rollout_id: int, warmup: WarmupSettings) -> Phase:
    """The phase of a rollout."""
    if rollout_id < warmup.w_epoch:
        return Phase.COLLECT
    return Phase.DRAW if rollout_id < warmup.w_epoch + warmup.w_iter else Phase.TRAIN


def draw(kept: Sequence[Segment], fraction: float, step_turns: int, seed: int) -> list[Segment]:
    """Random kept segments holding `fraction` of the kept turns, in whole steps of `step_turns` turns.

    Segments are drawn without replacement. The last one is shortened to fill the last step exactly: its first turns
    stay, and the prompt after them becomes the bootstrap.

    Raises:
        ConfigError: less than one step was kept, for example after a restart without the rollout checkpoint.
    """
    total = sum(len(segment.turns) for segment in kept)
    if total < step_turns:
        raise ConfigError(
            f"the warm-up has {total} kept turns, fewer than --global-batch-size {step_turns}; resume with the "
            "rollout checkpoint of the same step, or start the warm-up again"
        )
    wanted = max(step_turns, round(fraction * total))
    wanted -= wanted % step_turns
    order = list(range(len(kept)))
    random.Random(f"warmup/{seed}").shuffle(order)
    drawn: list[Segment] = []
    left = wanted
    for number in order:
        if left == 0:
            break
        segment = shorten(kept[number], left)
        drawn.append(segment)
        left -= len(segment.turns)
    return drawn


def shorten(segment: Segment, turns: int) -> Segment:
    """The segment's first `turns` turns; the next turn's prompt becomes the bootstrap."""
    if len(segment.turns) <= turns:
        return segment
    return Segment(segment.task_name, segment.turns[:turns], segment.turns[turns].prompt, StopReason.CUT)
