"""Tasks and episodes of a configuration: which there are, and how one is drawn. Nothing here loads
torch."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from envs.mixture import TaskSpec, expand_tasks
from rollout.bridge.settings import EvalSettings, RolloutSettings
from rollout.errors import ConfigError
from rollout.spec import EnvSpec, EpisodeSpec
from rollout.turn import EnvReply


def read_tasks(settings: RolloutSettings, held_out: EvalSettings | None = None) -> list[TaskSpec]:
    """The YAML's `tasks` (or `eval.tasks`, which default to `tasks`), expanded and checked."""
    entries = (held_out.tasks if held_out is not None else ()) or settings.tasks
    if not entries:
        env = settings.rollout_interaction_env_path
        raise ConfigError(
            f"tasks is empty; name at least one task of {env}, as tasks: [NAME]; only a run on "
            "slime's own data set (--prompt-data) needs none"
        )
    specs = expand_tasks(
        entries,
        default_env_path=settings.rollout_interaction_env_path,
        default_options=settings.env,
    )
    if sum(task.weight for task in specs) <= 0:
        raise ConfigError("the weights of tasks must add up to more than 0")
    return specs


def try_each_task(
    settings: RolloutSettings, look: Callable[[EpisodeSpec, EnvReply], None] | None = None
) -> list[str]:
    """Try one episode of every task in a worker process; returns notes about what could not be
    tried.

    `look` gets the first reply of each. Raises SlimeVerlogError, with file, line and fix, for
    anything wrong.
    """
    from rollout.workers.trial import try_environments

    tasks = [*read_tasks(settings), *read_tasks(settings, settings.eval)]
    key = lambda task: (task.env_path, task.task, task.options)
    distinct = [task for i, task in enumerate(tasks) if key(task) not in map(key, tasks[:i])]
    episodes = [make_episode(settings, task, 0, settings.seed_start) for task in distinct]
    return asyncio.run(try_environments(episodes, settings, look=look))


def held_out_episodes(settings: RolloutSettings, tasks: list[TaskSpec]) -> list[EpisodeSpec]:
    """The episodes of an evaluation: the same seeds for every task."""
    held_out = settings.eval
    settings = settings.model_copy(update={"max_turns": held_out.max_turns or settings.max_turns})
    return [
        make_episode(settings, task, number * held_out.episodes + k, held_out.seed_start + k)
        for number, task in enumerate(tasks)
        for k in range(held_out.episodes)
    ]


def panel_hash(episodes: Iterable[EpisodeSpec]) -> str:
    """Hash which episodes are held out, as 12 hexadecimal digits.

    What counts are the environments, tasks, options, turn limits and seeds; their order does not,
    and repeats do not. Of a file or folder with an absolute path, and of a Python file, only the
    name counts. So the hash is the same on every machine and in every version of Python.
    """
    rows: set[str] = set()
    for episode in episodes:
        env = episode.env
        row = _portable([env.env_path, env.metadata, env.options, env.max_turns])
        rows.add(json.dumps(row, sort_keys=True, default=str))
    return hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()[:12]


def _portable(value: Any) -> Any:
    """Copy plain data; paths that differ between machines become names."""
    if isinstance(value, Mapping):
        return {str(key): _portable(inner) for key, inner in value.items()}
    if isinstance(value, str):
        is_of_machine = value.startswith("/") or value.endswith(".py")
        return PurePosixPath(value).name if is_of_machine else value
    if isinstance(value, Sequence):
        return [_portable(inner) for inner in value]
    return value


def training_seed(settings: RolloutSettings, episode_id: int) -> int:
    """The seed of a training episode: `seed_start` and those after it, without the held-out
    seeds."""
    seed = settings.seed_start + episode_id
    held_out = settings.eval
    first = max(settings.seed_start, held_out.seed_start)
    end = held_out.seed_start + held_out.episodes
    return seed + max(0, end - first) if seed >= first else seed


def pick_task(tasks: list[TaskSpec], seed: int, episode_id: int) -> TaskSpec:
    """Draw a task by weight; the draw depends on the run's seed and the episode's id alone."""
    return random.Random(f"{seed}/{episode_id}").choices(tasks, [task.weight for task in tasks])[0]


def make_episode(
    settings: RolloutSettings, task: TaskSpec, episode_id: int, seed: int
) -> EpisodeSpec:
    """The episode of one task and seed, as the environment pool starts it."""
    metadata = {"task": task.task, "seed": seed}
    env = EnvSpec(
        env_path=task.env_path,
        metadata=metadata,
        options=dict(task.options),
        max_turns=settings.max_turns,
    )
    return EpisodeSpec(episode_id=episode_id, name=task.name, env=env)
