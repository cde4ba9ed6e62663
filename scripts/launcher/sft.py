"""Starts or resumes supervised training on scripted play, in slime's own outer loop."""

import subprocess
from pathlib import Path

from scripts.launcher.gpus import check_division, training_flags
from scripts.launcher.resume import retention
from scripts.launcher.run import Run, main, words
from scripts.launcher.variables import Variables
from slime_verlog import Field

HOOKS = "--custom-config-path {config} --rollout-function-path slime.rollout.sft_rollout.generate_rollout"
ROLLOUT = """
--prompt-data {data} --input-key messages --metadata-key metadata --loss-mask-type {mask} --rollout-shuffle
--num-epoch {epochs} --rollout-batch-size {batch} --global-batch-size {batch}
"""
LOSS = """
--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only
"""
OPTIMIZER = """
--optimizer adam --lr {lr} --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
"""
CHECKPOINTS = "--hf-checkpoint {model} --ref-load {reference} --load {actor} --save {actor} --save-interval 100"


class SftVariables(Variables):
    """What supervised training has."""

    episodes: int = Field(ge=1)
    """demonstrated episodes"""
    epochs: int = Field(ge=1)
    """passes over them"""
    batch: int = Field(ge=1)
    """turns per training step"""
    demonstrations: str = ""
    """a .jsonl or .parquet file with yours; unset: they are played"""
    actor_lr: str = "1e-5"
    """learning rate"""


class Sft(Run[SftVariables]):
    """An actor that imitates demonstrations; no engine starts."""

    variables = SftVariables
    refused = (
        "supervised training makes EPOCHS passes in steps of BATCH turns",
        ("TURNS", "STEP_TURNS", "UPDATES", "PRETRAINED_CRITIC", "CRITIC_ONLY", "CRITIC_LR"),
    )

    @property
    def data(self) -> str:
        """The file of demonstrations."""
        return self.given.demonstrations or f"{self.run_dir}/demonstrations.jsonl"

    def preparation(self) -> str:
        """Play the demonstrations, in a script of `--flat`."""
        play = (
            f'PYTHONPATH=$REPO python3 -m inspection.demonstrations --config "{self.config_file}"'
        )
        return f'[ -f "{self.data}" ] || {play} \\\n  --episodes {self.given.episodes} --out "{self.data}"'

    def before(self) -> None:
        """Play the demonstrations, unless they are there; raises CalledProcessError if that
        fails."""
        if not Path(self.data).is_file():
            play = ["python3", "-m", "inspection.demonstrations", "--config", self.config_file]
            subprocess.run(
                [*play, "--episodes", str(self.given.episodes), "--out", self.data], check=True
            )

    def groups(self) -> dict[str, list[str]]:
        """Return the flags of supervised training."""
        given = self.given
        check_division(
            "TENSOR_PARALLEL", given.tensor_parallel, given.num_gpus * given.num_nodes, "train"
        )
        masks = {"Qwen3.5": "qwen3_5", "Qwen3": "qwen3", "": "qwen"}
        mask = next(name for start, name in masks.items() if self.model.startswith(start))
        saved = words(
            CHECKPOINTS, model=self.hf_checkpoint, reference=self.reference, actor=self.actor_dir
        )
        return {
            "LAYOUT": training_flags(given.num_nodes, given.num_gpus, given.num_gpus),
            "CKPT": saved + retention(given.checkpoints_kept, 100),
            "HOOK": words(HOOKS, config=self.config_file),
            "ROLLOUT": words(
                ROLLOUT, data=self.data, mask=mask, epochs=given.epochs, batch=given.batch
            ),
            "PPO": words(LOSS),
            "OPTIMIZER": words(OPTIMIZER, lr=given.actor_lr),
            "PERF": self.parallel(),
        }


if __name__ == "__main__":
    main(Sft)
