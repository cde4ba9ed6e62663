"""Checks a whole command line for slime's train.py before any GPU is asked for: `python -m rollout.preflight FLAGS`.

The flags go through the installed framework's own parser, then through this project's checks; every task's
environment is made once, so that a missing package or a misspelt option shows here and not on a cluster. The verdict is
one sentence, on the last line. What slime printed on the way is shown only if something unforeseen went wrong.
"""

from __future__ import annotations

import sys
from typing import Any

from advantage.megatron.versions import find_framework
from rollout.bridge.checks import INSTALL, SOURCE, check_flags
from rollout.bridge.command_line import captured_output, parse_command_line
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.idle_flags import flags_without_effect
from rollout.bridge.roles import check_start_weights
from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource, make_episode
from rollout.errors import SlimeVerlogError


def main() -> int:
    """Exit status 0 if training may start; 2 with a sentence on stderr if not."""
    if FRAMEWORK == "none":
        print("error: neither slime nor miles can be imported; put a checkout on PYTHONPATH", file=sys.stderr)
        return 2
    warnings: list[str] = []
    error: SlimeVerlogError | None = None
    with captured_output():
        try:
            args = parse_command_line()
            warnings = flags_without_effect(args)
            check(args)
            check_start_weights(args)
            if getattr(args, "custom_megatron_init_path", None) == INSTALL:
                find_framework()
        except SlimeVerlogError as found:
            error = found
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("preflight: flags, YAML and environments are fine")
    return 0


def check(args: Any) -> None:
    """Check flags and YAML, and make one environment of every task.

    Raises:
        SlimeVerlogError: what is wrong, and what to change.
    """
    config = load_settings(args)
    check_flags(args, config)
    if args.data_source_path == SOURCE:
        source = EpisodeSource(args)
        for task in [*source.tasks, *source.eval_tasks]:
            make_episode(config, task, 0, config.seed_start).env.build().close()


if __name__ == "__main__":
    sys.exit(main())
