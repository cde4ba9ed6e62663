"""Tensors on a GPU stay there, tested with a pretended device that refuses to mix with the CPU."""

import random
from argparse import Namespace
from typing import Any

import pytest
import torch

from advantage.estimators import ESTIMATORS
from advantage.exchange import Group
from advantage.group import compute_advantages as compute_group_advantages
from advantage.hook import compute_advantages
from advantage.kl_split import log_kl_split
from advantage.settings import KL_SPLIT
from advantage.training.losses import whiten
from tests.advantage.batches import (
    FakeSample,
    check_rows,
    expected,
    make_args,
    make_samples,
    rollout_data,
    turn,
)
from tests.fixtures.pretend_device import ELSEWHERE, Elsewhere, pretended_device


def on_the_device(samples: list[FakeSample]) -> dict[str, Any]:
    """Rollout data as a rank on a GPU has it."""
    keys = ("values", "kl", "loss_masks")
    return {
        k: [Elsewhere(x) for x in v] if k in keys else v for k, v in rollout_data(samples).items()
    }


@pytest.mark.parametrize("form", ["dual", "token", "turn", "bi_level"])
def test_advantages_are_computed_where_the_values_are(form: str) -> None:
    for seed in range(2):
        samples = make_samples(random.Random(seed), 6)
        args = make_args(gae_form=form, rollout_data_postprocess_path=KL_SPLIT)
        with pretended_device():
            data = on_the_device(samples)
            compute_advantages(args, data)
            whiten(data["advantages"], data["loss_masks"], Group())
            log_kl_split(args, 0, data)
            assert all(row.device == ELSEWHERE for row in data["advantages"] + data["returns"])
        if form == "dual":
            check_rows(
                [row.inner for row in data["advantages"]],
                [row for row, _ in expected(samples, args)],
            )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_advantages_too(estimator: str) -> None:
    samples = [turn(k, 0, reward=float(k), terminated=True) for k in range(4)]
    with pretended_device():
        data = on_the_device(samples)
        flags = Namespace(group_estimator=estimator, kl_coef=0.0, n_samples_per_prompt=4)
        compute_group_advantages(flags, data)
        assert all(row.device == ELSEWHERE for row in data["advantages"])


def test_what_nccl_sends_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda handle: "nccl")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    for rows in (torch.zeros(2, 7), torch.zeros(0, 7), None):
        assert Group(0, 2, object()).device_like(rows) == torch.device("cuda", 3)
