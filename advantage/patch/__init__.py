"""slime's `--custom-megatron-init-path`: installs dual-discount GAE and the first-token value
weight in both roles.

slime calls it once in every process of the actor and of the critic. Each module here wraps some of
slime's functions. `install` sets `--custom-advantage-function-path`, because slime drops it for the
critic when `--megatron-config-path` is used. `compute_advantages_and_returns` is replaced only if
slime would whiten without context parallelism.
"""

import functools
import importlib
import logging
from collections.abc import Callable, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from advantage.errors import UnsupportedFrameworkError
from advantage.exchange import current_layout
from advantage.flags import HOOK, advantage_flags, check_flags
from advantage.gae import discounts_of
from advantage.hook import compute_advantages
from advantage.packing import local_tokens
from advantage.patch import images
from advantage.patch.critic import install_critic, pretrain_critic
from advantage.patch.roles import install_roles
from advantage.patch.steps import install_steps
from advantage.patch.value_head import install_value_head
from advantage.patch.versions import find_slime, original, replace, wrap
from advantage.training.losses import whiten
from advantage.training.policy_loss import install_dis

logger = logging.getLogger(__name__)

_UPDATERS = {
    "full": ("update_weight_from_distributed", "UpdateWeightFromDistributed"),
    "delta": ("update_weight_from_disk_delta", "UpdateWeightFromDiskDelta"),
}
"""By `--update-weight-mode`: slime's class that pauses the engines from the trainer. With
`--colocate`, no response is in flight at an update."""


def install(args: Any) -> None:
    """Make this process compute dual-discount advantages and weigh first tokens; calling it again
    is safe.

    Without a critic, the advantages are those of `--custom-advantage-function-path` or slime's own
    estimator; training steps are watched and corrected as with one (`advantage/patch/steps.py`).

    Raises:
        ConfigError: the flags would give wrong advantages, or a setting is out of range; names the
            flag or key.
        UnsupportedFrameworkError: the patch does not support this slime, or something else patched
            it.
    """
    slime = find_slime()
    settings = check_flags(args)
    flags = advantage_flags(args)
    if slime.model is not None:
        install_steps(slime.model, slime.actor, settings)
    if settings.policy_loss == "dis":
        install_dis(slime.loss, replace)
    policy_loss = original(slime.loss.policy_loss_function)
    if flags.eps_clip_c is not None and "eps_clip_c" not in policy_loss.__code__.co_names:
        clip = {"eps_clip_c": flags.eps_clip_c}  # v0.3.1 takes the flag and leaves it unread
        replace(slime.loss, "compute_policy_loss", lambda old: functools.partial(old, **clip))
    install_roles(slime)
    install_value_head(args, slime)
    images.install(args)
    if settings.on_update == "continue":
        _install_retraction(flags.update_weight_mode)
    if settings.value_pretraining.batches:
        pretrain_critic(args, slime, settings.value_pretraining)
    else:
        install_critic(slime, settings)
    if not flags.has_critic:
        used = flags.custom_advantage_function_path or flags.advantage_estimator
        logger.info("slime's training steps are watched; the advantages come from %s", used)
        return
    whitens_slices = flags.normalize_advantages and flags.context_parallel_size > 1
    if whitens_slices and not slime.whitens_all_ranks:
        ours = functools.partial(_compute_and_whiten, slime.loss)
        for module in filter(None, (slime.loss, slime.actor)):
            replace(module, "compute_advantages_and_returns", lambda _: ours)
    args.custom_advantage_function_path = HOOK
    actor = slime.actor
    loss = slime.loss
    if actor and actor.compute_advantages_and_returns is not loss.compute_advantages_and_returns:
        raise UnsupportedFrameworkError(
            f"{actor.__name__} uses another compute_advantages_and_returns than {loss.__name__}; "
            "something else replaced one of them"
        )
    logger.info(
        "dual-discount GAE is installed: %s, first-token value weight %g",
        discounts_of(settings, "actor"),
        settings.value_first_token_weight,
    )


def _install_retraction(mode: str | None) -> None:
    """Let responses in flight survive new weights (`on_update: continue`); `mode` is
    `--update-weight-mode`.

    slime pauses its engines with an empty request, which SGLang takes as "abort everything". With
    mode `retract`, SGLang keeps the requests and drops their cache. It computes prompt and response
    so far again with the new weights, and says in `weight_versions` which weights wrote which
    token. slime's pause has no mode, but its engine actors have a method that posts any request, so
    the pause is sent through that one. Raises UnsupportedFrameworkError if slime pushes weights in
    another way.
    """
    module, name = _UPDATERS[mode or "full"]
    path = f"slime.backends.megatron_utils.update_weight.{module}"
    try:
        wrap(getattr(importlib.import_module(path), name), "connect_rollout_engines", _connected)
    except (ImportError, AttributeError) as error:
        raise UnsupportedFrameworkError(
            f"on_update: continue does not know how this slime pushes weights ({error}); use abort"
        ) from error


def _connected(connect: Callable[..., None], updater: Any, *args: Any, **named: Any) -> None:
    connect(updater, *args, **named)
    updater.rollout_engines = [_RetractingEngine(engine) for engine in updater.rollout_engines]


class _RetractingEngine:
    """The handle of slime's engine actor, except that `pause_generation` retracts what is in
    flight."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        pause = functools.partial(
            engine._make_request.remote, "pause_generation", {"mode": "retract"}
        )
        self.pause_generation = SimpleNamespace(remote=pause)

    def __getattr__(self, name: str) -> Any:
        if name == "_engine":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._engine, name)


def _compute_and_whiten(
    loss: ModuleType, args: Any, rollout_data: MutableMapping[str, Any]
) -> None:
    """Replace `compute_advantages_and_returns`: compute slime's KL, call the hook, and whiten."""
    layout = current_layout()
    if not layout.last_stage:
        return
    flags = advantage_flags(args)
    log_probs = rollout_data.get("rollout_log_probs" if flags.use_rollout_logprobs else "log_probs")
    reference = rollout_data.get("ref_log_probs")
    if flags.kl_coef and log_probs and reference:
        pairs = zip(log_probs, reference, strict=True)
        kl = [
            loss.compute_approx_kl(new, old, kl_loss_type=flags.kl_loss_type) for new, old in pairs
        ]
    else:  # no reference: slime's critic, or critic-only steps
        kl = [
            torch.zeros_like(values, dtype=torch.float32)
            for values in rollout_data.get("values") or ()
        ]
    rollout_data["kl"] = kl
    compute_advantages(args, rollout_data)
    if flags.use_opd:
        loss.apply_opd_kl_to_advantages(
            args=args,
            rollout_data=rollout_data,
            advantages=rollout_data["advantages"],
            student_log_probs=log_probs,
        )
    if flags.normalize_advantages:
        masks = rollout_data["loss_masks"]
        masks = local_tokens(rollout_data, layout).split(
            torch.cat(masks) if masks else torch.zeros(0)
        )
        rollout_data["advantages"] = whiten(rollout_data["advantages"], masks, layout.data_context)
