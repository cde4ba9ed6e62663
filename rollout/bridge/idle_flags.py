"""Flags that train.py accepts and that have no effect with this plugin; preflight warns about each one."""

from __future__ import annotations

from typing import Any

from rollout.bridge.checks import BATCHES, CONVERTER, GENERATE, INSTALL
from rollout.bridge.roles import overrides_of

DISCOUNTS = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
SLIME_DISCOUNTS = {"gamma": "gamma_step and gamma_token", "lambd": "lambda_step and lambda_token"}


def flags_without_effect(args: Any) -> list[str]:
    """One sentence per flag without effect, with what to set instead."""
    return [*_hooks(args), *_discounts(args)]


def _hooks(args: Any) -> list[str]:
    played_by = getattr(args, "rollout_function_path", None)
    fixed_turn = played_by in BATCHES
    generate = getattr(args, "custom_generate_function_path", None)
    found: list[str] = []
    if fixed_turn and generate:
        found.append(
            f"--custom-generate-function-path {generate} is never called: --rollout-function-path {played_by} plays "
            "the turns; leave one of them out"
        )
    reward = getattr(args, "custom_rm_path", None)
    if reward and (fixed_turn or generate == GENERATE):
        found.append(f"--custom-rm-path {reward} is never called: the environment pays every turn; leave it out")
    process = getattr(args, "custom_reward_post_process_path", None)
    if process and getattr(args, "custom_convert_samples_to_train_data_path", None) == CONVERTER:
        found.append(
            f"--custom-reward-post-process-path {process} is never called: {CONVERTER} replaces the converter that "
            "would call it; leave it out"
        )
    return found


def _discounts(args: Any) -> list[str]:
    if getattr(args, "custom_megatron_init_path", None) != INSTALL:
        return []
    found = [
        f"--{name} {getattr(args, name)} is not read: the discounts are {keys} in the YAML"
        for name, keys in SLIME_DISCOUNTS.items()
        if getattr(args, name, 1.0) != 1.0
    ]
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
