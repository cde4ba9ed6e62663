"""Reads what a command works on: a YAML, or an environment's module or file, with `--task` and
`--set` applied."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.mixture import TaskSpec
    from rollout.bridge.settings import RolloutSettings

ANY_TASK = "default"  # the task of an environment that names none


@dataclass(frozen=True)
class Target:
    """What is checked or played."""

    settings: RolloutSettings
    tasks: list[TaskSpec]
    """The chosen tasks, or all of training and evaluation."""
    guessed: bool = False
    """Whether the task was neither given nor named by the environment."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds to a `ConfigError` that no task was given, if that may be the reason."""
        from slime_verlog import ConfigError

        try:
            yield
        except ConfigError as error:
            if not self.guessed:
                raise
            hint = f"no task was given, so {ANY_TASK!r} was tried; choose one with --task"
            raise ConfigError(f"{error} ({hint})") from error


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare the options that choose a target, which may be left out if it is `optional`."""
    words = "YAML, or an environment: module name or .py file"
    parser.add_argument(
        "target", metavar="ENV_OR_YAML", nargs="?" if optional else None, help=words
    )
    parser.add_argument(
        "--task", help="one task; default: all tasks of the YAML, or the environment's DEFAULT_TASK"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )


def finite(text: str) -> float:
    """Read an option's number; raises ArgumentTypeError if it is none, infinite or nan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return number


def check_numbers(options: argparse.Namespace, least: Mapping[str, float]) -> None:
    """Check options that have a least value; raises ConfigError if one is below it."""
    from slime_verlog import ConfigError

    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def check_free(path: Path, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Raise ConfigError if a file that a command is going to write exists and may not be replaced,
    or is one of those that it reads."""
    from slime_verlog import ConfigError

    if path.resolve() in {source.resolve() for source in read}:
        raise ConfigError(f"--out {path} is read here, and would be lost; give another place")
    if path.is_file() and not overwrite:
        raise ConfigError(
            f"--out {path} exists; give another file, or replace this one with --overwrite"
        )


def evaluated(options: argparse.Namespace) -> dict[str, Any]:
    """Read the YAML of an evaluation, with `--set` and `--episodes`; its keys are not checked.
    Raises ConfigError."""
    from rollout.bridge.settings import set_key, with_assignments
    from slime_verlog import read_yaml_mapping

    config = with_assignments(read_yaml_mapping(options.config, "YAML"), options.set, "--set")
    return (
        config if options.episodes is None else set_key(config, "eval.episodes", options.episodes)
    )


def read_target(
    path: str, task: str | None = None, overrides: Sequence[str] = (), default: str | None = None
) -> Target:
    """Read a YAML, or make the configuration of an environment that is given alone; raises
    ConfigError for a mistake.

    A YAML without `tasks` has the task `default`, if there is one.
    Modules in the current directory can be imported, as with `python -m`.
    """
    from rollout.bridge.settings import check_keys, with_assignments
    from slime_verlog import read_yaml_mapping

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    guessed = False
    if path.endswith((".yaml", ".yml")):
        config = read_yaml_mapping(path, "ENV_OR_YAML")
    else:
        named = task or default_task(path)
        guessed = named is None
        config = {"rollout_interaction_env_path": path, "tasks": [named or ANY_TASK]}
    settings = check_keys(with_assignments(config, overrides, "--set"))
    if default is not None and not settings.tasks:
        settings = settings.model_copy(update={"tasks": (default,)})
    return Target(settings, _choose(settings, task), guessed)


def _choose(settings: RolloutSettings, task: str | None) -> list[TaskSpec]:
    """All distinct tasks of training and evaluation, or those with this name."""
    from rollout.tasks import read_tasks

    if task is not None and not settings.tasks:
        settings = settings.model_copy(update={"tasks": (task,)})
    found: dict[str, TaskSpec] = {}
    for spec in [*read_tasks(settings), *read_tasks(settings, settings.eval)]:
        found.setdefault(repr((spec.env_path, spec.task, dict(spec.options))), spec)
    if task is None:
        return list(found.values())
    chosen = [spec for spec in found.values() if task in (spec.name, spec.task)]
    return chosen or read_tasks(settings.model_copy(update={"tasks": (task,)}))


def default_task(path: str) -> str | None:
    """The literal `DEFAULT_TASK` of an environment's module, which is read without importing it;
    None without one."""
    with suppress(ImportError, OSError, SyntaxError, ValueError):
        spec = None if path.endswith(".py") else importlib.util.find_spec(path)
        file = spec.origin or "" if spec is not None else path
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULT_TASK":
                return ast.literal_eval(node.value)
    return None
