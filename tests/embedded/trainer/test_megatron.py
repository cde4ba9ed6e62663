"""Megatron-core's models compute what the Hugging Face models compute, and weights survive the way
there and back."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from embedded.trainer.layers import shared
from embedded.trainer.megatron import Adam, build_model, initialize, megatron_to_hf, predict
from embedded.warmstart.policy import save_policy
from rollout.errors import ConfigError
from tests.embedded.conftest import SHAPE, SHAPES, model_of_shape, trainer_args


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers_and_weights_come_back_as_they_went(
    shape: str, tokenizer: Any, tmp_path: Path
) -> None:
    save_policy(model_of_shape(shape, tokenizer), tokenizer, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = build_model(tmp_path, initialize())
    ids = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = hf(ids).logits
        rows, columns = torch.cartesian_prod(torch.arange(3), torch.arange(40)).T
        assert torch.allclose(
            predict(model, ids, rows, columns).view(wanted.shape), wanted, atol=2e-5
        )
        row, column = torch.tensor([2, 0, 0]), torch.tensor([39, 0, 17])
        assert torch.allclose(predict(model, ids, row, column), wanted[row, column], atol=2e-5)
    back, given = megatron_to_hf(model.state_dict(), hf.config), hf.state_dict()
    assert set(given) - set(back) <= {"lm_head.weight"}
    assert set(given) == set(back) or hf.config.tie_word_embeddings
    assert all(torch.equal(back[name], given[name]) for name in back)


@pytest.mark.parametrize("rows", [2, 9, 40])
def test_rows_that_begin_alike_have_the_outputs_and_gradients_of_rows_alone(
    policy_folder: Path, rows: int
) -> None:
    model, random = build_model(policy_folder, initialize()), torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 3, (rows, 12), generator=random)
    ids[: rows // 2] = ids[0]
    lengths = torch.randint(2, 13, (rows,), generator=random)
    row = torch.repeat_interleave(torch.arange(rows), 2)
    column = torch.stack([lengths - 2, lengths - 1], 1).view(-1)
    weights = torch.randn(len(row), 384, generator=random)[:, : model.vocab_size]
    rank = torch.randperm(len(row), generator=random)

    together = predict(model, ids, row[rank], column[rank])
    (together * weights[rank]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for i in range(rows):
        alone = predict(
            model, ids[i : i + 1, : lengths[i]], torch.zeros(2, dtype=torch.long), column[row == i]
        )
        assert torch.allclose(alone, together[torch.argsort(rank)][row == i], atol=1e-5)
        (alone * weights[row == i]).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.allclose(
            p.grad, gradients[name], rtol=1e-3, atol=1e-4 * rows
        ), name


def test_tokens_of_equal_beginnings_are_packed_once() -> None:
    ids = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 3, 9], [6, 2, 3, 0], [1, 2, 4, 5]])
    packed, places, row_of = shared(ids, torch.tensor([3, 4, 3, 2, 2]))
    assert sorted(packed.tolist()) == [1, 2, 2, 3, 4, 5, 6]
    for i, length in enumerate([3, 4, 3, 2, 2]):
        assert torch.equal(packed[places.tokens[row_of[i], :length]], ids[i, :length])
    assert torch.equal(places.tokens[places.row, places.column], torch.arange(7))


def test_a_critic_starts_at_zero_and_shares_nothing_with_the_actor(policy_folder: Path) -> None:
    device = initialize()
    actor, critic = (
        build_model(policy_folder, device),
        build_model(policy_folder, device, critic=True),
    )
    ids = torch.randint(0, 300, (2, 12))
    with torch.no_grad():
        values = predict(critic, ids, torch.tensor([0, 1]), torch.tensor([5, 11]))
    assert values.shape == (2, 1) and torch.equal(values, torch.zeros(2, 1))
    assert not {p.data_ptr() for p in actor.parameters()} & {
        p.data_ptr() for p in critic.parameters()
    }


def test_gradients_are_clipped_to_the_norm_asked_for(policy_folder: Path) -> None:
    model = build_model(policy_folder, initialize())
    optimizer = Adam(model, trainer_args(clip_grad=0.5), lr=1e-3, samples=8)
    ids = torch.randint(0, 300, (2, 12))
    (predict(model, ids, torch.tensor([0]), torch.tensor([5])).sum() * 100).backward()
    norm = optimizer.clip()
    clipped = (
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    )
    assert norm > 1 and clipped == pytest.approx(0.5, rel=1e-3)


def test_scaled_rotary_embeddings_are_refused_by_name(tokenizer: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    save_policy(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)), tokenizer, tmp_path)
    with pytest.raises(
        ConfigError, match="plain rotary embeddings only, but this model has linear ones"
    ):
        build_model(tmp_path, initialize())
