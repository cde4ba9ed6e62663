"""`slime-verlog branch --critic` reads the values that training had."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.trainer.batches import micro_batches, to_rollout_data
from embedded.trainer.checkpoint import keep_critic
from embedded.trainer.ppo import PpoTrainer
from inspection.branch.critic import values_of
from rollout.errors import ConfigError
from tests.embedded.conftest import made_up_batch, trainer_args


@pytest.mark.parametrize(
    "head", [{}, {"value_loss": "hl_gauss", "value_range": [-1.0, 1.0]}], ids=["mse", "hl_gauss"]
)
def test_a_saved_critic_gives_a_prompt_the_value_of_its_first_token(
    policy_folder: Path, tmp_path: Path, head: dict[str, Any]
) -> None:
    trainer = PpoTrainer(
        trainer_args(
            hf_checkpoint=str(policy_folder), critic_lr=1e-2, num_critic_only_steps=2, **head
        )
    )
    for number in range(2):
        trainer.train(number, made_up_batch(seed=number))
    trainer.save(str(tmp_path), 1)
    batch = made_up_batch(seed=2)
    data = to_rollout_data(batch, trainer.device)
    everything = range(len(batch["tokens"]))
    rows = trainer._values(data, micro_batches(data, everything, trainer.flags.max_tokens_per_gpu))
    prompts = [batch["tokens"][i][: -batch["response_lengths"][i]] for i in everything]
    kept = tmp_path / "critic_after"
    keep_critic(tmp_path, kept)
    found = values_of([list(map(int, prompt)) for prompt in prompts], kept, policy_folder)
    assert found == pytest.approx([float(row[0]) for row in rows], abs=1e-5)
    assert max(found) - min(found) > 1e-3, "the critic has learned something"


def test_a_critic_of_another_tokenizer_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    PpoTrainer(trainer_args(hf_checkpoint=str(policy_folder))).save(str(tmp_path), 0)
    other = tmp_path / "other"
    shutil.copytree(policy_folder, other)
    with open(other / "tokenizer.json", "a", encoding="utf-8") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="trained with another tokenizer than that of .*other"):
        values_of([[1]], tmp_path, other)
    with pytest.raises(ConfigError, match="trained with another tokenizer"):
        PpoTrainer(trainer_args(hf_checkpoint=str(other), critic_load=str(tmp_path)))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint; give OUT/critic_after"):
        values_of([[1]], tmp_path, tmp_path)
