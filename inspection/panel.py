"""Prints the held-out episodes of a YAML, and a hash that names this panel.

    slime-verlog panel custom_configs/babyai.yaml
    slime-verlog panel custom_configs/babyai.yaml --episodes 128 --set eval.seed_start=2000

Two results are about the same episodes if their hashes are equal. The tables of evaluations and
studies have it, too. It covers environments, tasks, options, turn limits and seeds, and does not
depend on the machine, the number of workers, the order of tasks or files, or the version of Python.
"""

import argparse
from contextlib import suppress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("config", metavar="YAML", help="as for --custom-config-path")
    parser.add_argument(
        "--episodes",
        type=int,
        metavar="N",
        help="episodes per task; default: the YAML's eval.episodes",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable"
    )


def run(options: argparse.Namespace) -> int:
    """Print one line per task, and the hash."""
    from envs.loading import load_env_module
    from inspection.target import evaluated
    from inspection.text import align
    from rollout.bridge.settings import check_keys
    from rollout.tasks import held_out_episodes, panel_hash, read_tasks
    from slime_verlog import SlimeVerlogError, read_settings

    settings = check_keys(evaluated(options))
    tasks = read_tasks(settings, settings.eval)
    for task in tasks:
        model = None
        with suppress(SlimeVerlogError):  # a panel has a hash where its environment is missing, too
            model = getattr(load_env_module(task.env_path), "SETTINGS", None)
        if model is not None:
            read_settings(model, task.options, "env.")
    episodes = held_out_episodes(settings, tasks)
    first = settings.eval.seed_start
    seeds = f"{first} to {first + settings.eval.episodes - 1}"
    limit = str(settings.eval.max_turns or settings.max_turns or "-")
    lines = [["name", "task", "environment", "seeds", "max turns", "options"]]
    for task in tasks:
        given = ", ".join(f"{key}={value}" for key, value in sorted(task.options.items()))
        lines.append([task.name, task.task, task.env_path, seeds, limit, given])
    print("\n".join(align(lines)))
    print(f"\npanel {panel_hash(episodes)}: {len(episodes)} episodes")
    return 0
