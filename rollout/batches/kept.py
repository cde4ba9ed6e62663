"""Batches that are kept: for the critic's warm-up, which draws from them again, and for value
pretraining.

The advantage hook computes returns with the current critic, so the targets of kept turns are never
stale.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rollout.errors import ConfigError
from rollout.play.loop import count_turns
from rollout.play.parts import Runtime
from rollout.turn import Batch, Segment, StopReason

logger = logging.getLogger(__name__)

FEW_EPISODES = 10
"""With fewer, one or two are held out, and what the critic explains of them says little."""


async def play_or_draw(
    play: Callable[[], Awaitable[Batch]], kept: list[Segment], rollout_id: int, runtime: Runtime
) -> Batch:
    """Draw the rollout's batch from `kept`, or play and keep it; empties `kept` after the warm-up.
    Raises as `draw`."""
    settings = runtime.settings
    flags = runtime.flags
    warmup = settings.critic_warmup
    collects = settings.value_pretraining.batches > 0 or rollout_id < warmup.w_epoch
    if not collects and rollout_id < warmup.w_epoch + warmup.w_iter:
        segments = draw(
            kept, warmup.fraction, flags.global_batch_size, flags.rollout_seed + rollout_id
        )
        states = [] if runtime.stream is None else runtime.stream.skip(rollout_id)
        return Batch(segments, {"warmup/drawn_turns": float(count_turns(segments))}, states)
    batch = await play()
    if collects:
        kept.extend(batch.segments)
        batch.metrics["warmup/kept_turns"] = float(count_turns(kept))
    else:
        kept.clear()
    return batch


def draw(kept: Sequence[Segment], fraction: float, step_turns: int, seed: int) -> list[Segment]:
    """Draw random kept segments that hold `fraction` of the kept turns, in whole steps of
    `step_turns` turns.

    The last one is shortened to fill the last step exactly. Raises ConfigError if less than one
    step was kept.
    """
    total = count_turns(kept)
    if total < step_turns:
        raise ConfigError(
            f"the warm-up has {total} kept turns, fewer than --global-batch-size {step_turns}; "
            "resume with the rollout checkpoint of the same step, or start the warm-up again"
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
    return Segment(
        segment.task_name, segment.turns[:turns], segment.turns[turns].prompt, StopReason.CUT
    )


def join_episodes(collected: Sequence[Segment]) -> list[Segment]:
    """The segments, with those of an episode that went on in the next batch laid end to end."""
    joined: dict[tuple[int, int], Segment] = {}
    for segment in collected:
        first = segment.turns[0]
        last = segment.turns[-1]
        before = joined.pop((first.episode_id, first.index), None)
        turns = segment.turns if before is None else before.turns + segment.turns
        joined[first.episode_id, last.index + 1] = replace(segment, turns=turns)
    return list(joined.values())


def choose_held_out(segments: Sequence[Segment], share: float, seed: int) -> set[int]:
    """Return ids of random episodes with about `share` of all turns, never all.

    Raises:
        ConfigError: there are fewer than two episodes.
    """
    lengths: dict[int, int] = {}
    for segment in segments:
        episode = segment.turns[0].episode_id
        lengths[episode] = lengths.get(episode, 0) + len(segment.turns)
    turns = sum(lengths.values())
    if len(lengths) < 2:
        raise ConfigError(
            f"value pretraining collected {turns} turns of one episode, so none can be held out: "
            "raise value_pretraining.batches or n_env"
        )
    if len(lengths) < FEW_EPISODES:
        logger.warning(
            "value pretraining collected only %d episodes, so the explained variance of the "
            "held-out ones says little: raise value_pretraining.batches or n_env",
            len(lengths),
        )
    order = list(lengths)
    random.Random(f"held out/{seed}").shuffle(order)
    chosen: set[int] = set()
    held = 0
    for episode in order[:-1]:
        if held >= share * turns:
            break
        chosen.add(episode)
        held += lengths[episode]
    return chosen
