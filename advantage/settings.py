"""Settings of the advantage computation: keys of the YAML, which slime copies to `args`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, cast

from pydantic import model_validator

from slime_verlog import ConfigError, Field, Settings, read_settings

CONVERTER = "rollout.samples.convert_samples_to_train_data"
"""The function that writes the turn table into slime's train data."""

KL_SPLIT = "advantage.kl_split.log_kl_split"
"""The `--rollout-data-postprocess-path` hook, which reads the turn table after the advantages."""

GAE_FORMS = ("dual", "token", "turn", "bi_level", "compaction")
"""The values of `gae_form` that are not import paths."""

ROLE = "slime_verlog_role"
"""Attribute of `args` in which the patch and the embedded trainer note whose process this is: actor
or critic."""

ATTENTION = r"self_attention\.(?!.*layer_?norm)"
"""Megatron's attention weights without norms. Transformer Engine keeps the layer's input norm
inside the attention."""

SAO: Mapping[str, Any] = {
    "policy_loss": "dis",
    "critic_updates": 2,
    "lambda_critic": 1.0,
    "lambda_policy": "length_adaptive",
    "lambda_policy_alpha": 1.5,
    "lambda_step": 1.0,
    "critic_frozen": (ATTENTION,),
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"sao": SAO, "glm52": {**SAO, "gae_form": "compaction"}}
"""Values of the `preset` key: what each sets, unless the YAML has the key. `docs/presets.md` has
the sources."""


LARGEST = 1e30
"""Returns that float32, the critic's type, can still add up."""
ROUNDING = 1e-4
"""Explained variance below this is rounding: a critic whose values are all equal may have it."""


class WarmupSettings(Settings):
    """Critic warm-up: `w_epoch` batches are played and kept, then `w_iter` batches are drawn from
    them."""

    w_epoch: int = Field(default=0, ge=0)
    """Batches that are played and kept while the actor is frozen."""
    w_iter: int = Field(default=0, ge=0)
    """Batches that are then drawn from the kept turns, without generation."""
    fraction: float = Field(default=0.1, gt=0, le=1)
    """Share of the kept turns in one drawn batch."""


class ValuePretrainingSettings(Settings):
    """Value pretraining: the critic learns offline from turns of the frozen policy, before PPO."""

    batches: int = Field(default=0, ge=0)
    """Batches that the frozen policy plays for it; 0 turns value pretraining off. It is a whole
    run: `--num-rollout` and `--num-critic-only-steps` must have the same value. Whole episodes are
    held out; a warning says if there are fewer than ten."""
    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the turns that the critic is measured on and never trained on; always whole
    episodes."""
    passes: int = Field(default=50, ge=1)
    """The largest number of passes over the other turns."""
    patience: int = Field(default=3, ge=1)
    """Training stops after this many passes in a row without a new best explained variance on the
    held-out turns. The critic is saved as it was at the best one."""
    least_explained_variance: float | None = 0.0
    """The run fails and saves no critic if the best held-out explained variance is not above this;
    null: never. PPO refuses to start from a critic that is not above its own value of this key."""

    def accepts(self, explained: float) -> bool:
        """Tell whether a critic that explains this much is above `least_explained_variance`, and
        not just by rounding."""
        least = self.least_explained_variance
        return least is None or explained > least + ROUNDING


class AdvantageSettings(Settings):
    """Keys for the computation of advantages and for the value loss."""

    preset: Literal["sao", "glm52"] | None = None
    """`sao`: policy_loss: dis, critic_updates: 2, lambda_critic: 1.0, lambda_policy:
    length_adaptive with lambda_policy_alpha: 1.5, lambda_step: 1.0, and frozen attention in the
    critic. `glm52`: the same for conversations that are compacted, with gae_form: compaction,
    history: full and memory: {kind: notes, free: 10240, keep: 2, times: 3, max_tokens: 2048}. Keys
    in the YAML take precedence (docs/presets.md)."""
    gamma_step: float = Field(default=0.99, ge=0, le=1)
    """Discount from one turn to the next."""
    lambda_step: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda from one turn to the next; smaller means less variance and more bias."""
    gamma_token: float = Field(default=1.0, ge=0, le=1)
    """Discount from one token to the next inside a turn."""
    lambda_token: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda from one token to the next inside a turn."""
    lambda_critic: float | None = Field(default=None, ge=0, le=1)
    """Both lambdas of the critic's value targets; leave it out for the actor's. 1 makes them the
    discounted returns."""
    lambda_policy: Literal["fixed", "length_adaptive"] = "fixed"
    """The actor's lambda inside turns. `fixed`: `lambda_token`. `length_adaptive`: 1 - 1 /
    (`lambda_policy_alpha` x n) for a turn with n trained tokens, at least 0. `lambda_step` applies
    between turns in both cases."""
    lambda_policy_alpha: float = Field(default=1.5, gt=0)
    """The factor in `lambda_policy: length_adaptive`; a larger value brings lambda closer to 1."""
    gae_form: str = "dual"
    """The form of GAE that `advantage.hook.compute_advantages` computes: `dual`, `token`, `turn`,
    `bi_level`, `compaction`, or a function, as `file.py:function` or an import path
    (docs/change_one_thing.md)."""
    group_estimator: Literal["grpo", "rloo", "gigpo", "g2po", "gagpo", "branches"] | None = None
    """Train without a critic, on comparisons between whole episodes and, from `gigpo` on, between
    their turns. On one machine the key is enough; slime also needs flags
    (docs/group_estimators.md). Null: with a critic, or GRPO if the flags name
    `advantage.group.compute_advantages`. `gagpo` is inferred: its paper's equations were not
    available, and `gamma_step` and `lambda_step` are used as in two ports. `branches` plays
    continuations from every state, at many times the cost, and is a reference for the others."""
    branches: int = Field(default=8, ge=2)
    """`group_estimator: branches`: continuations from each turn, whose mean return the turn's own
    is compared with."""
    gigpo_step_weight: float = Field(default=1.0, ge=0)
    """GiGPO and G2PO: weight of the comparisons between turns; 0 turns them off."""
    gigpo_discount: Literal["step", "both"] = "step"
    """GiGPO: the returns that `gamma_step` discounts. `step`: only the return from each turn
    onwards, as in the paper (Feng et al. 2025, equations 3 and 5) and in verl-agent. `both`: the
    whole episode's return too."""
    policy_loss: Literal["ppo", "dis"] = "ppo"
    """The actor's loss. `ppo`: slime's. `dis`: double-sided importance sampling for turns of older
    weights; it masks tokens whose probability ratio to the weights that played them is not between
    1 - eps_clip and 1 + eps_clip_high."""
    alarm_logprob_abs_diff: float = Field(default=0.1, gt=0)
    """There is a warning if `train_rollout_logprob_abs_diff` exceeds this many nats per token.
    slime's own tests have the same bound (`--ci-train-rollout-logprob-abs-diff-threshold`)."""
    alarm_masked_share: float = Field(default=0.2, gt=0, le=1)
    """There is a warning if DIS, TIS or IcePop masks or clips more than this share of the tokens.
    The default is this project's choice; no source gives a bound."""
    on_update: Literal["abort", "continue"] = "abort"
    """With `rollout.continuous`: what happens to responses in flight when the engines get new
    weights. `abort`: they are lost, and their turns are asked again. `continue`: they go on, and
    the new weights write their remaining tokens; needs SGLang 0.5.21 or newer. Each token keeps the
    log-prob of the weights that wrote it."""
    critic_updates: int = Field(default=1, ge=1, le=16)
    """How often the critic trains on each batch. `actor_values` says which values the actor's
    advantages use."""
    actor_values: Literal["before", "after"] = "before"
    """The critic's values in the actor's advantages: those from before it trained on the batch, or
    from after. `after` costs one more forward pass and shrinks the advantages of turns that the
    critic has just memorised."""
    critic_frozen: tuple[str, ...] = ()
    """Regular expressions; the critic's parameters whose Megatron name matches one are not
    trained."""
    value_first_token_weight: float = Field(default=3.0, gt=0)
    """Weight of each turn's first token in the value loss. The previous turn bootstraps from this
    token's value."""
    value_loss: Literal["mse", "hl_gauss"] = "mse"
    """The critic's head and loss. `mse`: one output, slime's clipped squared error. `hl_gauss`: a
    histogram over returns, trained by cross-entropy, whose mean is the value (docs/algorithms.md);
    --value-clip is then ignored."""
    value_bins: int = Field(default=51, ge=7, le=1001)
    """`hl_gauss`: outputs of the head. 2.5 bins lie beyond each end of `value_range`."""
    value_range: tuple[float, ...] | None = None
    """`hl_gauss`: the smallest and the largest return, discounted, such as [0.0, 1.0]. Returns
    outside count as these two; there is a warning if they are more than 1 % of the turns."""
    value_sigma: float = Field(default=0.75, gt=0, le=2)
    """`hl_gauss`: standard deviation of the targets, in bins."""
    critic_warmup: WarmupSettings = WarmupSettings()
    """Critic warm-up. The key is not `warmup`, because Megatron has an argument of that name."""
    value_pretraining: ValuePretrainingSettings = ValuePretrainingSettings()
    """Value pretraining, a separate run that `scripts/run_value_pretraining.sh` starts."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, data: Any) -> Any:
        return cls.with_preset(cast(Mapping[str, Any], data)) if isinstance(data, Mapping) else data

    @classmethod
    def with_preset(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The given keys, and those that their preset sets besides."""
        return {**PRESETS.get(str(given.get("preset")), {}), **given}

    @model_validator(mode="after")
    def _consistent_advantages(self) -> Self:
        warmup = self.critic_warmup
        self._check_value_loss()
        if self.gae_form not in GAE_FORMS and not re.search(r"\w[.:]\w", self.gae_form):
            known = ", ".join(map(repr, GAE_FORMS))
            raise ConfigError(
                f"gae_form must be one of {known}, got {self.gae_form!r}; a form of your own is a "
                "function, such as my_forms.py:my_form"
            )
        for pattern in self.critic_frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"critic_frozen: {pattern!r} is not a regular expression: {error}"
                ) from error
        if warmup.w_iter and not warmup.w_epoch:
            raise ConfigError(
                f"critic_warmup.w_iter is {warmup.w_iter} but w_epoch is 0, so no batches are kept"
            )
        if self.lambda_policy == "length_adaptive" and self.gae_form not in ("dual", "compaction"):
            raise ConfigError(
                f"gae_form: {self.gae_form} does not use a lambda inside turns, so lambda_policy: "
                "length_adaptive would change nothing; use gae_form: dual, or lambda_policy: fixed"
            )
        if self.value_pretraining.batches and warmup.w_epoch:
            raise ConfigError(
                f"value_pretraining.batches is {self.value_pretraining.batches} and "
                f"critic_warmup.w_epoch is {warmup.w_epoch}; leave critic_warmup out, because "
                "value pretraining collects for itself"
            )
        return self

    def _check_value_loss(self) -> None:
        given = [
            key
            for key in ("value_range", "value_bins", "value_sigma")
            if key in self.model_fields_set
        ]
        if self.value_loss == "mse" and given:
            raise ConfigError(
                f"{given[0]} belongs to value_loss: hl_gauss, and value_loss is mse; set the "
                f"former, or leave {' and '.join(given)} out"
            )
        if self.value_loss == "hl_gauss" and self.value_range is None:
            raise ConfigError(
                "value_loss: hl_gauss needs value_range, the smallest and the largest discounted "
                "return, such as [0.0, 1.0]"
            )
        ends = self.value_range
        if ends is not None and (len(ends) != 2 or not -LARGEST <= ends[0] < ends[1] <= LARGEST):
            raise ConfigError(
                "value_range must be two numbers, [smallest, largest return], at most "
                f"{LARGEST:g} in size, got {list(ends)}"
            )


def advantage_settings(args: Any) -> AdvantageSettings:
    """Read the YAML's keys from slime's `args`; raises ConfigError, which names the key and the
    value."""
    return read_settings(AdvantageSettings, present(args, AdvantageSettings.model_fields))


def present(args: Any, names: Iterable[str]) -> dict[str, Any]:
    """Look up those of the attributes that `args` has."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
