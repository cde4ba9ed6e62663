"""Held-out episodes, each played to its end; results per task in slime's evaluation format."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from tqdm import tqdm

from rollout.bridge.framework import RolloutFnEvalOutput, Sample
from rollout.data_source import EpisodeSource
from rollout.errors import EnvironmentFault
from rollout.play.episode import EpisodeSpec, open_episode
from rollout.play.metrics import mean
from rollout.play.runtime import Runtime, get_runtime, sampling_params
from rollout.samples import turn_sample
from rollout.turn import Turn


async def evaluate(args: Any, source: EpisodeSource) -> RolloutFnEvalOutput:
    """Play all of `source.eval_episodes()`, `n_env` at a time; training's live episodes are not touched.

    `data[task]` has one entry an episode in seed order: `rewards` (return), `truncated`, `samples` (the last
    turn, whose metadata carries the whole episode). A failed environment counts as an episode with return 0.
    """
    runtime = await get_runtime(args)
    slots = asyncio.Semaphore(source.config.n_env)
    specs = source.eval_episodes()
    with tqdm(total=len(specs), desc="evaluation", unit="episode", leave=False) as progress:

        async def one(spec: EpisodeSpec) -> Sample:
            async with slots:
                sample = await play_episode(runtime, spec)
                progress.update()
                return sample

        samples = await asyncio.gather(*(one(spec) for spec in specs))
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for spec, sample in zip(specs, samples, strict=True):
        by_task[spec.name].append(sample)
    data = {
        name: {
            "rewards": [sample.reward for sample in group],
            "truncated": [sample.metadata["truncated"] for sample in group],
            "samples": group,
        }
        for name, group in by_task.items()
    }
    return RolloutFnEvalOutput(data=data, metrics=eval_metrics(by_task))


async def play_episode(runtime: Runtime, spec: EpisodeSpec) -> Sample:
    """One episode to its end, as the sample of its last turn with the episode's story in the metadata."""
    params = sampling_params(runtime.args, evaluation=True)
    turns: list[Turn] = []
    episode, fault = None, None
    try:
        episode = await open_episode(runtime, spec)
        while episode.stop is None:
            turns.append(await episode.play_turn(params))
    except EnvironmentFault as error:
        runtime.counters["eval_episodes_failed"] += 1
        fault = str(error)
    finally:
        if episode is not None:
            await episode.close()
    return _episode_sample(runtime, spec, turns, episode.stop if episode else None, fault)


def _episode_sample(
    runtime: Runtime, spec: EpisodeSpec, turns: list[Turn], stop: str | None, fault: str | None
) -> Sample:
    if turns:
        sample = turn_sample(turns[-1], 0, spec.episode_id, runtime.args, spec.name)
    else:
        sample = Sample()
        sample.index, sample.metadata, sample.response_length = spec.episode_id, {"truncated": False}, 0
    sample.reward = sum(turn.reward for turn in turns) if fault is None else 0.0
    sample.metadata |= {
        "task_name": spec.name,
        "seed": spec.env.metadata["seed"],
        "stop": stop or "failed",
        "fault": fault,
        "turns": len(turns),
        "success": bool(turns and fault is None and turns[-1].progression >= 1.0),
        "progression": turns[-1].progression if turns and fault is None else 0.0,
        "valid_action_ratio": mean(turn.valid for turn in turns),
        "story": [_story(runtime, turn) for turn in turns],
    }
    return sample


def _story(runtime: Runtime, turn: Turn) -> dict[str, Any]:
    """One turn as readable text."""
    return {
        "prompt": runtime.encoder.decode(turn.prompt.token_ids),
        "response": turn.generation.text,
        "executed_action": turn.executed_action,
        "valid": turn.valid,
        "reward": turn.reward,
        "done": turn.done,
    }


def eval_metrics(by_task: dict[str, list[Sample]]) -> dict[str, float]:
    """Per task: success rate and its standard error, return, progression, turns, valid-action ratio."""
    metrics: dict[str, float] = {}
    for name, samples in by_task.items():
        n = len(samples)
        success = mean(sample.metadata["success"] for sample in samples)
        metrics |= {
            f"eval/{name}/success": success,
            f"eval/{name}/success_se": (success * (1 - success) / n) ** 0.5,
            f"eval/{name}/return": mean(sample.reward or 0.0 for sample in samples),
            f"eval/{name}/episodes": float(n),
        }
        for key in ("progression", "turns", "valid_action_ratio"):
            metrics[f"eval/{name}/{key}"] = mean(sample.metadata[key] for sample in samples)
    return metrics
