"""Reads the YAML with `--set` and `--sweep` into points: checked settings, and the episodes to play with each."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from rollout.bridge.settings import RolloutSettings, check_keys
from rollout.data_source import build_each_task, held_out_episodes, read_tasks
from rollout.play.memory import build_memory
from rollout.spec import EpisodeSpec
from slime_verlog import ConfigError, read_yaml

Key = tuple[str, str, int]
"""Setting, task name and seed: what tells the episodes of one player apart."""

SPEED_KEYS = ("n_env", "env_backend", "env_workers", "env_step_timeout_s", "env_reset_timeout_s", "engine")
"""YAML keys that do not change which episodes are played, nor how."""


@dataclass(frozen=True)
class Point:
    """One point of a sweep, or the only one."""

    values: Mapping[str, Any]
    """The swept keys."""
    config: Mapping[str, Any]
    """The YAML's mapping at this point."""
    settings: RolloutSettings

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "-"

    @cached_property
    def episodes(self) -> dict[Key, EpisodeSpec]:
        """The held-out episodes."""
        specs = held_out_episodes(self.settings, read_tasks(self.settings, self.settings.eval))
        return {(self.label, spec.name, spec.env.metadata["seed"]): spec for spec in specs}

    @property
    def world(self) -> str:
        """Equal for points with the same environments."""
        settings = self.settings
        parts = (settings.rollout_interaction_env_path, settings.env, settings.tasks, settings.eval.tasks)
        return json.dumps([*parts, settings.max_turns, settings.eval.max_turns], default=str, sort_keys=True)


def read_points(options: Namespace) -> tuple[dict[str, Any], list[Point]]:
    """The YAML's mapping with `--set`, and the points of the sweep; every task has been built once.

    Raises:
        SlimeVerlogError: a key, a value, a task or the environment is wrong; one sentence.
    """
    config = read_config(options)
    points = []
    for values in sweep_points(options.sweep):
        swept = config
        for key, value in values.items():
            swept = set_key(swept, key, value)
        settings = check_keys(swept)
        build_memory(settings.memory)
        points.append(Point(values, swept, settings))
    twice = [a.label for a, b in itertools.combinations(points, 2) if a.label == b.label]
    if twice:
        raise ConfigError(f"--sweep has {twice[0]} twice")
    for settings in {point.world: point.settings for point in points}.values():
        build_each_task(settings)
    return config, points


def read_config(options: Namespace) -> dict[str, Any]:
    """The YAML's mapping with `--set`, `--episodes` and `--concurrency`."""
    config = read_yaml(options.config, "--config")
    if not isinstance(config, dict):
        raise ConfigError(f"--config: {options.config} must hold a mapping, got {type(config).__name__}")
    given = {"eval.episodes": options.episodes, "n_env": options.concurrency}
    for setting in options.set:
        key, value = _split(setting, "--set", "memory.n=4")
        config = set_key(config, key, _parse(value, setting))
    for key, value in given.items():
        if value is not None:
            config = set_key(config, key, value)
    return config


def set_key(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the YAML's mapping with the dotted key `path` set.

    Raises:
        ConfigError: the path leads through a key that is not a mapping.
    """
    head, _, rest = path.partition(".")
    if not rest:
        return {**config, head: value}
    inner = config.get(head) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{path} cannot be set, because {head} is {inner!r}")
    return {**config, head: set_key(inner, rest, value)}


def sweep_points(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of `key=v1,v2,...`; a single empty point without any.

    Raises:
        ConfigError: a sweep does not have this form.
    """
    axes: list[list[tuple[str, Any]]] = []
    for sweep in sweeps:
        key, values = _split(sweep, "--sweep", "memory.n=1,2,4")
        axes.append([(key, value) for value in _parse(f"[{values}]", sweep)])
    return [dict(point) for point in itertools.product(*axes)]


def without_speed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys that only change how fast episodes are played, and how many."""
    held_out = {key: value for key, value in (config.get("eval") or {}).items() if key != "episodes"}
    kept = {key: value for key, value in config.items() if key not in (*SPEED_KEYS, "eval")}
    return {**kept, "eval": held_out}


def _split(text: str, option: str, example: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise ConfigError(f"{option} must look like {example}, got {text!r}")
    return key, value


def _parse(value: str, given: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"the value in {given!r} is not valid YAML: {reason}") from error
