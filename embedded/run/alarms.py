"""Warnings of a run on one machine: before training, what will keep it from learning; during it,
unhealthy metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from advantage.flags import advantage_flags, kl_warning
from advantage.training.alarms import RETURNS_IN_RANGE, Limit

if TYPE_CHECKING:
    from embedded.arguments import EmbeddedFlags
    from embedded.warmstart.imitation import Imitation

_READ_INVALID = (
    "read the invalid answers (slime-verlog report), accept more ways to write an action in "
    "`translate`, or lower the learning rate (--set-flag lr=1e-4)"
)
_RAISE_LENGTH = (
    "raise it (--set-flag rollout_max_response_len=N); if it rises as training goes on, lower "
    "the learning rate"
)
_CHARGE_KL = (
    "lower the learning rate (--set-flag lr=1e-4) or charge more for it (--set-flag kl_coef=0.01)"
)
_SMALLER_UPDATES = (
    "one update moves the policy too far: lower the learning rate (--set-flag lr=1e-4), or "
    "enlarge the batch (--set-flag rollout_batch_size=512)"
)
_TRAIN_CRITIC = "train the critic longer alone (--set-flag num_critic_only_steps=N), or set value_pretraining.batches"
_SMALLER_REWARDS = (
    "divide the rewards in the environment, so that returns stay between about -1 and 10"
)
_EXPLAINED = "the share of the returns' variance that the critic explains"
_OTHER_PROMPT = "the number of answers to a prompt of another length than was sent"
_SAME_PROMPT = "leave out --sglang-allow-auto-truncate, and serve the tokenizer of the checkpoint that is trained"
LIMITS = (
    Limit(
        "turn/valid_action_ratio", "the share of valid answers", 1.0, "", _READ_INVALID, lowest=0.8
    ),
    Limit(
        "turn/length_stop_ratio",
        "the share of answers cut by their length limit",
        0.02,
        "",
        _RAISE_LENGTH,
    ),
    Limit(
        "actor/ref_kl",
        "the KL to the policy before PPO, in nats per token,",
        2.0,
        "",
        _CHARGE_KL,
        -math.inf,
    ),
    Limit("actor/ppo_kl", "the KL of one update", 0.1, "", _SMALLER_UPDATES, -math.inf),
    Limit("critic/explained_variance", _EXPLAINED, math.inf, "", _TRAIN_CRITIC, lowest=0.001),
    replace(RETURNS_IN_RANGE, metric="critic/return_outside_share"),
    Limit(
        "critic/return_rms",
        "the scale (root mean square) of the returns",
        10.0,
        "",
        _SMALLER_REWARDS,
    ),
    Limit("rollout/faults/prompt_tokens_differ", _OTHER_PROMPT, 0.0, "", _SAME_PROMPT, -math.inf),
    Limit(
        "summary/empty",
        "the share of empty notes",
        0.5,
        "",
        "read them (slime-verlog view); old notes stay",
    ),
    Limit(
        "summary/cut", "the share of notes cut by their limit", 0.5, "", "raise memory.max_tokens"
    ),
)
"""Healthy ranges, as in docs/training_metrics.md, which derives the bounds of valid answers and KL
from the studies."""
PATIENCE = 5
"""Updates in a row outside its range after which a metric raises its alarm; single batches are
noisy."""
FAR = 10.0
"""A KL of more than so many times its bound raises its alarm in one update: few policies recover
from such a step."""
FEW_ACTOR_UPDATES = 10  # a policy that trains in fewer updates than this hardly changes
LONG_EPISODE = 7
"""Episodes are long if they take more updates than this from their first turn to their last."""


class Alarms:
    """Watches the metrics of a run's updates and raises each alarm once."""

    def __init__(self) -> None:
        self.raised: dict[str, str] = {}
        """Sentences by metric."""
        self._outside: Counter[str] = Counter()

    def watch(self, updates: int, metrics: Mapping[str, float]) -> list[str]:
        """Check one update that trained the actor; returns the alarms that it raises."""
        new = []
        if not metrics.get("train/actor_trains"):
            return new
        for limit in LIMITS:
            value = metrics.get(limit.metric)
            if value is None or limit.metric in self.raised:
                continue
            self._outside[limit.metric] = (
                0 if limit.holds(value) else self._outside[limit.metric] + 1
            )
            is_far = limit.lowest == -math.inf and value > FAR * limit.highest
            if is_far or self._outside[limit.metric] >= PATIENCE:
                how_long = (
                    "far outside its range"
                    if is_far
                    else f"outside its range for {PATIENCE} updates"
                )
                sentence = limit.sentence(value, f"after {updates} updates, {how_long}")
                self.raised[limit.metric] = sentence
                new.append(sentence)
        return new


def warnings_of(imitation: Imitation, flags: EmbeddedFlags, n_env: int) -> Iterable[str]:
    """Yield what will keep a run from learning, as far as it is known before training begins."""
    if imitation.same_thoughts > 0.5:
        yield (
            f"in {imitation.same_thoughts:.0%} of the demonstrated episodes, the thought never "
            "changes, so the policy learns to repeat one; write explain_action(env), which names "
            "what the observation shows"
        )
    if imitation.unfinished > 0.5:
        yield (
            f"{imitation.unfinished:.0%} of the demonstrated games were cut before their end, so "
            "the policy never saw how one ends; shorten them (--set env.max_steps=N), or improve "
            "expert_action(env)"
        )
    per_slot = flags.rollout_batch_size * flags.n_samples_per_prompt / n_env
    if imitation.mean_turns > LONG_EPISODE * per_slot:
        yield (
            f"an episode has {imitation.mean_turns:.0f} turns and each of the {n_env} slots plays "
            f"{per_slot:.0f} per update, so a reward at the end comes many updates after the turns "
            "that earned it; take fewer slots (--set n_env=N) or more turns per update "
            "(--set-flag rollout_batch_size=N)"
        )
    yield from warnings_of_plan(flags)


def warnings_of_plan(flags: EmbeddedFlags) -> Iterable[str]:
    """Yield a sentence if hardly any update trains the actor, and one if a KL loss charges
    nothing."""
    if charged := kl_warning(advantage_flags(flags)):
        yield charged
    has_critic = flags.advantage_estimator == "ppo"
    left = flags.num_rollout - (flags.num_critic_only_steps if has_critic else 0)
    if left <= 0:
        yield (
            f"all {flags.num_rollout} updates train the critic alone, so the policy cannot change; "
            "raise the number of updates above num_critic_only_steps "
            f"({flags.num_critic_only_steps})"
        )
    elif left < FEW_ACTOR_UPDATES:
        yield (
            f"only {left} of {flags.num_rollout} updates train the policy, and with fewer than "
            f"{FEW_ACTOR_UPDATES} it hardly changes; raise the number of updates"
        )
