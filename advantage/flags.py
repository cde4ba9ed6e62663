"""The flags of slime that the advantages depend on, and the combinations of them that would give
wrong advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from advantage.errors import FlagError
from advantage.settings import CONVERTER, AdvantageSettings, advantage_settings, present
from slime_verlog import ConfigError, read_yaml

HOOK = "advantage.hook.compute_advantages"
GROUP = "advantage.group.compute_advantages"
INSTALL = "advantage.patch.install"
WHOLE_FILES = ("disk", "full")
"""slime's transport and mode of weights that `train.py` itself makes the engines load."""
KL_IN_LOSS = "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl"
"""Flags that charge KL in the loss. slime's own defaults are coefficient 0 and k1, which charge
nothing."""
IGNORES_KL = ("grpo", "gspo", "cispo")
"""slime's estimators that do not read the KL of `--kl-coef`."""
FROZEN = "freeze_params_name_list"
"""slime's list of patterns for parameters that are not trained; `critic_frozen` sets it for the
critic."""


@dataclass(frozen=True, kw_only=True)
class AdvantageFlags:
    """The flags that are read; a default applies if `args` lacks the flag."""

    advantage_estimator: str = "ppo"
    compute_advantages_and_returns: bool = True
    custom_megatron_init_path: str | None = None
    custom_convert_samples_to_train_data_path: str | None = None
    custom_advantage_function_path: str | None = None
    rollout_data_postprocess_path: str | None = None
    megatron_config_path: str | None = None
    context_parallel_size: int = 1
    kl_coef: float = 0.0
    kl_loss_type: str = "k1"
    loss_type: str = "policy_loss"
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    use_unbiased_kl: bool = False
    use_rollout_logprobs: bool = False
    normalize_advantages: bool = False
    use_opd: bool = False
    use_opsm: bool = False
    use_tis: bool = False
    get_mismatch_metrics: bool = False
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    grpo_std_normalization: bool = True
    n_samples_per_prompt: int | None = None
    freeze_params_name_list: Sequence[str] | None = None
    only_train_params_name_list: Sequence[str] | None = None
    update_weight_transport: str | None = None
    update_weight_mode: str | None = None
    load: str | None = None
    ckpt_step: int | None = None
    finetune: bool = False
    no_load_optim: bool = False

    @property
    def has_critic(self) -> bool:
        """Whether slime trains a critic."""
        return self.advantage_estimator == "ppo"

    @property
    def frozen(self) -> list[str]:
        """The patterns of `freeze_params_name_list`."""
        return list(self.freeze_params_name_list or ())


def advantage_flags(args: Any) -> AdvantageFlags:
    """Read the flags from slime's `args`."""
    return AdvantageFlags(**present(args, [field.name for field in fields(AdvantageFlags)]))


def check_flags(args: Any) -> AdvantageSettings:
    """Refuse flags that would silently train on other advantages than the configured ones; returns
    the settings.

    Raises FlagError, which names the flag to change, or ConfigError, which names a key that is out
    of range.
    """
    flags = advantage_flags(args)
    given = flags.custom_advantage_function_path
    converter = flags.custom_convert_samples_to_train_data_path
    if not flags.has_critic and (given == HOOK or (given is None and converter == CONVERTER)):
        raise FlagError(
            f"--advantage-estimator is {flags.advantage_estimator}, but dual-discount GAE needs a "
            f"critic: give --advantage-estimator ppo, or --custom-advantage-function-path {GROUP}"
        )
    if flags.has_critic and given not in (None, HOOK):
        raise FlagError(
            f"--custom-advantage-function-path is {given}; {INSTALL} would replace it, drop one of "
            "them"
        )
    if not flags.compute_advantages_and_returns:
        raise FlagError(
            f"--disable-compute-advantages-and-returns leaves nothing for {INSTALL} to do; remove "
            "one"
        )
    if not converter and (flags.has_critic or given == GROUP):
        raise FlagError(
            "no converter writes the turn table, which the advantages need; give "
            f"--custom-convert-samples-to-train-data-path {CONVERTER}"
        )
    settings = advantage_settings(args)
    _check_roles(args, flags, settings)
    _check_frozen(flags, settings)
    if settings.policy_loss == "dis":
        check_dis(flags)
    if (
        settings.on_update == "continue"
        and (flags.update_weight_transport, flags.update_weight_mode) == WHOLE_FILES
    ):
        raise FlagError(
            "on_update: continue needs weights that the trainer pushes; with "
            "--update-weight-transport disk and whole checkpoints, slime's script pauses the "
            "engines itself and aborts what is in flight: give --update-weight-transport nccl or "
            "--update-weight-mode delta, or use on_update: abort"
        )
    return settings


def check_kl(flags: AdvantageFlags) -> None:
    """Raise FlagError for flags of the actor under which the KL to the reference is computed but
    not charged.

    k1 is log(policy / reference), so the reference has no part in its gradient, whose mean over the
    policy's own tokens is 0. `--use-unbiased-kl` multiplies it by the probability ratio, and then
    the gradient is that of the KL.
    """
    estimator = flags.advantage_estimator
    charged = f"--kl-coef {flags.kl_coef}"
    is_loss = flags.use_kl_loss and flags.kl_loss_coef and flags.loss_type == "policy_loss"
    if is_loss and flags.kl_loss_type == "k1" and not flags.use_unbiased_kl:
        raise FlagError(
            "--kl-loss-type k1 (the default) does not work in a loss: its gradient ignores the "
            "reference; give --kl-loss-type low_var_kl, k2 or k3 (k1 is right in the reward, "
            "--kl-coef)"
        )
    if not flags.kl_coef:
        return
    if flags.custom_advantage_function_path == GROUP:
        raise FlagError(f"{charged}: without a critic, charge KL with {KL_IN_LOSS} instead")
    if flags.custom_advantage_function_path is None and estimator in IGNORES_KL:
        raise FlagError(
            f"{charged}: --advantage-estimator {estimator} ignores it; charge KL with {KL_IN_LOSS} "
            "instead"
        )


def check_estimator(flags: AdvantageFlags, group_estimator: str | None) -> None:
    """Raise FlagError unless the flags and the YAML's `group_estimator` agree on whether there is a
    critic."""
    estimator = flags.advantage_estimator
    function = flags.custom_advantage_function_path
    if group_estimator and function in (None, HOOK):
        raise FlagError(
            f"group_estimator: {group_estimator} in the YAML trains without a critic: give "
            f"--advantage-estimator grpo --custom-advantage-function-path {GROUP}, or remove the "
            "key"
        )
    if function == HOOK and estimator != "ppo":
        raise FlagError(
            f"--advantage-estimator {estimator} trains no critic, whose values {HOOK} needs: give "
            f"ppo, or --custom-advantage-function-path {GROUP} (on one machine, group_estimator in "
            "the YAML sets both)"
        )
    if function == GROUP and estimator == "ppo":
        raise FlagError(
            f"--advantage-estimator ppo trains a critic that {GROUP} never reads: give grpo instead"
        )


def kl_warning(flags: AdvantageFlags) -> str | None:
    """Return a sentence if a KL loss is asked for without a coefficient, or the other way round."""
    if flags.use_kl_loss and not flags.kl_loss_coef:
        return f"--use-kl-loss with --kl-loss-coef 0 (the default) only logs the KL; to charge it, give {KL_IN_LOSS}"
    if flags.kl_loss_coef and not flags.use_kl_loss:
        return f"--kl-loss-coef {flags.kl_loss_coef:g} has no effect without --use-kl-loss; give {KL_IN_LOSS}"
    return None


def overrides_of(args: Any, role: str) -> Mapping[str, Any]:
    """Return the flags that `--megatron-config-path` overrides for a role; raises ConfigError for a
    malformed file."""
    path = getattr(args, "megatron_config_path", None)
    if not path:
        return {}
    content = read_yaml(path, "--megatron-config-path")
    try:
        entries = [dict[str, Any](entry) for entry in content["megatron"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--megatron-config-path {path} must have a list of mappings under megatron"
        ) from error
    for entry in entries:
        if entry.get("role") == role:
            return entry.get("overrides") or entry.get("args") or {}
    return {}


def _check_roles(args: Any, flags: AdvantageFlags, settings: AdvantageSettings) -> None:
    """Refuse a `--megatron-config-path` that disables the patch for one role, or has other lambdas
    for the critic."""
    path = flags.megatron_config_path or ""
    if not Path(path).is_file():
        return
    for role in ("actor", "critic"):
        overrides = overrides_of(args, role)
        for key in (
            "custom_megatron_init_path",
            "custom_convert_samples_to_train_data_path",
            "advantage_estimator",
        ):
            if key in overrides and overrides[key] != getattr(flags, key):
                raise FlagError(
                    f"{path} overrides {key} for role {role}, so actor and critic would compute "
                    "different advantages; give it once, on the command line"
                )
        lambdas = [key for key in ("lambda_step", "lambda_token") if key in overrides]
        if settings.lambda_critic is not None and role == "critic" and lambdas:
            raise FlagError(
                f"{path} overrides {' and '.join(lambdas)} for the critic, and the YAML has "
                f"lambda_critic: {settings.lambda_critic:g}, which sets both; leave one of them out"
            )


def _check_frozen(flags: AdvantageFlags, settings: AdvantageSettings) -> None:
    """Refuse two lists of frozen parameters."""
    if settings.critic_frozen and flags.frozen and flags.frozen != list(settings.critic_frozen):
        raise FlagError(
            f"critic_frozen is {list(settings.critic_frozen)} and slime's {FROZEN} is "
            f"{flags.frozen}; leave one of them out"
        )
    if settings.critic_frozen and flags.only_train_params_name_list:
        raise FlagError(
            "slime refuses --only-train-params-name-list beside frozen parameters; leave it or "
            "critic_frozen out"
        )


def check_dis(flags: AdvantageFlags) -> None:
    """Raise FlagError for flags under which DIS would be another loss than its definition."""
    if flags.use_opsm:
        raise FlagError(
            "policy_loss: dis and --use-opsm would both mask by the same ratio; leave one of them "
            "out"
        )
    for flag, given in (
        ("--use-tis", flags.use_tis),
        ("--get-mismatch-metrics", flags.get_mismatch_metrics),
    ):
        if given:  # slime weighs the loss by its --custom-tis-function-path under both
            raise FlagError(
                f"policy_loss: dis and {flag} would weigh the same ratio twice; leave one of them "
                "out"
            )
    if not flags.use_rollout_logprobs:
        raise FlagError(
            "policy_loss: dis compares with the weights that played each token: give "
            "--use-rollout-logprobs"
        )
    if flags.eps_clip_high in (None, flags.eps_clip):
        raise FlagError(
            f"policy_loss: dis keeps ratios between 1 - {flags.eps_clip:g} and 1 + "
            "--eps-clip-high, which must be given and differ from --eps-clip; the paper uses "
            "--eps-clip 0.3 --eps-clip-high 5.0 (coding: 0.8 and 3.0)"
        )
    if flags.eps_clip > 1:
        raise FlagError(f"policy_loss: dis needs --eps-clip of at most 1, got {flags.eps_clip:g}")
    if flags.eps_clip_c is not None:
        raise FlagError("policy_loss: dis has no dual clip; leave --eps-clip-c out")
