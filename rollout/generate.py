"""One whole episode inside slime's own outer loop (`--custom-generate-function-path`).

`history: full` gives one sample with every turn in it, observations masked; `history: window` one sample a turn,
all in the sample's training group. An aborted episode keeps its environment and goes on where it stopped when
slime hands the sample out again; what it played before is masked where `--mask-offpolicy-in-partial-rollout` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from advantage.turn_table import TurnKind, TurnRow, TurnSpan, encode_row, with_group
from rollout.bridge.episode_samples import EpisodeSamples
from rollout.bridge.framework import Sample, group_of, outer_loop_is_full
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, EpisodeSpec, open_episode
from rollout.play.runtime import Runtime, get_runtime
from rollout.samples import (
    ROW_KEY,
    Segment,
    append_generation,
    append_observation,
    bootstrap_sample,
    make_inert,
    turn_facts,
    turn_sample,
)
from rollout.turn import Turn
from rollout.workers.worker import EnvSpec

_parked: dict[tuple[int, int], tuple[Episode, list[Turn]]] = {}
"""Episodes of aborted samples that will be handed out again, by runtime and sample index."""


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode that `sample.metadata` names (`task`, `seed`) to its end.

    Returns one sample (`history: full`) or one a turn (`history: window`); all carry the episode's return as
    reward. Status is COMPLETED, TRUNCATED when a limit ended the episode, ABORTED when the engine or slime's loop
    aborted (the episode then continues at the next call), FAILED with everything masked when the environment was lost.

    Raises:
        EngineError: the engine did not answer within the retries allowed.
        ConfigError: the sample names no task and seed, or the first prompt does not fit.
    """
    runtime = await get_runtime(args)
    key = (id(runtime), sample.index if sample.index is not None else id(sample))
    episode, turns = _parked.pop(key, (None, []))
    stale = len(turns) if getattr(args, "mask_offpolicy_in_partial_rollout", False) else 0
    try:
        if episode is None:
            episode = await open_episode(runtime, _spec(runtime, sample))
        while episode.stop is None and (evaluation or not outer_loop_is_full()):
            generation = await episode.ask(sampling_params)
            if generation.finish_reason == "abort":
                break
            turns.append(await episode.take(generation))
        if episode.stop is None:
            if _comes_back(args):
                _parked[key] = (episode, turns)
            sample.status = Sample.Status.ABORTED
            return sample
    except EnvironmentFault as fault:
        runtime.counters["episodes_failed"] += 1
        return _failed(runtime, sample, str(fault))
    finally:
        if episode is not None and key not in _parked:
            await episode.close()
    return _finished(runtime, sample, episode, turns, stale)


def _comes_back(args: Any) -> bool:
    """Whether the outer loop hands aborted samples out again; otherwise their environments are let go."""
    return bool(getattr(args, "partial_rollout", False)) or "fully_async" in str(
        getattr(args, "rollout_function_path", "")
    )


def _spec(runtime: Runtime, sample: Sample) -> EpisodeSpec:
    metadata = dict(sample.metadata or {})
    config = runtime.config
    env = EnvSpec(
        env_path=metadata.get("env_path", config.rollout_interaction_env_path),
        metadata=metadata,
        options=metadata.get("env_options", config.env),
        label=sample.label,
        prompt=sample.prompt or None,
        multimodal_inputs=sample.multimodal_inputs,
        max_turns=config.max_turns,
    )
    name = metadata.get("task_name") or str(metadata.get("task", config.rollout_interaction_env_path))
    return EpisodeSpec(sample.index or 0, name, env, sample.session_id)


def _finished(
    runtime: Runtime, sample: Sample, episode: Episode, turns: list[Turn], stale: int
) -> Sample | list[Sample]:
    """The episode's samples; its first `stale` turns are not trained on."""
    group = group_of(sample)
    group = group if group is not None else 0
    wanted = runtime.config.bootstrap_on_time_limit and turns[-1].truncated
    bootstrap = episode.final_prompt if wanted else None
    segment = Segment(
        episode.spec.name, tuple(turns), bootstrap, episode.stop or "", episode.total_reward, len(turns)
    )
    if runtime.config.history == "full":
        samples = [_whole_episode(runtime, sample, segment, group, stale)]
    else:
        samples = [turn_sample(turn, group, group, runtime.args, segment.task_name) for turn in turns]
        for number, part in enumerate(samples):
            _inherit(part, sample, segment)
            if number < stale:
                part.loss_mask = [0] * part.response_length
    if bootstrap is not None:
        samples.append(bootstrap_sample(segment, group, samples[-1], runtime.args, runtime.dummy_token))
    return samples[0] if runtime.config.history == "full" and bootstrap is None else EpisodeSamples(samples)


def _whole_episode(runtime: Runtime, sample: Sample, segment: Segment, group: int, stale: int) -> Sample:
    """All turns in one sample: the model's tokens as they came, what lies between them masked."""
    args, turns = runtime.args, segment.turns
    sample.tokens = list(turns[0].prompt.token_ids)
    sample.response, sample.response_length = "", 0
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [], [], []
    spans = []
    for number, turn in enumerate(turns):
        gap = turn.prompt.token_ids[len(sample.tokens) :]
        if gap:
            append_observation(sample, gap, args)
        start = sample.response_length
        append_generation(sample, turn, args)
        if number < stale:
            sample.loss_mask[start:] = [0] * (sample.response_length - start)
        action = start + turn.action_span[0] if turn.action_span else -1
        spans.append(TurnSpan(start, sample.response_length, turn.reward, action))
    inputs = turns[-1].prompt.train_inputs
    sample.multimodal_train_inputs = dict(inputs) if inputs is not None else None
    row = TurnRow(group, turns[0].index, TurnKind.TURN, turns[-1].terminated, turns[-1].truncated, tuple(spans))
    sample.train_metadata = {**(sample.train_metadata or {}), ROW_KEY: encode_row(row).tolist()}
    sample.metadata = {**(sample.metadata or {}), **turn_facts(turns[-1]), "turns": len(turns)}
    _inherit(sample, sample, segment)
    return sample


def _inherit(part: Sample, whole: Sample, segment: Segment) -> None:
    """What every sample of an episode shares with the sample that slime handed out."""
    part.index, part.group_index, part.session_id = whole.index, whole.group_index, whole.session_id
    part.label = whole.label
    part.train_metadata[ROW_KEY] = with_group(part.train_metadata[ROW_KEY], whole.group_index)
    part.reward = segment.episode_return
    part.metadata = {
        **(whole.metadata or {}),
        **part.metadata,
        "stop": segment.stop,
        "episode_return": segment.episode_return,
        "episode_turns": segment.episode_turns,
        "success": segment.turns[-1].progression >= 1.0,
    }
    if segment.turns[-1].truncated:
        part.status = Sample.Status.TRUNCATED
    part.non_generation_time = sum(turn.env_s for turn in segment.turns)


def _failed(runtime: Runtime, sample: Sample, fault: str) -> Sample:
    """A sample that trains nothing: one masked token, so that the batch keeps its shape."""
    group = group_of(sample)
    make_inert(sample, group if group is not None else 0, runtime.args, runtime.dummy_token)
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    sample.metadata = {**(sample.metadata or {}), "stop": "failed", "fault": fault, "success": False}
    return sample
