"""Flags that train.py accepts and that have no effect with this plugin; preflight warns about each one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rollout.bridge.checks import BATCHES, hooks_in_use
from rollout.bridge.flags import sentences
from rollout.bridge.roles import overrides_of

DISCOUNTS = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
SLIME_DISCOUNTS = {"gamma": "gamma_step and gamma_token", "lambd": "lambda_step and lambda_token"}


def flags_without_effect(args: Any, given: Collection[str]) -> list[str]:
    """One sentence per flag without effect, with what to set instead.

    Args:
        given: the flags on the command line; in `args`, slime has filled in others from them.
    """
    hooks = hooks_in_use(args)
    idle = [sentence for flag, sentence in sentences("warned", hooks).items() if flag in given]
    return [*idle, *_replaced(args, hooks), *_discounts(args, hooks)]


def _replaced(args: Any, hooks: Collection[str]) -> list[str]:
    """What a function of the user's own replaces."""
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
    """Discounts in the roles' own settings."""
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
