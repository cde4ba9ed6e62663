"""Reads the YAML with `--set` and `--sweep` into points: checked settings, and the episodes to play with each."""

import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rollout.bridge.overrides import read_value, set_key, split_assignment, with_assignments
from rollout.bridge.settings import RolloutSettings, check_keys
from rollout.play.memory import build_memory
from rollout.spec import EpisodeSpec
from rollout.tasks import held_out_episodes, read_tasks, try_each_task
from slime_verlog import ConfigError, read_yaml_mapping

Key = tuple[str, str, int, int]
"""Setting, task name, seed and repeat: what tells the episodes of one player apart."""

SPEED_KEYS = ("n_env", "env_backend", "env_workers", "env_step_timeout_s", "env_reset_timeout_s", "engine")
"""YAML keys that do not change which episodes are played, nor how."""


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep, or the only one."""

    values: Mapping[str, Any]
    """The swept keys."""
    config: Mapping[str, Any]
    """The YAML's mapping at this point."""
    settings: RolloutSettings
    repeats: int = 1

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "-"

    @cached_property
    def episodes(self) -> dict[Key, EpisodeSpec]:
        """The held-out episodes."""
        specs = held_out_episodes(self.settings, read_tasks(self.settings, self.settings.eval))
        return {  # the sampling depends on the episode's id
            (self.label, spec.name, spec.env.metadata["seed"], repeat): replace(
                spec, episode_id=spec.episode_id + repeat * len(specs)
            )
            for repeat in range(self.repeats)
            for spec in specs
        }

    @property
    def world(self) -> str:
        """Equal for points with the same environments."""
        settings = self.settings
        parts = (settings.rollout_interaction_env_path, settings.env, settings.tasks, settings.eval.tasks)
        return json.dumps([*parts, settings.max_turns, settings.eval.max_turns], default=str, sort_keys=True)


def read_sweep(options: Namespace) -> tuple[dict[str, Any], list[SweepPoint]]:
    """Return the mapping with `--set` and the sweep's points; tries every task, or raises SlimeVerlogError."""
    config = with_assignments(read_yaml_mapping(options.config, "YAML"), options.set, "--set")
    for key, given in {"eval.episodes": options.episodes, "n_env": options.concurrency}.items():
        config = config if given is None else set_key(config, key, given)
    points = []
    for values in sweep_points(options.sweep):
        swept = config
        for key, value in values.items():
            swept = set_key(swept, key, value)
        settings = check_keys(swept)
        build_memory(settings.memory)
        points.append(SweepPoint(values, swept, settings, options.repeats))
    twice = [a.label for a, b in itertools.combinations(points, 2) if a.label == b.label]
    if twice:
        raise ConfigError(f"--sweep has {twice[0]} twice")
    for settings in {point.world: point.settings for point in points}.values():
        for note in try_each_task(settings):
            print(f"note: {note}", file=sys.stderr)
    return config, points


def sweep_points(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of `key=v1,v2,...`, or one empty point; raises ConfigError for another form."""
    axes: list[list[tuple[str, Any]]] = []
    for sweep in sweeps:
        key, values = split_assignment(sweep, "--sweep", "memory.n=1,2,4")
        axes.append([(key, value) for value in read_value(f"[{values}]", sweep)])
    return [dict(point) for point in itertools.product(*axes)]


def without_speed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping without keys that only change how fast episodes are played, and how many."""
    held_out = {key: value for key, value in (config.get("eval") or {}).items() if key != "episodes"}
    kept = {key: value for key, value in config.items() if key not in (*SPEED_KEYS, "eval")}
    return {**kept, "eval": held_out}
