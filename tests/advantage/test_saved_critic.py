"""A run takes the head of the critic that it starts from, and refuses another head, other returns,
and a low score."""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from advantage.errors import ConfigError
from advantage.exchange import Layout
from advantage.patch.roles import saved_args, take_over_head
from advantage.saved_critic import (
    RECORD,
    fingerprint,
    head_record,
    keys_taken_over,
    pretrained_record,
)
from advantage.settings import AdvantageSettings
from slime_verlog import read_settings
from tests.advantage.batches import make_samples, rollout_data

BINS = {"value_loss": "hl_gauss", "value_bins": 21, "value_range": [0, 3], "value_sigma": 0.5}


def settings(**keys: Any) -> AdvantageSettings:
    return read_settings(AdvantageSettings, keys)


def collected(seed: int = 0) -> dict[str, Any]:
    data = rollout_data(make_samples(random.Random(seed), 6))
    return {**data, "tokens": [torch.arange(length) for length in data["total_lengths"]]}


def pretrained(**keys: Any) -> dict[str, Any]:
    return pretrained_record(settings(**keys), [0.0, 0.31, 0.3], 1, collected(), Layout())


def test_a_yaml_that_is_silent_gets_the_saved_head_and_one_that_says_the_same_nothing() -> None:
    record = pretrained(**BINS)
    keys = keys_taken_over(settings(), record, "folder")
    assert head_record(settings(**keys)) == head_record(settings(**BINS))
    assert keys_taken_over(settings(**BINS), record, "folder") == {}
    assert keys_taken_over(settings(), pretrained(), "folder") == {}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"value_loss": "mse"},
            "the critic in folder has the head value_loss: hl_gauss, value_bins: 21.*value_loss: "
            "mse",
        ),
        (
            {**BINS, "value_bins": 51},
            "value_bins: 21.*value_bins: 51.*leave them out to take the saved ones",
        ),
        ({**BINS, "value_range": [0, 4]}, r"value_range: \[0, 3\].*value_range: \[0, 4\]"),
        ({**BINS, "value_sigma": 0.75}, "value_sigma: 0.5.*value_sigma: 0.75"),
        (
            {"gamma_step": 0.9},
            "pretrained on returns with gamma_step 0.99, and this run has 0.9; give the same",
        ),
        (
            {"value_pretraining": {"least_explained_variance": 0.5}},
            "explains 0.3100 of the variance of held-out returns, not above "
            "value_pretraining.least_explained_variance 0.5, so its values would mislead PPO: "
            "pretrain it on more batches",
        ),
    ],
)
def test_another_head_other_returns_and_a_low_score_are_refused_in_one_sentence(
    keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        keys_taken_over(settings(**keys), pretrained(**BINS), "folder")


def test_the_score_is_not_asked_for_where_the_yaml_says_so_or_pretraining_goes_on() -> None:
    for pretraining in (
        {"least_explained_variance": None},
        {"batches": 2, "least_explained_variance": 0.5},
    ):
        keys_taken_over(settings(value_pretraining=pretraining), pretrained(), "folder")


def test_the_fingerprint_is_that_of_the_turns_in_any_order() -> None:
    data, other = collected(), collected(1)
    order = list(range(len(data["tokens"])))[::-1]
    shuffled = {name: [data[name][k] for k in order] for name in ("tokens", "prompt")}
    assert (
        fingerprint(data, Layout())
        == fingerprint(shuffled, Layout())
        != fingerprint(other, Layout())
    )
    data["tokens"][0] = data["tokens"][0] + 1
    assert fingerprint(data, Layout()) != fingerprint(shuffled, Layout())


def saved(folder: Path, **arguments: Any) -> Namespace:
    """A Megatron checkpoint with these arguments, and the arguments of a critic that starts from
    it."""
    (folder / "iter_0000002").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    torch.save({"args": Namespace(**arguments)}, folder / "iter_0000002" / "common.pt")
    return Namespace(load=str(folder), finetune=True, no_load_optim=True)


@pytest.mark.parametrize(
    "arguments",
    [{RECORD: {"value_loss": "mse"}}, {"slime_verlog_role": "critic"}, {"loss_type": "value_loss"}],
    ids=["with a record", "of an older version", "of slime alone"],
)
def test_a_trained_scalar_head_is_never_replaced_silently_by_bins_in_slime(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    args = saved(tmp_path, **arguments)
    vars(args).update(BINS)
    with pytest.raises(ConfigError, match=f"the critic in {tmp_path} has the head value_loss: mse"):
        take_over_head(args, saved_args(args))


def test_in_slime_an_actor_lends_its_weights_and_a_critic_its_head(tmp_path: Path) -> None:
    actor = saved(tmp_path / "actor", slime_verlog_role="actor", loss_type="policy_loss")
    vars(actor).update(BINS)
    take_over_head(actor, saved_args(actor))
    assert getattr(actor, RECORD)["value_bins"] == 21
    critic = saved(tmp_path / "critic", **{RECORD: pretrained(**BINS)})
    take_over_head(critic, saved_args(critic))
    assert (critic.value_loss, critic.value_range) == ("hl_gauss", (0.0, 3.0))
    assert getattr(critic, RECORD) == head_record(settings(**BINS)), (
        "PPO's own checkpoints have no score"
    )
