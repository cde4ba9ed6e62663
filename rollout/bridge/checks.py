"""Refuses combinations of flags that would silently train wrongly; every error names the flag to
change.

The checks run in `python -m rollout.preflight` and when slime makes its data source.
"""

from collections.abc import Collection
from typing import Any

from advantage.errors import FlagError
from advantage.flags import GROUP, HOOK, INSTALL, advantage_flags, check_estimator, check_kl
from advantage.flags import check_flags as check_patch
from advantage.settings import CONVERTER, GAE_FORMS, AdvantageSettings, advantage_settings
from rollout.bridge.checkpoints import check_pushed_weights, is_megatron_checkpoint
from rollout.bridge.flags import RolloutFlags, check_lengths, sentences
from rollout.bridge.roles import check_roles, role_args, roles_of
from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError

FIXED_TURN = "rollout.fixed_turn.generate_rollout"
CONTINUOUS = "rollout.continuous.generate_rollout"
BATCHES = (FIXED_TURN, CONTINUOUS)
"""Rollout functions that make batches of a fixed number of turns."""
GENERATE = "rollout.generate.generate"
SOURCE = "rollout.data_source.EpisodeSource"
ENGINES_PER_PROCESS = 4
"""Engines that one process feeds, with `rollout_processes: auto`."""
NEEDS_INSTALL = (
    "policy_loss",
    "critic_updates",
    "lambda_critic",
    "lambda_policy",
    "actor_values",
    "critic_frozen",
    "value_loss",
    "value_pretraining",
    "on_update",
)
"""Keys of the YAML that only `advantage.patch.install` puts into effect."""


def installs_advantages(args: Any) -> bool:
    """Whether `advantage.patch.install` runs in every training process."""
    return getattr(args, "custom_megatron_init_path", None) == INSTALL


def hooks_in_use(args: Any) -> set[str]:
    """The hooks of this plugin that `args` names, under the names that `slime_flags.yaml` has for
    them."""
    batches = getattr(args, "rollout_function_path", None) in BATCHES
    generate = getattr(args, "custom_generate_function_path", None) == GENERATE
    found = {
        "batches": batches,
        "plays": batches or generate,
        "source": getattr(args, "data_source_path", None) == SOURCE,
        "converter": getattr(args, "custom_convert_samples_to_train_data_path", None) == CONVERTER,
        "patch": installs_advantages(args) and "critic" in roles_of(args),
    }
    return {name for name, used in found.items() if used}


def check_flags(args: Any, config: RolloutSettings) -> None:
    """Check the hooks that `args` names, and a `gae_form` of the user's; raises ConfigError, which
    names the flag."""
    if config.gae_form not in GAE_FORMS:
        from advantage.gae import check_form

        check_form(config.gae_form)
    check_hooks(args, config)


def check_hooks(args: Any, config: RolloutSettings) -> None:
    """Check the hooks that `args` names, without importing torch; raises ConfigError, which names
    the flag."""
    plays, generate = (
        getattr(args, f"{name}_function_path", None) for name in ("rollout", "custom_generate")
    )
    names = (
        "data_source_path",
        "custom_convert_samples_to_train_data_path",
        "custom_megatron_init_path",
    )
    ours = [name for name in names if getattr(args, name, None) in (SOURCE, CONVERTER, INSTALL)]
    if ours and hasattr(args, "rollout_function_path") and not generate and _is_default(plays):
        raise ConfigError(
            f"{_flag(ours[0])} {getattr(args, ours[0])} is given, but nothing that plays turns: "
            f"give --rollout-function-path {FIXED_TURN}, or --custom-generate-function-path "
            f"{GENERATE}"
        )
    if plays in BATCHES:
        check_fixed_turn(args, config)
    elif generate == GENERATE:
        check_generate(args, config)


def check_fixed_turn(args: Any, config: RolloutSettings) -> None:
    """Check the flags of fixed-turn and continuous batches; raises ConfigError, which names the
    flag to change."""
    flags = RolloutFlags.read(args)
    _check_batch(flags, config)
    hooks = hooks_in_use(args) | {"batches", "plays", "turns"}
    _check_playing(
        args, flags, config, hooks | ({"chains"} if config.samples == "chains" else set())
    )
    if (flags.over_sampling_batch_size or 0) > flags.rollout_batch_size:
        raise ConfigError(
            f"--over-sampling-batch-size {flags.over_sampling_batch_size} steers slime's own outer "
            "loop, which fixed-turn batches replace; leave it out"
        )
    if getattr(args, "rollout_global_dataset", True) is False and flags.save:
        raise ConfigError(
            "--disable-rollout-global-dataset keeps slime from saving live episodes; leave it out"
        )
    if flags.debug_rollout_only:
        return
    _check_training(args, config)
    _check_critic(args, flags, config)
    _require(args, "data_source_path", SOURCE, "episodes and their tasks come from the YAML")
    if static := _static_roles(args):
        raise ConfigError(
            "fixed-turn batches hold bootstrap samples beside the turns, so the number of samples "
            "varies: add --use-dynamic-batch-size --max-tokens-per-gpu N, for actor and critic "
            f"(missing for the {static[0]})"
        )
    if config.samples == "chains" and getattr(args, "advantage_estimator", None) == "gspo":
        raise ConfigError(
            "--advantage-estimator gspo weighs each sample as one answer, but a sample may hold "
            "several turns: set samples: turns in the YAML, or give another estimator"
        )
    _check_advantage(args)


def check_generate(args: Any, config: RolloutSettings) -> None:
    """Check the flags of whole episodes in slime's own loop; raises ConfigError, which names the
    flag to change."""
    flags = RolloutFlags.read(args)
    several = not config.joins_episodes
    _check_playing(args, flags, config, hooks_in_use(args) | ({"turns"} if several else set()))
    if config.critic_warmup.w_epoch:
        raise ConfigError(
            f"critic_warmup needs --rollout-function-path {FIXED_TURN}; give it, or leave the key "
            "out"
        )
    if config.value_pretraining.batches:
        raise ConfigError(
            "value_pretraining collects fixed-turn batches: give --rollout-function-path "
            f"{FIXED_TURN}"
        )
    if flags.debug_rollout_only:
        return
    _check_training(args, config)
    if not getattr(args, "prompt_data", None):
        _require(
            args,
            "data_source_path",
            SOURCE,
            "without --prompt-data the episodes come from the YAML",
        )
    if several and _static_roles(args):
        raise ConfigError(
            "history: window, memory.kind: notes and samples: turns make several samples per "
            "episode, so add --use-dynamic-batch-size --max-tokens-per-gpu N, or use history: "
            "full with samples: chains"
        )
    if installs_advantages(args):
        _check_patch(args)


def process_count(args: Any, config: RolloutSettings) -> int:
    """Return the number of processes that play; 1 under `rollout.generate`, which plays inside
    slime's own loop."""
    if getattr(args, "custom_generate_function_path", None) == GENERATE:
        return 1
    if config.rollout_processes == "auto":
        return min(-(-RolloutFlags.read(args).engines // ENGINES_PER_PROCESS), config.n_env)
    return config.rollout_processes


def _check_playing(
    args: Any, flags: RolloutFlags, config: RolloutSettings, hooks: Collection[str]
) -> None:
    """Check what concerns every way to play, and refuse what `slime_flags.yaml` refuses beside
    these hooks."""
    check_lengths(args, flags, config)
    resumes = flags.load is not None and not flags.finetune and is_megatron_checkpoint(flags.load)
    if flags.update_weight_mode == "delta" and resumes:
        raise ConfigError(
            f"--update-weight-mode delta cannot resume {flags.load}: slime's first push sends no "
            "weights, so the first batch would be played with those of --hf-checkpoint; give "
            "--update-weight-mode full"
        )
    if config.on_update == "continue" and flags.rollout_function_path != CONTINUOUS:
        raise ConfigError(
            f"on_update: continue needs --rollout-function-path {CONTINUOUS}; give it, or use abort"
        )
    if config.stagger_turns is not None and flags.rollout_function_path != FIXED_TURN:
        raise ConfigError(
            f"stagger_turns needs --rollout-function-path {FIXED_TURN}; give it, or leave the key "
            "out"
        )
    for flag, sentence in sentences("refused", hooks).items():
        if getattr(args, flag[2:].replace("-", "_"), None):  # a flag that is not given is false
            raise ConfigError(sentence)
    count = config.rollout_processes
    if count in (1, "auto"):
        return
    if getattr(args, "custom_generate_function_path", None) == GENERATE:
        raise ConfigError(
            f"rollout_processes: {count} is for fixed-turn and continuous batches; with "
            f"--custom-generate-function-path {GENERATE}, slime's own process plays, so leave it "
            "out"
        )
    if count > config.n_env:
        raise ConfigError(
            f"rollout_processes: {count} is more than n_env: {config.n_env}, so some processes "
            "would have no slot; lower the first or raise the second"
        )


def _static_roles(args: Any) -> list[str]:
    return [
        role
        for role in roles_of(args)
        if not getattr(role_args(args, role), "use_dynamic_batch_size", True)
    ]


def _check_training(args: Any, config: RolloutSettings) -> None:
    """The actor's loss must be one that reads the advantages; the critic's is always slime's value
    loss."""
    loss = getattr(args, "loss_type", "policy_loss")
    if loss == "sft_loss":
        raise ConfigError(
            "--loss-type sft_loss would imitate every turn, whatever it was paid; leave it out"
        )
    if loss == "custom_loss" and not getattr(args, "custom_loss_function_path", None):
        raise ConfigError("--loss-type custom_loss needs --custom-loss-function-path; give it")
    if loss == "custom_loss" and config.policy_loss != AdvantageSettings().policy_loss:
        raise ConfigError(
            f"policy_loss: {config.policy_loss} in the YAML would never be computed, because "
            "--loss-type custom_loss replaces the policy loss; leave one of them out"
        )
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "sglang":
        raise ConfigError(
            "--opd-type sglang needs a reward function, which turns do not have; use --opd-type "
            "megatron"
        )
    if getattr(args, "fp16", False):
        raise ConfigError(
            "--fp16 makes every gradient NaN without a loss scale; leave it out, slime trains in "
            "bf16"
        )
    samples = getattr(args, "data_parallel_size", 1) * (getattr(args, "micro_batch_size", 1) or 1)
    if (getattr(args, "global_batch_size", None) or 0) % samples:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of {samples}, the "
            "data-parallel size of the training GPUs x --micro-batch-size: change it or the "
            "number of GPUs (NUM_NODES, NUM_GPUS)"
        )
    flags = advantage_flags(role_args(args, "actor"))
    check_estimator(flags, config.group_estimator)
    check_kl(flags)
    if flags.custom_advantage_function_path in (GROUP, HOOK):
        _require_converter(args)
    check_roles(args)
    if not installs_advantages(args):
        check_pushed_weights(args)


def _check_batch(flags: RolloutFlags, config: RolloutSettings) -> None:
    turns = flags.turns_per_batch
    step = flags.global_batch_size
    if not step or step < 1 or turns % step:
        raise ConfigError(
            f"a batch holds {turns} turns (--rollout-batch-size x --n-samples-per-prompt), which "
            f"is not a multiple of --global-batch-size {step}; the rest would be dropped"
        )
    if config.turn_quota == "per_env" and turns % config.n_env:
        raise ConfigError(
            f"turn_quota: per_env cannot divide {turns} turns equally among n_env: {config.n_env} "
            "slots; change n_env or use turn_quota: global"
        )
    if flags.rollout_function_path != CONTINUOUS:
        return
    if config.turn_quota == "per_env":
        raise ConfigError(
            "turn_quota: per_env makes slots wait for each other, which continuous batches never "
            f"do: use turn_quota: global, or --rollout-function-path {FIXED_TURN}"
        )
    if flags.update_weights_interval > config.max_staleness:
        raise ConfigError(
            f"with --update-weights-interval {flags.update_weights_interval}, turns are up to "
            f"{flags.update_weights_interval} updates old, but max_staleness is "
            f"{config.max_staleness}; lower the first or raise the second (at most 4)"
        )


def _check_critic(args: Any, flags: RolloutFlags, config: RolloutSettings) -> None:
    """The critic's warm-up and value pretraining must last as long as the actor is frozen."""
    warmup = config.critic_warmup.w_epoch + config.critic_warmup.w_iter
    if warmup and (flags.num_critic_only_steps or 0) != warmup:
        raise ConfigError(
            f"--num-critic-only-steps is {flags.num_critic_only_steps or 0} but "
            f"critic_warmup.w_epoch + w_iter is {warmup}; they must be equal, so that the actor is "
            "frozen exactly while batches are kept and drawn"
        )
    batches = config.value_pretraining.batches
    if (warmup or batches) and getattr(args, "advantage_estimator", "ppo") != "ppo":
        raise ConfigError(
            f"{'value_pretraining' if batches else 'critic_warmup'} trains a critic, but "
            f"--advantage-estimator {args.advantage_estimator} has none; leave the key out of the "
            "YAML"
        )
    if not batches:
        return
    for name in ("num_rollout", "num_critic_only_steps"):
        if getattr(args, name, batches) != batches:
            raise ConfigError(
                f"{_flag(name)} is {getattr(args, name)} but value_pretraining.batches is "
                f"{batches}; they must be equal, because value pretraining is a separate run, in "
                "which only the critic trains"
            )


def _check_advantage(args: Any) -> None:
    """Actor and critic must both compute their advantages from the turn table."""
    if getattr(args, "custom_advantage_function_path", None) == GROUP:
        raise ConfigError(
            f"{GROUP} compares whole episodes, and --rollout-function-path "
            f"{args.rollout_function_path} cuts them, which favours short ones: play whole "
            "episodes, with --custom-generate-function-path rollout.generate.generate in slime, "
            "or rollout_function_path embedded.whole_episodes.generate_rollout on one machine"
        )
    estimator = getattr(args, "advantage_estimator", "ppo")
    if installs_advantages(args):
        _check_patch(args)
        if estimator == "ppo":
            return
    elif hasattr(args, "custom_megatron_init_path"):
        settings = advantage_settings(args)
        default = AdvantageSettings()
        changed = [key for key in NEEDS_INSTALL if getattr(settings, key) != getattr(default, key)]
        if changed:
            raise ConfigError(
                f"{' and '.join(changed)} in the YAML need --custom-megatron-init-path {INSTALL}"
            )
    _require_converter(args)
    hook = "custom_megatron_init_path" if estimator == "ppo" else "custom_advantage_function_path"
    if not hasattr(args, hook) or getattr(args, hook):
        return
    if estimator == "ppo":
        raise ConfigError(
            f"without --custom-megatron-init-path {INSTALL} the critic would train on slime's own "
            "single-discount targets, with each turn as a separate episode"
        )
    raise ConfigError(
        f"--advantage-estimator {estimator} treats every turn as a separate answer; give "
        "--advantage-estimator ppo, or --custom-advantage-function-path with a function that "
        "reads the turn table"
    )


def _check_patch(args: Any) -> None:
    """Run the checks that the patch repeats in each role's processes, before there are any."""
    for role in roles_of(args):
        try:
            check_patch(role_args(args, role))
        except FlagError as error:
            raise ConfigError(f"{error} (in the {role})") from error


def _require_converter(args: Any) -> None:
    _require(
        args,
        "custom_convert_samples_to_train_data_path",
        CONVERTER,
        "the advantages are computed from its table",
    )


def _require(args: Any, name: str, path: str, why: str) -> None:
    """A hook must be configured if slime has its flag; a user-supplied hook is accepted."""
    if hasattr(args, name) and _is_default(getattr(args, name)):
        raise ConfigError(f"{_flag(name)} is missing: give {_flag(name)} {path}, because {why}")


def _is_default(path: str | None) -> bool:
    """Whether slime chose this hook: nothing was given, or it is the parser's own default."""
    defaults = (
        "rollout.sglang_rollout.generate_rollout",
        "rollout.data_source.RolloutDataSourceWithBuffer",
    )
    return not path or path.removeprefix("slime.") in defaults


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
