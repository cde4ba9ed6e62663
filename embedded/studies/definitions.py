"""The ablation studies: the question of each, and how its variants differ from the embedded defaults.

A variant lists only its changes: YAML keys (nested as in the file), slime's flags, and settings of the warm start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One setting; the rest is as in `custom_configs/quickstart.yaml` and `embedded/arguments.py`."""

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    warm: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `embedded.warmstart.imitation.WarmStart`."""
    share: float = 1.0
    """Share of the study's updates that this variant trains."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question, its variants, and a note on how to read the result."""

    question: str
    variants: tuple[Variant, ...]
    note: str = ""


WHOLE_EPISODES = {
    "rollout_function_path": "embedded.whole_episodes.generate_rollout",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "global_batch_size": 4,
}
"""Sixteen whole episodes per update, four from each start; four episodes per optimizer step."""

CRITIC_FREE = {
    **WHOLE_EPISODES,
    "advantage_estimator": "grpo",
    "custom_advantage_function_path": "advantage.group.compute_advantages",
    "num_critic_only_steps": 0,
    "kl_coef": 0.0,
    "normalize_advantages": False,
}
CRITIC = {**WHOLE_EPISODES, "num_critic_only_steps": 3}

REWARDS = {
    "sparse": {"binary_reward": True},
    "graded": {"binary_reward": False},
    "shaped": {"binary_reward": True, "shaping": 0.5},
}
"""BabyAI's rewards: 1 for success; less for later success; 1 for success plus progress towards it."""

PICKUP: dict[str, Any] = {"keys": {"tasks": ["pickup"]}, "warm": {"random_share": 0.6}}
"""Pickup is harder than goto, so its warm start has a larger share of expert actions."""

RAW_KL_LOSS = {
    "normalize_advantages": False,
    "kl_coef": 0.0,
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "kl_loss_type": "low_var_kl",
}

STUDIES: dict[str, Study] = {
    "dual_discount": Study(
        question="Does it help to discount between turns (0.99, 0.95) but not between tokens?",
        variants=(
            Variant(name="dual", **PICKUP),
            Variant(
                name="all_ones",
                keys={**PICKUP["keys"], "gamma_step": 1.0, "lambda_step": 1.0},
                warm=PICKUP["warm"],
            ),
        ),
        note="The Verlog paper's RQ3, on BabyAI's pickup. With all discounts at 1, the critic's targets are "
        "undiscounted returns, so value losses also differ in scale; compare explained variance as well.",
    ),
    "stability": Study(
        question="What keeps a run from drifting away from what it has learned?",
        variants=(
            Variant(name="whitened", **PICKUP),
            Variant(name="constant_lr", flags={"lr_decay_style": "constant"}, **PICKUP),
            Variant(name="raw", flags={"normalize_advantages": False}, **PICKUP),
            Variant(name="raw_kl_loss", flags=RAW_KL_LOSS, **PICKUP),
        ),
        note="Advantages whitened (the default) or raw; a learning rate that decays (the default) or not; KL in the "
        "reward (the default) or in the loss.",
    ),
    "gae_form": Study(
        question="Which form of GAE learns fastest on the same turns?",
        variants=tuple(Variant(name=form, keys={"gae_form": form}) for form in ("dual", "token", "turn", "bi_level")),
    ),
    "memory": Study(
        question="How many past turns should a prompt show?",
        variants=tuple(Variant(name=f"n={n}", keys={"memory": {"n": n}}) for n in (0, 1, 2, 4)),
        note="Each variant has its own warm start, because prompts differ; compare the gain from training.",
    ),
    "fixed_turn": Study(
        question="Batches of a fixed number of turns, or of whole episodes?",
        variants=(
            Variant(name="fixed_turn"),
            Variant(name="per_env", keys={"turn_quota": "per_env"}),
            Variant(name="whole_episodes", flags={**CRITIC, "rollout_batch_size": 16, "n_samples_per_prompt": 1}),
        ),
        note="Batches of whole episodes vary in turns, so compare at equal numbers of turns.",
    ),
    "warmup": Study(
        question="Does it help to train the critic alone first, and to replay kept turns meanwhile?",
        variants=(
            Variant(name="none", flags={"num_critic_only_steps": 0}),
            Variant(name="critic_only", flags={"num_critic_only_steps": 6}),
            Variant(
                name="replay",
                keys={"critic_warmup": {"w_epoch": 4, "w_iter": 4, "fraction": 0.5}},
                flags={"num_critic_only_steps": 8},
            ),
        ),
        note="Warm-up updates count as updates, so all variants have the same budget.",
    ),
    "density": Study(
        question="Sparse, graded or shaped reward, with a critic (PPO) and without (RLOO)?",
        variants=tuple(
            Variant(
                name=f"{learner}_{name}",
                keys={"env": env, **({"group_estimator": "rloo"} if learner == "rloo" else {})},
                flags=CRITIC if learner == "ppo" else CRITIC_FREE,
            )
            for name, env in REWARDS.items()
            for learner in ("ppo", "rloo")
        ),
        note="Rewards differ between variants, so compare win rates, not returns.",
    ),
    "estimator": Study(
        question="A critic, or comparisons between episodes from the same start?",
        variants=(
            Variant(name="ppo", flags=CRITIC),
            *(
                Variant(name=name, keys={"group_estimator": name}, flags=CRITIC_FREE)
                for name in ("grpo", "rloo", "gigpo")
            ),
        ),
        note="All variants play whole episodes; those without a critic charge no KL.",
    ),
    "sft_mix": Study(
        question="How should one budget be split between expert demonstrations and PPO?",
        variants=tuple(
            Variant(
                name=f"{episodes}:{updates}",
                flags={"num_critic_only_steps": min(6, updates // 2)},
                warm={"episodes": episodes, "random_share": 0.0},
                share=updates / 60,
            )
            for episodes, updates in ((5, 60), (20, 45), (40, 25), (60, 5))
        ),
        note="Demonstrated episodes : PPO updates of 256 turns, out of 60. One more demonstration costs one update.",
    ),
}
