"""Value pretraining on one machine: a run that trains the critic alone, and PPO that starts from
what it saved."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from safetensors.torch import load_file, save_file

from advantage.errors import PretrainingError
from embedded.launch import run_seed
from embedded.run.record import read_rows
from embedded.train import train
from embedded.trainer.checkpoint import critic_record
from embedded.trainer.ppo import PpoTrainer
from embedded.warmstart.imitation import WarmStart
from rollout.checkpoint import checkpoint_path, read_state
from rollout.data_source import EpisodeSource
from rollout.errors import CheckpointError, ConfigError
from slime_verlog import read_settings
from tests.embedded.conftest import WARM, small_config
from tests.embedded.test_train import Recorder, maker
from tests.embedded.test_train import make as make  # a fixture
from tests.fixtures.warm_python import warm_engines

BATCHES = 4
ANY_SCORE = {"value_pretraining": {"least_explained_variance": None}}
SHORT = {"batches": BATCHES, "passes": 3, "patience": 1}
ANY = {"n_env": 12, "value_pretraining": {**SHORT, **ANY_SCORE["value_pretraining"]}}
BINS = {"value_loss": "hl_gauss", "value_bins": 21, "value_range": [5.0, 6.0]}


def pretraining_flags(folder: Path) -> dict[str, Any]:
    return {"num_rollout": BATCHES, "num_critic_only_steps": BATCHES, "save": str(folder)}


@pytest.fixture(scope="module")
def pretrained(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, recorder = tmp_path_factory.mktemp("pretrained"), Recorder()
    args = maker(policy_folder, folder)(ANY, **pretraining_flags(folder / "critic"))
    with warm_engines():
        train(args, recorder)
    *collecting, (_, last) = recorder.updates
    assert [row["warmup/kept_turns"] for _, row in recorder.updates] == [
        12.0 * k for k in range(1, BATCHES + 1)
    ]
    assert not any("critic/value_loss" in row for _, row in collecting), (
        "nothing trains while turns are collected"
    )
    assert last["critic/passes"] <= 3 and "critic/held_out_explained_variance" in last
    return folder / "critic"


@pytest.fixture
def saved(pretrained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pretrained, tmp_path / "critic")


def weights_of(folder: Path) -> Path:
    return folder / f"trainer_{BATCHES - 1}" / "critic.safetensors"


def test_ppo_starts_from_the_saved_critic_value_head_included(make: Any, saved: Path) -> None:
    trainer = PpoTrainer(make(ANY_SCORE, critic_load=str(saved)))
    state, wanted = trainer.critic.state_dict(), load_file(weights_of(saved))
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert "output_layer.weight" in wanted
    untrained = PpoTrainer(make()).actor.state_dict()
    assert all(
        torch.equal(untrained[name], tensor)
        for name, tensor in trainer.actor.state_dict().items()
        if tensor is not None
    )


def test_ppo_plays_none_of_the_episodes_that_its_critic_was_trained_on(
    make: Any, saved: Path, tmp_path: Path
) -> None:
    used = json.loads((saved / "slime_verlog_seeds.json").read_text())
    state = read_state(checkpoint_path(str(saved), BATCHES - 1))
    assert (
        used["first"] == 0
        and used["next"] == max(slot["next_episode"] for slot in state.slots) > 12
    )
    folder = tmp_path / "ppo"
    flags = {"num_rollout": 1, "num_critic_only_steps": 0, "save": str(folder)}
    train(make(ANY_SCORE, **flags, critic_load=str(saved)), Recorder())
    assert episode_seeds(folder)[0] >= used["next"]
    source = EpisodeSource(make(**flags, load=str(folder)))  # a resume names the run's own critic
    source.load(0)
    assert source.episode(0).env.metadata["seed"] == used["next"]


def episode_seeds(folder: Path) -> list[int]:
    """Seeds of the live episodes of the first checkpoint, in order."""
    state = read_state(checkpoint_path(str(folder), 0))
    return sorted(
        slot["episode"]["spec"]["metadata"]["seed"] for slot in state.slots if slot["episode"]
    )


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("no value head", "output_layer.weight has shape None"),
        ("damaged", "no usable trainer checkpoint in"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused_in_one_sentence(
    make: Any, saved: Path, mistake: str, sentence: str
) -> None:
    path = weights_of(saved)
    tensors = load_file(path)
    del tensors["output_layer.weight"]
    save_file(tensors, path)
    if mistake == "damaged":
        path.write_bytes(b"?")
    with pytest.raises(CheckpointError, match=sentence):
        PpoTrainer(make(ANY_SCORE, critic_load=str(saved)))


def test_the_saved_critic_says_what_it_learned_and_ppo_refuses_one_that_explains_too_little(
    make: Any, saved: Path
) -> None:
    record = critic_record(saved)
    assert (record["value_loss"], record["gamma_step"], record["gamma_token"]) == ("mse", 0.99, 1.0)
    assert re.fullmatch(r"[0-9a-f]{16}", record["data"]) and record["explained_variance"] <= 1
    limit = record["explained_variance"] + 0.01
    with pytest.raises(
        ConfigError,
        match="of the variance of held-out returns, not above.*pretrain it on more batches",
    ):
        PpoTrainer(
            make({"value_pretraining": {"least_explained_variance": limit}}, critic_load=str(saved))
        )
    with pytest.raises(ConfigError, match="which would start untrained"):
        PpoTrainer(make({**ANY_SCORE, **BINS}, critic_load=str(saved)))


def test_a_pretrained_critic_with_bins_gives_ppo_its_head_and_a_range_without_the_returns_is_named(
    make: Any, tmp_path: Path, caplog: Any
) -> None:
    recorder = Recorder()
    train(make({**ANY, **BINS}, **pretraining_flags(tmp_path / "critic")), recorder)
    assert "critic/value_clipfrac" not in recorder.updates[-1][1]
    trainer = PpoTrainer(make(ANY_SCORE, critic_load=str(tmp_path / "critic")))
    assert trainer.critic.output_layer.weight.shape[0] == BINS["value_bins"]
    assert trainer.args.value_range == (5.0, 6.0)
    warned = [
        record.getMessage()
        for record in caplog.records
        if "return_outside_share" in record.getMessage()
    ]
    assert (
        len(warned) == 1 and f"is 1 in rollout {BATCHES - 1}, and healthy is 0 to 0.01" in warned[0]
    )


def test_a_critic_that_explains_nothing_is_not_saved(make: Any, tmp_path: Path) -> None:
    settings = {**SHORT, "least_explained_variance": 1.0}
    with pytest.raises(PretrainingError, match="collect more batches"):
        train(
            make(
                {"n_env": 12, "value_pretraining": settings},
                **pretraining_flags(tmp_path / "critic"),
            ),
            Recorder(),
        )
    assert not (tmp_path / "critic").exists()


def test_one_command_pretrains_the_critic_and_then_trains_the_policy(tmp_path: Path) -> None:
    """`slime-verlog train --set value_pretraining.batches=4`: both runs start from the policy after
    imitation."""
    pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
    config = small_config(tmp_path, eval={"episodes": 2}, **ANY)
    out = tmp_path / "out"
    flags: dict[str, Any] = {
        "rollout_batch_size": 16,
        "global_batch_size": 4,
        "rollout_max_response_len": 6,
    }
    summary = run_seed(3, out, config, 2, read_settings(WarmStart, WARM), **flags)
    assert (summary["updates"], summary["actor_updates"]) == (2, 2), (
        "no update of PPO is left to the critic alone"
    )
    assert read_rows(out / "critic" / "metrics.jsonl")[-2]["turns"] == 16 * BATCHES
    assert yaml.safe_load((out / "config.yaml").read_text())["value_pretraining"] == {
        "least_explained_variance": None
    }
    assert json.loads((out / "critic" / "latest.json").read_text()) == {"rollout_id": BATCHES - 1}
