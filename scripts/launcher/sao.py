"""Starts or resumes a run with SAO: PPO on a stream of turns, with the paper's losses
(docs/presets.md)."""

from scripts.launch import Ppo
from scripts.launcher.run import ConfigError, RolloutSettings, main

SAO = """
--advantage-estimator ppo --num-critic-only-steps {critic_only} --normalize-advantages
--kl-coef 0 --entropy-coef 0 --use-rollout-logprobs
--eps-clip 0.3 --eps-clip-high 5.0 --value-clip 0.5 --calculate-per-token-loss
"""
"""The interval of ratios is the paper's for mathematics and tools; 0.8 and 3.0 are for coding."""


class Sao(Ppo):
    """PPO with turns that older weights played."""

    rollout_function = "rollout.continuous.generate_rollout"
    losses = SAO

    def settings(self) -> RolloutSettings:
        """Return the YAML's settings; raises ConfigError for a mistake in them, and without SAO's
        losses."""
        found = super().settings()
        if found.policy_loss != "dis":
            raise ConfigError(
                f"CONFIG={self.given.config} does not train with SAO's losses: add `preset: sao` "
                "to it"
            )
        return found


if __name__ == "__main__":
    main(Sao)
