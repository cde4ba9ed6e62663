"""Expands the YAML's `tasks:` list, which may name several environments, tasks and levels of
difficulty.

Every expanded task has a unique name, so metrics of two tasks are never mixed up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from pydantic import model_validator

from envs.errors import ConfigError
from slime_verlog import Field, Settings, read_settings

MIXTURE = "envs.mixture"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task to draw: a name for the metrics, a relative weight, and all options of its
    environment."""

    name: str
    env_path: str
    task: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


class TaskSettings(Settings):
    """One entry of the YAML's `tasks:` list; a plain name means `{task: NAME}`."""

    task: str
    """Name of the task, as its environment knows it."""
    env: str | None = None
    """Module or `.py` file of the environment; null for `rollout_interaction_env_path`."""
    name: str | None = None
    """Name in the metrics; null for the task's name."""
    weight: float = Field(1.0, ge=0)
    """How often the task is drawn, relative to the others."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the environment for this entry; they win over those under `env:`."""
    sweep: Mapping[str, tuple[Any, ...]] = Field(default_factory=dict)
    """A list of values for each of these settings; every combination is a task, with its part of
    the entry's weight."""

    @model_validator(mode="after")
    def _check_sweep(self) -> TaskSettings:
        for key, values in self.sweep.items():
            if not values:
                raise ConfigError(f"the sweep of task {self.task!r} over {key} lists no values")
            if key in self.options:
                raise ConfigError(
                    f"task {self.task!r} gives {key} both in options and in sweep; keep one"
                )
        return self


def build_env(sample: Any, args: Any) -> NoReturn:
    """Refuse a sample without `env_path` in its metadata: the mixture does not say which
    environment plays it."""
    raise ConfigError(
        "envs.mixture plays nothing itself; give every entry of tasks its own env, for example "
        "tasks: [{env: envs.babyai, task: goto}], or set env_path in the metadata of your data set"
    )


def expand_tasks(
    entries: Sequence[Any],
    *,
    default_env_path: str | None = None,
    default_options: Mapping[str, Any] | None = None,
) -> list[TaskSpec]:
    """Turn the YAML's `tasks:` list into one `TaskSpec` per task, in order; equal names get the
    environment's in front.

    Args:
        default_env_path: environment of entries without `env`.
        default_options: the YAML's `env:` mapping. It applies to the entries that play
            `default_env_path`, and to all entries if that is `envs.mixture`.

    Raises:
        ConfigError: unknown key, wrong type, no environment, or two tasks with the same name and
            environment.
    """
    specs: list[TaskSpec] = []
    for position, given in enumerate(entries):
        where = f"tasks[{position}]."
        entry = read_settings(
            TaskSettings, {"task": given} if isinstance(given, str) else given, where
        )
        path = entry.env or default_env_path
        if path is None or path == MIXTURE:
            raise ConfigError(
                f"{where}env is missing: a mixture does not say which environment plays "
                f"{entry.task!r}"
            )
        shared = (default_options or {}) if default_env_path in (path, MIXTURE) else {}
        combinations = list(itertools.product(*entry.sweep.values()))
        for values in combinations:
            swept = dict(zip(entry.sweep, values, strict=True))
            label = ",".join(f"{key}={value}" for key, value in swept.items())
            name = "/".join(filter(None, (entry.name or entry.task, label)))
            options = {**shared, **entry.options, **swept}
            weight = entry.weight / len(combinations)
            specs.append(
                TaskSpec(name=name, env_path=path, task=entry.task, weight=weight, options=options)
            )
    counts = Counter(spec.name for spec in specs)
    for place, spec in enumerate(specs):
        if counts[spec.name] > 1:
            module = spec.env_path.removesuffix(".py").replace("/", ".").rpartition(".")[2]
            specs[place] = replace(spec, name=f"{module}/{spec.name}")
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if twice:
        raise ConfigError(
            f"two tasks are called {twice[0]!r}, so their metrics would be mixed up; give one of "
            "them its own name"
        )
    return specs
