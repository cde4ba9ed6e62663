"""Starts or resumes a run on a slime cluster: builds train.py's flags, checks them, and gives the
job to Ray.

    python3 -m scripts.launch SCRIPT NAME=VALUE... -- OPTIONS

The scripts call it with their variables' values, and with the options of their user. This file has
PPO; SAO, supervised training, GEO3K and what all kinds of runs share are in `scripts/launcher/`.
"""

import os
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from scripts.launcher.own_python import ensure_packages

ensure_packages()

from rollout.bridge.settings import RolloutSettings, check_keys  # noqa: E402
from scripts.launcher.config import with_key, without_key  # noqa: E402
from scripts.launcher.job import Job  # noqa: E402
from scripts.launcher.resume import Start, checkpoints, last_step  # noqa: E402
from scripts.launcher.run import Run, main, words  # noqa: E402
from scripts.launcher.variables import PpoVariables  # noqa: E402
from slime_verlog import ConfigError, parse_yaml  # noqa: E402

HOOKS = """
--rollout-function-path {rollout_function} --data-source-path rollout.data_source.EpisodeSource
--custom-convert-samples-to-train-data-path rollout.samples.convert_samples_to_train_data
--custom-megatron-init-path advantage.patch.install
--rollout-data-postprocess-path advantage.kl_split.log_kl_split
--custom-rollout-log-function-path inspection.metrics.log_rollout
--custom-eval-rollout-log-function-path inspection.metrics.log_eval_rollout
"""
ROLLOUT = """
--num-rollout {batches} --rollout-batch-size {turns} --n-samples-per-prompt 1 --global-batch-size {step_turns}
--rollout-max-prompt-len {prompt} --rollout-max-response-len {response} --rollout-max-context-len {context}
--rollout-temperature 1 --balance-data
"""
EVAL = "--eval-interval {interval} --skip-eval-before-train --eval-prompt-data held-out from-the-yaml --eval-top-k 1"
"""slime wants a data set to be named wherever it evaluates; the held-out episodes are those of the
YAML."""
PPO = """
--advantage-estimator ppo --num-critic-only-steps {critic_only} --normalize-advantages
--kl-coef 0.001 --kl-loss-type k1 --entropy-coef 0.001
--eps-clip 0.2 --eps-clip-c 3.0 --value-clip 0.5 --calculate-per-token-loss
"""
OPTIMIZER = """
--optimizer adam --lr {lr} --lr-decay-style constant --weight-decay 0.01
--adam-beta1 0.9 --adam-beta2 0.999 --clip-grad 1.0
"""
SGLANG = "--rollout-num-gpus-per-engine {gpus} --sglang-mem-fraction-static {share}"


class Ppo(Run[PpoVariables]):
    """An actor and a critic, trained on fixed-turn batches; or the critic alone, in value
    pretraining."""

    variables = PpoVariables
    rollout_function: ClassVar[str] = "rollout.fixed_turn.generate_rollout"
    losses: ClassVar[str] = PPO

    @property
    def experiment(self) -> str:
        """The name; value pretraining gets its own folder."""
        return "critic-" * bool(self.given.pretraining) + super().experiment

    @cached_property
    def config(self) -> str:
        """The YAML of this run; value pretraining, or a critic that comes from it, replaces the
        warm-up."""
        text = super().config
        given = self.given
        if given.pretraining or given.pretrained_critic:
            warmup = check_keys(parse_yaml(text, f"CONFIG={given.config}")).critic_warmup
            text = without_key(text, "critic_warmup")
            if given.pretraining:
                batches = given.batches or warmup.w_epoch or 20
                counts = f"  batches: {batches}\n  held_out: {given.held_out}"
                limits = f"  passes: {given.passes}\n  patience: {given.patience}"
                text = with_key(text, "value_pretraining", f"\n{counts}\n{limits}")
        if given.checkpoints_kept == "all":
            return text
        return with_key(text, "checkpoints_kept", str(given.checkpoints_kept))

    def settings(self) -> RolloutSettings:
        """Return the YAML's settings; raises ConfigError for a mistake in them, and if they train
        without a critic."""
        found = super().settings()
        if found.group_estimator:
            raise ConfigError(
                f"group_estimator: {found.group_estimator} in CONFIG={self.given.config} trains "
                "without a critic, which this script does not: remove the key, or call train.py "
                "with the flags in docs/group_estimators.md (Advantages without a critic)"
            )
        return found

    @property
    def critic_only(self) -> int:
        """Batches that train the critic alone."""
        settings = self.settings()
        given = self.given
        warmup = settings.critic_warmup.w_epoch + settings.critic_warmup.w_iter
        if given.pretraining or given.pretrained_critic:
            return settings.value_pretraining.batches
        if warmup and given.critic_only:
            raise ConfigError(
                f"CRITIC_ONLY={given.critic_only} and critic_warmup in CONFIG={given.config} both "
                "say how long the critic trains alone; remove the key, or set CRITIC_ONLY=0"
            )
        return warmup or given.critic_only

    def missing(self, job: Job) -> list[str]:
        """Return also a critic that a new run cannot start from."""
        found = super().missing(job)
        critic = self.given.pretrained_critic
        is_new = last_step(Path(self.run_dir, "critic")) < 0
        if critic and is_new and last_step(Path(critic)) < 0:
            found.append(f"{critic} holds no finished checkpoint; correct PRETRAINED_CRITIC")
        return found

    def after(self) -> None:
        """Say where the critic of value pretraining is."""
        if self.given.pretraining:
            folder = f"{self.run_dir}/critic"
            page = f"scripts/run_{os.environ.get('RUN') or 'babyai'}.sh"
            print(f"the critic is in {folder}; PPO from it: PRETRAINED_CRITIC={folder} bash {page}")

    def groups(self) -> dict[str, list[str]]:
        """Return the flags of PPO."""
        given = self.given
        critic_only = self.critic_only
        start = Start(
            run_dir=self.run_dir,
            hf_checkpoint=self.hf_checkpoint,
            reference=self.reference,
            critic=given.pretrained_critic or self.reference,
            critic_only=critic_only,
            critic_lr=given.critic_lr,
        )
        saved, self.roles = checkpoints(start)
        batches = critic_only + (0 if given.pretraining else given.updates)
        rollout = words(
            ROLLOUT,
            batches=batches,
            turns=given.turns,
            step_turns=given.step_turns,
            prompt=given.prompt_len,
            response=given.response_len,
            context=given.prompt_len + given.response_len,
        )
        evaluation = words(
            EVAL, interval=given.eval_interval or spaced_evaluations(critic_only, batches)
        )
        hooks = words(HOOKS, rollout_function=self.rollout_function)
        return {
            "LAYOUT": self.layout(),
            "CKPT": saved,
            "HOOK": ["--custom-config-path", self.config_file, *hooks],
            "ROLLOUT": rollout,
            "EVAL": [] if given.pretraining else evaluation,  # the policy does not change
            "PPO": words(self.losses, critic_only=critic_only),
            "OPTIMIZER": words(OPTIMIZER, lr=given.actor_lr),
            "PERF": self.parallel(),
            "SGLANG": words(SGLANG, gpus=self.engine_gpus, share=given.mem_fraction),
        }


def spaced_evaluations(critic_only: int, batches: int) -> int:
    """Return the batches between evaluations: the smallest divisor above the warm-up that gives at
    most 5.

    slime evaluates after every N-th batch, and not after the last unless N divides their number.
    Before the actor trains, there is nothing to measure. All GPUs but those that serve a few games
    wait meanwhile (docs/slime_cluster.md, Time).
    """
    divisors = (
        n for n in range(critic_only + 1, batches) if batches % n == 0 and batches // n <= 5
    )
    return next(divisors, max(batches, critic_only + 1))


if __name__ == "__main__":
    main(Ppo)
