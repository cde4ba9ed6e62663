"""Samples that slime's own outer loop hands to `rollout.generate`: which episode each stands for."""

from collections.abc import Mapping
from typing import Any

from rollout.bridge.framework import Sample
from rollout.bridge.sample import set_group
from rollout.spec import EnvSpec, EpisodeSpec


def handout(spec: EpisodeSpec, index: int) -> Sample:
    """A sample that slime's outer loop hands to `rollout.generate`, with the episode to play."""
    sample = Sample()
    sample.group_index = spec.episode_id
    sample.index = index
    sample.metadata = {
        **spec.env.metadata,
        "task_name": spec.name,
        "env_path": spec.env.env_path,
        "env_options": dict(spec.env.options),
        "episode_id": spec.episode_id,
    }
    set_group(sample, index)
    return sample


def episode_id_of(sample: Sample) -> int:
    """The id of the episode that `handout` put into the sample."""
    assert sample.group_index is not None
    return sample.group_index


def episode_spec(
    sample: Sample, env_path: str, options: Mapping[str, Any], max_turns: int | None
) -> EpisodeSpec:
    """The episode that a sample's metadata names; `env_path` and `options` are defaults."""
    metadata = dict(sample.metadata or {})
    env = EnvSpec(
        env_path=metadata.get("env_path", env_path),
        metadata=metadata,
        options=metadata.get("env_options", options),
        label=sample.label,
        prompt=sample.prompt or None,
        multimodal_inputs=sample.multimodal_inputs,
        max_turns=max_turns,
    )
    name = metadata.get("task_name") or str(metadata.get("task", env_path))
    return EpisodeSpec(sample.index or 0, name, env, sample.session_id)


def mark_aborted(sample: Sample) -> Sample:
    """Mark the sample as stopped by slime's outer loop, which may hand it out again."""
    sample.status = Sample.Status.ABORTED
    return sample
