"""Starts or resumes GRPO on geometry problems with images, in slime's own outer loop."""

from pathlib import Path
from typing import Any

from scripts.launcher.models import download, download_model, was_interrupted
from scripts.launcher.resume import last_step, retention
from scripts.launcher.run import PARALLEL, RECOMPUTE, Run, main, words
from scripts.launcher.variables import Variables
from slime_verlog import Field

HOOKS = """
--custom-config-path {config} --custom-generate-function-path rollout.generate.generate
--custom-megatron-init-path advantage.patch.images.install
--custom-rollout-log-function-path inspection.metrics.log_rollout
--custom-eval-rollout-log-function-path inspection.metrics.log_eval_rollout
--prompt-data {data}/train.parquet --input-key problem --label-key answer --multimodal-keys {images} --rollout-shuffle
"""
ROLLOUT = """
--num-rollout {updates} --rollout-batch-size {problems} --n-samples-per-prompt {episodes} --global-batch-size {batch}
--rollout-max-response-len {response} --rollout-max-context-len {context} --rollout-temperature 1
"""
DATA_SET = "VeraIsHere/geo3k_imgurl_processed"
"""slime's data set on the Hugging Face hub."""
EVAL = "--eval-interval {interval} --eval-prompt-data geo3k {data}/test.parquet --n-samples-per-eval-prompt 1"
GRPO = "--advantage-estimator grpo --kl-coef 0.0 --entropy-coef 0.0 --eps-clip 0.2 --eps-clip-high 0.28"
OPTIMIZER = """
--optimizer adam --lr {lr} --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
"""
EXPERTS = "--expert-model-parallel-size {experts} --expert-tensor-parallel-size 1"
SGLANG = """
--rollout-num-gpus-per-engine {gpus} --sglang-ep-size {experts} --sglang-mem-fraction-static {share}
"""


class Geo3kVariables(Variables):
    """What GRPO on whole episodes has."""

    problems: int = Field(ge=1)
    """problems per batch"""
    episodes: int = Field(ge=1)
    """episodes of each problem"""
    updates: int = Field(ge=1)
    """batches"""
    data: str
    """folder of train.parquet and, to evaluate, test.parquet; downloaded if it is missing"""
    eval_interval: int = Field(default=20, ge=1)
    """batches between evaluations"""
    experts: int | None = Field(default=None, ge=1)
    """GPUs that share a mixture's experts; unset: all of a node, 1 for a dense model"""
    engine_gpus: int | None = Field(default=None, ge=1)
    """GPUs per engine; unset: EXPERTS"""
    mem_fraction: str = "0.6"
    """SGLang's share of the GPUs' memory"""


class Geo3k(Run[Geo3kVariables]):
    """An actor without a critic. Megatron's own rotation of checkpoints is enough for one role."""

    variables = Geo3kVariables
    refused = (
        "a batch is PROBLEMS x EPISODES whole episodes, and there is no critic",
        ("TURNS", "STEP_TURNS", "PRETRAINED_CRITIC", "CRITIC_ONLY", "CRITIC_LR"),
    )
    sees = True

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        is_mixture = "-A" in self.model and self.model.endswith("B")
        self.experts = self.given.experts or (self.given.num_gpus if is_mixture else 1)
        self.engine_gpus = self.given.engine_gpus or self.experts
        self.reference = self.hf_checkpoint

    def before(self) -> None:
        """Download model and data set, unless they are complete."""
        folder = Path(self.given.data)
        download_model(self.model, Path(self.hf_checkpoint))
        if not (folder / "train.parquet").is_file() or was_interrupted(folder):
            download(DATA_SET, folder, "--repo-type", "dataset")

    def groups(self) -> dict[str, list[str]]:
        """Return the flags of GRPO."""
        given = self.given
        has_saved = last_step(Path(self.actor_dir)) >= 0
        load = self.actor_dir if has_saved else self.hf_checkpoint
        saved = [
            "--hf-checkpoint",
            self.hf_checkpoint,
            "--save",
            self.actor_dir,
            "--save-interval",
            "20",
        ]
        rollout = words(
            ROLLOUT,
            updates=given.updates,
            problems=given.problems,
            episodes=given.episodes,
            batch=given.problems * given.episodes,
            response=given.response_len,
            context=given.prompt_len + given.response_len,
        )
        can_evaluate = Path(given.data, "test.parquet").is_file()
        evaluation = words(EVAL, interval=given.eval_interval, data=given.data)
        parallel = words(PARALLEL, tensor=given.tensor_parallel) + words(
            EXPERTS, experts=self.experts
        )
        parallel += [*words(RECOMPUTE), "--micro-batch-size", "1"]
        if given.tensor_parallel > 1:
            parallel.append("--sequence-parallel")
        return {
            "LAYOUT": self.layout(),
            "CKPT": [*saved, *retention(given.checkpoints_kept, 20), "--load", load],
            "HOOK": words(
                HOOKS, config=self.config_file, data=given.data, images='{"image": "images"}'
            ),
            "ROLLOUT": rollout,
            "EVAL": evaluation if can_evaluate else [],
            "PPO": words(GRPO),
            "OPTIMIZER": words(OPTIMIZER, lr=given.actor_lr),
            "PERF": parallel,
            "SGLANG": words(
                SGLANG, gpus=self.engine_gpus, experts=self.experts, share=given.mem_fraction
            ),
        }


if __name__ == "__main__":
    main(Geo3k)
