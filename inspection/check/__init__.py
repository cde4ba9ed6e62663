"""Tries an environment before training.

    slime-verlog check custom_configs/babyai.yaml
    slime-verlog check my_game.py --task island --set env.size=5
    slime-verlog check --model /models/Qwen3-4B

Builds every task. Plays one episode with the environment's expert, if it has one, and one with
random answers. Checks types, keys, endings, replays, times and sizes. Prints the first prompt as
the model sees it, then one row per check. For SWE and Harbor tasks, it also tries the reference
solution; missing images of Harbor tasks are built. The environment runs in a worker process with
time limits; an environment that hangs or crashes gives a row with an error. The exit code is 0 if
there are no errors.
"""

import argparse
from typing import Any

from inspection import target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    target.add_arguments(parser, optional=True)
    words = "print what is known of a checkpoint, show the prompt as it renders it, and count its tokens"
    parser.add_argument("--model", metavar="FOLDER", help=words)
    parser.add_argument("--seed", type=int, help="episode's seed; default: the YAML's seed_start")
    parser.add_argument(
        "--max-turns", type=int, default=200, metavar="N", help="per episode; default: %(default)s"
    )
    parser.add_argument("--no-prompt", action="store_true", help="do not print the first prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _check_model(options: argparse.Namespace) -> int:
    """Print the profile of a checkpoint without an environment; raises ConfigError without a
    checkpoint."""
    from slime_verlog import ConfigError

    if not options.model:
        raise ConfigError("nothing to check: name a YAML or an environment, or give --model FOLDER")
    from inspection.check.model import print_model
    from rollout.bridge.settings import RolloutSettings

    print_model(options.model, RolloutSettings(rollout_interaction_env_path="none"))
    return 0


def run(options: argparse.Namespace) -> int:
    """Check every task, print what was found, and return the exit code."""
    import json

    from tqdm import tqdm

    from inspection.check.findings import Status
    from inspection.check.session import ALL_ROWS, as_json, print_prompt, rows_of, sum_of

    target.check_numbers(options, {"seed": 0, "max_turns": 1})
    if options.target is None:
        return _check_model(options)
    chosen = target.read_target(options.target, options.task, options.set)
    encoders = None
    if options.model:
        from inspection.check.model import print_model

        encoders = print_model(options.model, chosen.settings)
    reports = []
    is_brief = len(chosen.tasks) > ALL_ROWS
    bar = tqdm(
        chosen.tasks, unit="task", disable=None if len(chosen.tasks) > 1 else True, leave=False
    )
    for task in bar:
        report = _report(options, chosen, task, encoders)
        if not reports and (unread := chosen.settings.memory.unread(chosen.settings.history)):
            does = "do" if len(unread) > 1 else "does"
            told = f"{', '.join(unread)} {does} nothing with memory.kind: {chosen.settings.memory.kind}"
            report.add("memory", Status.WARNING, told)
        reports.append(report)
        if options.json:
            continue
        with bar.external_write_mode():
            if len(reports) == 1 and not options.no_prompt:
                print_prompt(report, encoders)
            print(rows_of(report, is_brief), flush=True)
    print(
        json.dumps(as_json(options.target, reports), indent=1) if options.json else sum_of(reports)
    )
    return int(any(report.count(Status.ERROR) for report in reports))


def _report(options: argparse.Namespace, chosen: target.Target, task: Any, encoders: Any) -> Any:
    """Check one task, after building its images if it is one of Harbor's that needs them."""
    import asyncio
    import contextlib
    import sys
    from dataclasses import replace

    from inspection.build_images import build_images_of
    from inspection.check.findings import Status
    from inspection.check.session import TaskReport, check_task

    seed = chosen.settings.seed_start if options.seed is None else options.seed
    needs_images = task.env_path == "envs.harbor" and task.options.get("images")
    with contextlib.redirect_stdout(sys.stderr):  # the output may be JSON
        built = build_images_of(task) if needs_images else {}
    failed = [name for name, is_built in built.items() if not is_built]
    report = TaskReport(task.name, seed)
    if not failed or len(failed) < len(built):
        # The task may be "*", which draws from those that were built.
        exclude = [*task.options.get("exclude", ()), *failed]
        task = replace(task, options={**task.options, "exclude": exclude}) if failed else task
        report = asyncio.run(check_task(chosen, task, seed, options.max_turns, encoders))
    if failed:
        report.add("images", Status.ERROR, f"not built: {', '.join(failed)}")
    return report
