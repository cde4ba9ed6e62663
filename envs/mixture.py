"""Several tasks, environments and levels of difficulty in one YAML.

Invariant: every expanded task has a name of its own, so that metrics of two tasks never run together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.base import BaseInteractionEnv
from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.options import read_options

MIXTURE = "envs.mixture"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task as it is drawn: `name` for the metrics, then what builds its environment.

    `options` are complete: whatever is shared by all tasks is already in them. `weight` is relative.
    """

    name: str
    env_path: str
    task: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One mapping of the YAML's `tasks:` list.

    `sweep` maps an option to the values it takes; every combination becomes a task, and `weight` is the weight
    of all of them together.
    """

    task: str
    env: str | None = None
    name: str | None = None
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.weight < float("inf"):
            raise ConfigError(f"the weight of task {self.task!r} must be a number >= 0, got {self.weight}")
        for key, values in self.sweep.items():
            if not values:
                raise ConfigError(f"the sweep of task {self.task!r} over {key} lists no values")
            if key in self.options:
                raise ConfigError(f"task {self.task!r} gives {key} both in options and in sweep; keep one")


def build_env(sample: Any, args: Any) -> BaseInteractionEnv:
    """Build the environment that `sample.metadata` names (`env_path`, `env_options`; `EpisodeSource` fills both).

    Options come from `args.env`, where the episode source has merged them; `env_options` wins over them.

    Raises:
        ConfigError: the sample names no environment, or the environment refuses its task or an option.
    """
    metadata = getattr(sample, "metadata", None) or {}
    path = metadata.get("env_path")
    if not isinstance(path, str) or path == MIXTURE:
        raise ConfigError(
            f"sample.metadata['env_path'] must name the environment to play, got {path!r}; give every entry of "
            "tasks its own env, for example tasks: [{env: envs.babyai, task: goto}]"
        )
    shared = getattr(args, "env", None) or {}
    return build_env_from(path, metadata, {**shared, **(metadata.get("env_options") or {})})


def expand_tasks(
    entries: Sequence[Any],
    *,
    default_env_path: str | None = None,
    default_options: Mapping[str, Any] | None = None,
) -> list[TaskSpec]:
    """Turn the YAML's `tasks:` list into one `TaskSpec` a task, in order.

    An entry is a task's name or a mapping `{task, env, name, weight, options, sweep}`. Entries without `env` play
    `default_env_path`. `default_options` (the YAML's `env:`) lie under the options of entries that play
    `default_env_path`, and under those of all entries where that is `envs.mixture`; a task of any other
    environment knows only its own options. Of two tasks with one name, each is named after its environment.

    Raises:
        ConfigError: unknown key, wrong type, no environment, or two tasks that cannot be told apart.
    """
    specs: list[TaskSpec] = []
    for position, entry in enumerate(entries):
        where = f"tasks[{position}]."
        mapping = {"task": entry} if isinstance(entry, str) else entry
        specs += _expand(read_options(_Entry, mapping, where), where, default_env_path, default_options or {})
    return _name_apart(specs)


def _expand(entry: _Entry, where: str, default_path: str | None, default_options: Mapping[str, Any]) -> list[TaskSpec]:
    path = entry.env or default_path
    if path is None or path == MIXTURE:
        raise ConfigError(f"{where}env is missing: a mixture cannot know which environment plays {entry.task!r}")
    shared = default_options if default_path in (path, MIXTURE) else {}
    points = list(itertools.product(*entry.sweep.values()))
    base = entry.name or entry.task
    specs = []
    for point in points:
        swept = dict(zip(entry.sweep, point, strict=True))
        label = ",".join(f"{key}={value}" for key, value in swept.items())
        specs.append(
            TaskSpec(
                name=f"{base}/{label}" if label else base,
                env_path=path,
                task=entry.task,
                weight=entry.weight / len(points),
                options={**shared, **entry.options, **swept},
            )
        )
    return specs


def _name_apart(specs: list[TaskSpec]) -> list[TaskSpec]:
    """Prefix the environment's name where one task name means several environments."""
    counts = Counter(spec.name for spec in specs)
    specs = [
        replace(spec, name=f"{_short(spec.env_path)}/{spec.name}") if counts[spec.name] > 1 else spec for spec in specs
    ]
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise ConfigError(f"two tasks are called {twice[0]!r}, so their metrics would run together; give one a name:")
    return specs


def _short(env_path: str) -> str:
    return env_path.removesuffix(".py").replace("/", ".").rsplit(".", 1)[-1]
