"""slime's `--custom-megatron-init-path`: installs dual-discount GAE and the first-token value weight in both roles.

slime calls it once in every process of the actor and of the critic. Each module here wraps some functions of the
framework. `compute_advantages_and_returns` is replaced only if the framework lacks `--custom-advantage-function-path`,
or would whiten without context parallelism. Where the framework has that flag, `install` sets it, because slime drops
it for the critic when `--megatron-config-path` is used.
"""

import logging
from collections.abc import Callable
from typing import Any

from advantage.errors import UnsupportedFrameworkError
from advantage.flags import HOOK, advantage_flags, check_flags
from advantage.patch.critic import install_critic, pretrain_critic
from advantage.patch.ppo import make_compute_advantages
from advantage.patch.roles import install_roles
from advantage.patch.training_steps import install_training_steps
from advantage.patch.versions import find_framework, original
from advantage.training.policy_loss import install_dis
from advantage.training.value_weight import weigh_first_tokens

logger = logging.getLogger(__name__)


def install(args: Any) -> None:
    """Make this process compute dual-discount advantages and weigh first tokens; calling it again is safe.

    Raises:
        ConfigError: the flags would give wrong advantages, or a setting is out of range; names the flag or key.
        UnsupportedFrameworkError: the patch does not support the framework, or something else patched it.
    """
    framework = find_framework()
    settings, flags = check_flags(args), advantage_flags(args)
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
    whitens_slices = flags.normalize_advantages and flags.context_parallel_size > 1
    replaces = not framework.has_flag or (whitens_slices and not framework.whitens_all_ranks)
    if replaces:
        ours = make_compute_advantages(framework.loss)
        for module in filter(None, (framework.loss, framework.actor)):
            _replace(module, "compute_advantages_and_returns", lambda _: ours)
    if framework.has_flag:
        args.custom_advantage_function_path = HOOK
    actor, loss = framework.actor, framework.loss
    if actor and actor.compute_advantages_and_returns is not loss.compute_advantages_and_returns:
        raise UnsupportedFrameworkError(
            f"{actor.__name__} uses another compute_advantages_and_returns than {loss.__name__}; something else "
            "replaced one of them"
        )
    logger.info(
        "dual-discount GAE is installed in %s through %s: %s, first-token value weight %g",
        framework.name,
        "compute_advantages_and_returns" if replaces else "--custom-advantage-function-path",
        settings.discounts,
        settings.value_first_token_weight,
    )


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a module's function by `make(function)`, once."""
    old = getattr(module, name)
    if original(old) is not old:
        return
    new = make(old)
    new.__advantage_original__ = old
    setattr(module, name, new)
