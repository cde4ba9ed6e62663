"""slime's `--custom-megatron-init-path`: installs dual-discount GAE and the first-token value weight in both roles.

slime calls it once in every process of the actor and of the critic. It changes these things:

- `value_loss_function` is wrapped, because slime has no flag for it. So are `compute_policy_loss` with
  `policy_loss: dis`, and the critic's `train` with `critic_updates` above 1 or `actor_values: after`.
- `initialize_model_and_optimizer` is wrapped, to note the role and to check frozen parameters.
- `get_batch` is wrapped, to expand the pictures that the rollout ships small, and `train_one_step`, to check metrics.
- `--custom-advantage-function-path` is set, if the framework has it. slime drops this flag for the critic when
  `--megatron-config-path` is used, which is how the critic gets its own learning rate.
- `compute_advantages_and_returns` is replaced only if the framework lacks that flag, or if it would whiten without
  context parallelism. The training process's module imports the function by name, so it is replaced there too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from advantage.errors import FlagError, UnsupportedFrameworkError
from advantage.patch.critic import install_critic, pretrain_critic
from advantage.patch.ppo import make_compute_advantages
from advantage.patch.roles import check_frozen_flags, install_roles
from advantage.patch.training_steps import install_training_steps
from advantage.patch.versions import Framework, find_framework, original
from advantage.policy_loss import check_dis, install_dis
from advantage.settings import AdvantageSettings, advantage_flags, advantage_settings
from advantage.turn_table import CONVERTER
from advantage.value_weight import weigh_first_tokens
from slime_verlog import read_yaml

logger = logging.getLogger(__name__)

HOOK = "advantage.hook.compute_advantages"
INSTALL = "advantage.patch.install"

_undo: list[Callable[[], None]] = []


def install(args: Any) -> None:
    """Make this process compute dual-discount advantages and weigh first tokens; calling it again is safe.

    Raises:
        ConfigError: the flags would give wrong advantages, or a setting is out of range; names the flag or key.
        UnsupportedFrameworkError: the patch does not support the framework, or something else patched it.
    """
    framework = find_framework()
    settings = check_flags(args)
    _replace(framework.loss, "value_loss_function", weigh_first_tokens)
    if framework.model is not None:
        install_training_steps(framework.model, settings, _replace)
    if settings.policy_loss == "dis":
        install_dis(framework.loss, _replace)
    install_roles(framework, _replace)
    if settings.value_pretraining.batches:
        pretrain_critic(args, framework, settings.value_pretraining, _replace)
    else:
        install_critic(framework, settings, _replace)
    replaces = not framework.has_flag or (_whitens_slices(args) and not framework.whitens_all_ranks)
    if replaces:
        ours = make_compute_advantages(framework.loss)
        for module in filter(None, (framework.loss, framework.actor)):
            _replace(module, "compute_advantages_and_returns", lambda _: ours)
    if framework.has_flag and getattr(args, "custom_advantage_function_path", None) != HOOK:
        args.custom_advantage_function_path = HOOK
        _undo.append(lambda: setattr(args, "custom_advantage_function_path", None))
    _check_actor(framework)
    logger.info(
        "dual-discount GAE is installed in %s through %s: %s, first-token value weight %g",
        framework.name,
        "compute_advantages_and_returns" if replaces else "--custom-advantage-function-path",
        settings.discounts,
        settings.value_first_token_weight,
    )


def uninstall() -> None:
    """Undo every `install` in this process."""
    while _undo:
        _undo.pop()()


def _check_actor(framework: Framework) -> None:
    """Check that the training process's module uses the patched `compute_advantages_and_returns`."""
    actor, loss = framework.actor, framework.loss
    if actor and actor.compute_advantages_and_returns is not loss.compute_advantages_and_returns:
        raise UnsupportedFrameworkError(
            f"{actor.__name__} uses another compute_advantages_and_returns than {loss.__name__}; something else "
            "replaced one of them"
        )


def check_flags(args: Any) -> AdvantageSettings:
    """Refuse flags that would silently train on other advantages than the configured ones; return the settings.

    Raises:
        FlagError: names the flag to change.
        ConfigError: a setting is out of range; names the key and the value.
    """
    if args.advantage_estimator != "ppo":
        raise FlagError(
            f"--advantage-estimator is {args.advantage_estimator}, but dual-discount GAE needs a critic: give "
            f"--advantage-estimator ppo, or leave {INSTALL} out"
        )
    if not getattr(args, "compute_advantages_and_returns", True):
        raise FlagError(f"--disable-compute-advantages-and-returns leaves nothing for {INSTALL} to do; remove one")
    if not getattr(args, "custom_convert_samples_to_train_data_path", None):
        raise FlagError(f"no converter writes the turn table, which the advantages need; give {CONVERTER}")
    foreign = getattr(args, "custom_advantage_function_path", None)
    if foreign not in (None, HOOK):
        raise FlagError(f"--custom-advantage-function-path is {foreign}; {INSTALL} would replace it, drop one of them")
    settings = advantage_settings(args)
    _check_roles(args, settings)
    check_frozen_flags(args, settings)
    if settings.policy_loss == "dis":
        check_dis(advantage_flags(args))
    return settings


def _check_roles(args: Any, settings: AdvantageSettings) -> None:
    """Refuse a `--megatron-config-path` that disables the patch for one role, or has other lambdas for the critic."""
    path = getattr(args, "megatron_config_path", None)
    if not path or not Path(path).is_file():
        return
    content: Mapping[str, Any] = read_yaml(path, "--megatron-config-path") or {}
    entries: Sequence[Mapping[str, Any]] = content.get("megatron") or ()
    for entry in entries:
        overrides: Mapping[str, Any] = entry.get("overrides") or entry.get("args") or {}
        for key in ("custom_megatron_init_path", "custom_convert_samples_to_train_data_path", "advantage_estimator"):
            if key in overrides and overrides[key] != getattr(args, key, None):
                raise FlagError(
                    f"{path} overrides {key} for role {entry.get('role')}, so actor and critic would compute different "
                    "advantages; give it once, on the command line"
                )
        lambdas = [key for key in ("lambda_step", "lambda_token") if key in overrides]
        if settings.lambda_critic is not None and entry.get("role") == "critic" and lambdas:
            raise FlagError(
                f"{path} overrides {' and '.join(lambdas)} for the critic, and the YAML has lambda_critic: "
                f"{settings.lambda_critic:g}, which sets both; leave one of them out"
            )


def _whitens_slices(args: Any) -> bool:
    return bool(getattr(args, "normalize_advantages", False)) and getattr(args, "context_parallel_size", 1) > 1


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a module's function by `make(function)`, once."""
    old = getattr(module, name)
    if original(old) is not old:
        return
    new = make(old)
    new.__advantage_original__ = old
    setattr(module, name, new)
    _undo.append(lambda: setattr(module, name, old))
