"""Batches of whole episodes (`rollout.generate.generate`) on this machine: what slime's own outer loop does there.

`rollout_batch_size` starts, each played `n_samples_per_prompt` times; an episode is one training group, so
`global_batch_size` counts episodes here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, run
from rollout.data_source import EpisodeSource
from rollout.errors import FailureBudgetError
from rollout.evaluate import evaluate
from rollout.generate import generate
from rollout.play.metrics import mean


def generate_rollout(
    args: Any, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """A rollout function with slime's signature: whole episodes, or the held-out ones when `evaluation`.

    Raises:
        FailureBudgetError: more episodes failed than `max_episode_failures_per_batch`.
        ConfigError, EngineError: as `generate` raises them.
    """
    return run(evaluate(args, data_source) if evaluation else _play(args, data_source))


async def _play(args: Any, source: EpisodeSource) -> RolloutFnTrainOutput:
    slots = asyncio.Semaphore(source.settings.n_env)
    params = RolloutFlags.read(args).sampling_params()

    async def one(sample: Sample) -> list[Sample]:
        async with slots:
            played = await generate(args, sample, params)
        return played if isinstance(played, list) else [played]

    starts = source.get_samples(args.rollout_batch_size)
    episodes = await asyncio.gather(*(one(sample) for group in starts for sample in group))
    failed = [episode[0].metadata["fault"] for episode in episodes if episode[0].status == Sample.Status.FAILED]
    if len(failed) > source.settings.max_episode_failures_per_batch:
        raise FailureBudgetError(f"{len(failed)} episodes of one batch failed. Last failure:\n{failed[-1]}")
    return RolloutFnTrainOutput(samples=list(episodes), metrics=_metrics(episodes))


def _metrics(episodes: list[list[Sample]]) -> dict[str, float]:
    """The names of the fixed-turn batches' metrics, as far as they mean the same."""
    # Every turn of an episode knows how it ended; a failed one knows nothing.
    ended = [episode[0].metadata for episode in episodes if "episode_turns" in episode[0].metadata]
    turns = sum(facts["episode_turns"] for facts in ended)
    returned = sum(facts["episode_return"] for facts in ended)
    return {
        "rollout/turns": float(turns),
        "turn/reward": returned / max(turns, 1),
        "episode/finished": float(len(ended)),
        "episode/return": mean(facts["episode_return"] for facts in ended),
        "episode/turns": mean(facts["episode_turns"] for facts in ended),
        "episode/success": mean(facts["success"] for facts in ended),
    }
