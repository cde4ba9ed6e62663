"""Plays held-out episodes to their end; results per task in slime's evaluation format."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from tqdm import tqdm

from rollout.batches.metrics import mean
from rollout.bridge.framework import RolloutFnEvalOutput
from rollout.data_source import EpisodeSource
from rollout.play.held_out import EpisodeResult, play_episode
from rollout.play.loop import gather
from rollout.play.parts import Runtime
from rollout.play.runtime import get_runtime
from rollout.samples import evaluation_sample
from rollout.spec import EpisodeSpec
from slime_verlog import BAR_S

logger = logging.getLogger(__name__)


async def evaluate(args: Any, source: EpisodeSource) -> RolloutFnEvalOutput:
    """Play all of `source.eval_episodes()`, `n_env` at a time.

    `data[task]` has `rewards` (the return) and `truncated` of each episode in seed order, without
    those that failed unless all did, and `samples` of all of them (the last turn, whose metadata
    describes the whole episode). `metrics` come from `eval_metrics`.

    Raises:
        EngineError: the engine did not answer within the allowed retries, or refused more than a
            single prompt.
        ConfigError, EncodingError, PlayerError, MissingDependencyError: as
            `rollout.fixed_turn.generate_rollout`.
    """
    runtime = await get_runtime(args)
    results = await play_episodes(runtime, source.eval_episodes(), source.settings.n_env)
    by_task: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        by_task[result.spec.name].append(result)
    data: dict[str, dict[str, list[Any]]] = {}
    for name, group in by_task.items():
        played = [result for result in group if result.fault is None]
        if lost := [result.fault for result in group if result.fault is not None]:
            words = "%d of %d held-out episodes of %s failed and are in no mean: %s"
            logger.warning(words, len(lost), len(group), name, lost[-1])
        data[name] = {
            "rewards": [result.facts()["return"] for result in played or group],
            "truncated": [
                bool(result.turns and result.turns[-1].truncated) for result in played or group
            ],
            "samples": [
                evaluation_sample(runtime.samples, r.spec, r.turns, r.facts()) for r in group
            ],
        }
    return RolloutFnEvalOutput(data=data, metrics=eval_metrics(by_task))


async def play_episodes(
    runtime: Runtime, specs: Sequence[EpisodeSpec], at_once: int
) -> list[EpisodeResult]:
    """Play the episodes, `at_once` at a time; return their results in the order of `specs`. Raises
    as `evaluate`."""
    places = asyncio.Semaphore(at_once)
    play_one = (
        partial(play_episode, runtime) if runtime.players is None else runtime.players.evaluate
    )
    with tqdm(
        total=len(specs), desc="evaluation", unit="episode", leave=False, mininterval=BAR_S
    ) as progress:

        async def one(spec: EpisodeSpec) -> EpisodeResult:
            async with places:
                result = await play_one(spec)
                progress.update()
                return result

        return await gather(one(spec) for spec in specs)


def eval_metrics(by_task: dict[str, list[EpisodeResult]]) -> dict[str, float]:
    """Compute each task's means as `eval/<task>/<name>`; rates and `progression` are from 0 to 1.

    The names are `success`, its standard error `success_se`, `return`, `progression`, `turns` and
    `valid_action_ratio`, over the `episodes` that did not fail; `episodes_failed` is the number of
    the others.
    """
    metrics: dict[str, float] = {}
    for name, results in by_task.items():
        facts = [result.facts() for result in results if result.fault is None]
        metrics[f"eval/{name}/episodes"] = float(len(facts))
        metrics[f"eval/{name}/episodes_failed"] = float(len(results) - len(facts))
        if not facts:
            continue
        for key in ("success", "return", "progression", "turns", "valid_action_ratio"):
            metrics[f"eval/{name}/{key}"] = mean(fact[key] for fact in facts)
        success = metrics[f"eval/{name}/success"]
        metrics[f"eval/{name}/success_se"] = (success * (1 - success) / len(facts)) ** 0.5
    return metrics
