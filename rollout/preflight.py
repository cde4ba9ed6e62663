"""Checks a command line for slime's train.py before any GPU is requested: `python -m rollout.preflight [SCRIPT] FLAGS`.

SCRIPT is `train.py` (the default) or `train_async.py`.

The flags go through the installed framework's own parser and then through this project's checks. One environment of
every task is tried in a worker process, which finds missing packages, misspelt options and broken environments. The
verdict is one sentence, on the last line. slime's own output is shown only after an unexpected error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from advantage.patch.versions import find_framework
from rollout.bridge.checks import SOURCE, check_flags, installs_advantages
from rollout.bridge.command_line import captured_output, parse_command_line
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.idle_flags import flags_without_effect
from rollout.bridge.roles import check_start_weights
from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, MissingDependencyError
from rollout.tasks import try_each_task
from slime_verlog import command


@command()
def main() -> None:
    """Print the verdict; exit with status 1 and a sentence on stderr if training must not start."""
    if FRAMEWORK == "none":
        raise MissingDependencyError("neither slime nor miles can be imported; put a checkout on PYTHONPATH")
    script = Path(sys.argv.pop(1)).name if sys.argv[1:2] and sys.argv[1].endswith(".py") else "train.py"
    with captured_output():
        args = parse_command_line()
        check_script(script, args)
        notes = check(args)
        check_start_weights(args)
        if installs_advantages(args):
            find_framework()
        warnings = flags_without_effect(args, {word.partition("=")[0] for word in sys.argv[1:]})
    for warning in [*notes, *warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    print("preflight: flags, YAML and environments are fine")


def check_script(script: str, args: Any) -> None:
    """Check that the flags suit the script of slime that they are for.

    Raises:
        ConfigError: names the flag to change.
    """
    if script == "train_async.py" and RolloutFlags.read(args).colocate:
        raise ConfigError(
            "train_async.py plays and trains at the same time, so --colocate cannot share their GPUs: leave it out and "
            "give --rollout-num-gpus (our scripts: --disaggregated), or run train.py"
        )


def check(args: Any) -> list[str]:
    """Check flags and YAML, and try one environment of every task. Returns notes about what could not be tried.

    Raises:
        SlimeVerlogError: says what is wrong and what to change.
    """
    if args.data_source_path != SOURCE:
        check_flags(args, load_settings(args))
        return []
    source = EpisodeSource(args)  # checks the flags
    return try_each_task(source.settings)


if __name__ == "__main__":
    main()
