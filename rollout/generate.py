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
from rollout.play.parked import Parked
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


async def generate(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Play the episode that `sample.metadata` names (`task`, `seed`) to its end.

    Returns one sample (`history: full`) or a list: one sample per turn (`history: window`), or the whole episode and
    the state after it (`history: full` with `bootstrap_on_time_limit`). Every episode of a run that reaches a batch
    comes in the same form, because slime looks at the first one only. All carry the episode's return as reward. Status
    is COMPLETED, TRUNCATED when a limit ended the episode, FAILED with everything masked when the environment was
    lost. A bare sample with status ABORTED: slime's loop aborted it and trains on it in no case; the episode continues
    when that sample is handed out again.

    Raises:
        EngineError: the engine did not answer within the retries allowed.
        ConfigError: the sample names no task and seed, or the first prompt does not fit.
    """
    runtime = await get_runtime(args)
    parked = runtime.parked.take(sample)
    episode, turns = (parked.episode, parked.turns) if parked else (None, [])
    stale = len(turns) if getattr(args, "mask_offpolicy_in_partial_rollout", False) else 0
    try:
        if episode is None:
            episode = await open_episode(runtime, _spec(runtime, sample))
        if not await _play(episode, turns, sampling_params, evaluation):
            sample.status = Sample.Status.ABORTED
            if _comes_back(args):
                going_on, episode = episode, None
                await runtime.parked.park(Parked(sample, going_on, turns), _most_parked(args))
            return sample
    except EnvironmentFault as fault:
        runtime.counters["episodes_failed"] += 1
        return _returned(runtime, [_failed(runtime, sample, str(fault))])
    finally:
        if episode is not None:
            await episode.close()
    return _returned(runtime, _finished(runtime, sample, episode, turns, stale, evaluation))


async def _play(episode: Episode, turns: list[Turn], params: Mapping[str, Any], evaluation: bool) -> bool:
    """Play on to the episode's end; False if the outer loop aborted it before."""
    retries = 0
    while episode.stop is None and (evaluation or not outer_loop_is_full()):
        generation = await episode.ask(params)
        if generation.finish_reason != "abort":
            turns.append(await episode.take(generation))
            retries = 0
        elif not evaluation and _is_the_loops(episode.runtime.args):
            return False
        else:
            retries += 1
            await episode.after_abort(retries)
    return episode.stop is not None


def _is_the_loops(args: Any) -> bool:
    """Whether an abort comes from the outer loop, which does not train on what it aborts.

    slime's own loop says when it aborts; any other abort is the engine's, and the turn is asked again. slime's fully
    asynchronous loop, and loops of other projects, take every aborted sample back.
    """
    return outer_loop_is_full() is not False or _is_asynchronous(args)


def _comes_back(args: Any) -> bool:
    """Whether the outer loop hands aborted samples out again; otherwise their environments are let go."""
    return bool(getattr(args, "partial_rollout", False)) or _is_asynchronous(args)


def _is_asynchronous(args: Any) -> bool:
    return "fully_async" in str(getattr(args, "rollout_function_path", ""))


def _most_parked(args: Any) -> int:
    """As many samples as the outer loop can have begun and not finished."""
    groups = args.rollout_batch_size + (getattr(args, "over_sampling_batch_size", None) or args.rollout_batch_size)
    engines = max(getattr(args, "rollout_num_engines", None) or getattr(args, "rollout_num_gpus", None) or 1, 1)
    at_once = (getattr(args, "sglang_server_concurrency", None) or 0) * engines
    return max(groups * args.n_samples_per_prompt, at_once)


def _returned(runtime: Runtime, samples: list[Sample]) -> Sample | list[Sample]:
    """The samples in the form that every episode of this run has."""
    config = runtime.config
    return samples[0] if config.history == "full" and not config.bootstrap_on_time_limit else EpisodeSamples(samples)


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
    runtime: Runtime, sample: Sample, episode: Episode, turns: list[Turn], stale: int, evaluation: bool
) -> list[Sample]:
    """The episode's samples; its first `stale` turns are not trained on. Evaluation takes no bootstrap sample."""
    group = group_of(sample)
    group = group if group is not None else 0
    wanted = runtime.config.bootstrap_on_time_limit and turns[-1].truncated and not evaluation
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
    return samples


def _whole_episode(runtime: Runtime, sample: Sample, segment: Segment, group: int, stale: int) -> Sample:
    """All turns in one sample: the model's tokens as they came, what lies between them masked."""
    args, turns = runtime.args, segment.turns
    sample.tokens = list(turns[0].prompt.token_ids)
    sample.response, sample.response_length, sample.remove_sample = "", 0, False
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
        "valid_turns": sum(turn.valid for turn in segment.turns),
        "length_stops": sum(turn.generation.finish_reason == "length" for turn in segment.turns),
    }
    if segment.turns[-1].truncated:
        part.status = Sample.Status.TRUNCATED
    part.non_generation_time = sum(turn.env_s for turn in segment.turns)


def _failed(runtime: Runtime, sample: Sample, fault: str) -> Sample:
    """A sample that trains nothing: one masked token, so that the batch keeps its shape, and every key of a turn's."""
    group = group_of(sample)
    make_inert(sample, group if group is not None else 0, runtime.args, runtime.dummy_token)
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    spec = _spec(runtime, sample)
    sample.metadata = {
        **(sample.metadata or {}),
        **{"task_name": spec.name, "episode_id": spec.episode_id, "kind": "failed", "round_number": 0, "turns": 0},
        **{"stop": "failed", "fault": fault, "success": False, "episode_return": 0.0, "episode_turns": 0},
    }
    return sample
