"""Batches of whole episodes, as slime's own outer loop makes them with `rollout.generate.generate`.

A batch has `rollout_batch_size` starts, each played `n_samples_per_prompt` times. In
`generate_rollout`, an episode is one training group, so `global_batch_size` counts episodes. In
`generate_turns` it counts turns.
"""

import asyncio
from argparse import Namespace

from rollout.batches.metrics import whole_episode_metrics
from rollout.bridge.framework import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, run
from rollout.bridge.sample import facts_of, set_group
from rollout.bridge.whole_episodes import episode_facts
from rollout.data_source import EpisodeSource
from rollout.errors import FailureBudgetError
from rollout.evaluate import evaluate
from rollout.generate import generate
from rollout.play.loop import gather
from rollout.turn import SampleKind


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Play one batch of whole episodes, or the held-out episodes if `evaluation`; slime's
    signature.

    Raises FailureBudgetError if more episodes fail than `max_episode_failures_per_batch`, and what
    `generate` raises.
    """
    return run(evaluate(args, data_source) if evaluation else _play(args, data_source))


def generate_turns(
    args: Namespace, rollout_id: int, data_source: EpisodeSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Like `generate_rollout`, but each turn is one training group, as in fixed-turn batches.

    Long and short episodes then take optimizer steps of the same size. The turns of a batch must
    fill whole steps, and `lr_decay_style` must be constant, because the schedule is planned in
    episodes.
    """
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    if isinstance(output, RolloutFnTrainOutput):
        group = -1
        for sample in (sample for episode in output.samples for sample in episode):
            group += facts_of(sample)["kind"] != SampleKind.BOOTSTRAP
            set_group(sample, group)
    return output


async def _play(args: Namespace, source: EpisodeSource) -> RolloutFnTrainOutput:
    slots = asyncio.Semaphore(source.settings.n_env)
    params = source.flags.sampling_params()

    async def one(sample: Sample) -> list[Sample]:
        async with slots:
            played = await generate(args, sample, params)
        return played if isinstance(played, list) else [played]

    starts = source.get_samples(source.flags.rollout_batch_size)
    episodes = await gather(one(sample) for group in starts for sample in group)
    failed = [
        facts["fault"]
        for facts in (facts_of(e[0]) for e in episodes)
        if facts["kind"] == SampleKind.FAILED
    ]
    if len(failed) > source.settings.max_episode_failures_per_batch:
        raise FailureBudgetError(
            f"{len(failed)} episodes of one batch failed. Last failure:\n{failed[-1]}"
        )
    return RolloutFnTrainOutput(
        samples=list(episodes), metrics=whole_episode_metrics(episode_facts(episodes))
    )
