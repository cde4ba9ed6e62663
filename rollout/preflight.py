"""Checks a command line before any GPU is requested: `python -m rollout.preflight [train.py|train_async.py] FLAGS`.

The framework's own parser reads the flags, this project's checks follow, and one environment of every task is tried.
The verdict is one sentence, on the last line; slime's own output is shown only after an unexpected error.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from advantage.patch.versions import find_framework
from rollout.bridge.checks import BATCHES, SOURCE, check_flags, hooks_in_use, installs_advantages
from rollout.bridge.command_line import captured_output, parse_command_line
from rollout.bridge.flags import RolloutFlags, sentences
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.roles import check_start_weights, overrides_of
from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, MissingDependencyError
from rollout.tasks import try_each_task
from slime_verlog import command

DISCOUNTS = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
SLIME_DISCOUNTS = {"gamma": "gamma_step and gamma_token", "lambd": "lambda_step and lambda_token"}


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
    """Raise ConfigError if the flags do not suit slime's script; names the flag to change."""
    if script == "train_async.py" and RolloutFlags.read(args).colocate:
        raise ConfigError(
            "train_async.py plays and trains at the same time, so --colocate cannot share their GPUs: leave it out and "
            "give --rollout-num-gpus (our scripts: --disaggregated), or run train.py"
        )


def check(args: Any) -> list[str]:
    """Check flags and YAML, and try one environment of every task; returns notes about what could not be tried."""
    if args.data_source_path != SOURCE:
        check_flags(args, load_settings(args))
        return []
    source = EpisodeSource(args)  # checks the flags
    return try_each_task(source.settings)


def flags_without_effect(args: Any, given: Collection[str]) -> list[str]:
    """Return one sentence per flag without effect; `given` are the flags on the command line, without slime's own."""
    hooks = hooks_in_use(args)
    idle = [sentence for flag, sentence in sentences("warned", hooks).items() if flag in given]
    return [*idle, *_replaced(args, hooks), *_discounts(args, hooks)]


def _replaced(args: Any, hooks: Collection[str]) -> list[str]:
    found: list[str] = []
    evaluates = getattr(args, "eval_function_path", None)
    if "batches" in hooks and evaluates and evaluates not in BATCHES:
        found.append(f"--eval-function-path {evaluates} plays the evaluations, so eval in the YAML is not read")
    if "plays" in hooks and getattr(args, "loss_type", None) == "custom_loss":
        found.append(
            f"--loss-type custom_loss: {args.custom_loss_function_path} replaces the policy loss, so clipping, entropy "
            "and KL flags have no effect unless it reads them"
        )
    return found


def _discounts(args: Any, hooks: Collection[str]) -> list[str]:
    if "patch" not in hooks:
        return []
    found: list[str] = []
    actor, critic = overrides_of(args, "actor"), overrides_of(args, "critic")
    for role, overrides in (("actor", actor), ("critic", critic)):
        found += [
            f"{args.megatron_config_path} sets {name} for the {role}, which nothing reads: the discounts are {keys} "
            "in the YAML"
            for name, keys in SLIME_DISCOUNTS.items()
            if name in overrides
        ]
    found += [
        f"{args.megatron_config_path} sets {name} {critic[name]} for the critic alone: it changes the critic's targets "
        "and not the actor's advantages, which each role computes for itself; set it in the YAML for both"
        + (", or lambda_critic for the critic" if name.startswith("lambda") else "")
        for name in DISCOUNTS
        if name in critic and name not in actor
    ]
    return found


if __name__ == "__main__":
    main()
