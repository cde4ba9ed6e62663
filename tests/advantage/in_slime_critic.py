"""Checks of `value_loss: hl_gauss` inside slime, run as a program: `python -m
tests.advantage.in_slime_critic`."""

import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from advantage.exchange import current_layout
from advantage.hl_gauss import HlGauss
from advantage.packing import local_tokens
from tests.advantage.image_critic import build, vl_args, without_cuda
from tests.fixtures.inside_slime import installed, megatron, micro_batch, report, slime_args, start
from tests.fixtures.stand_ins import allow_absent_packages

BINS = 11
HEAD = HlGauss(-0.5, 1.5, BINS, 0.75)
KEYS = {"value_loss": "hl_gauss", "value_bins": BINS, "value_range": [-0.5, 1.5]}
MASKS = [
    torch.tensor([1, 1, 1, 1, 1]),
    torch.tensor([0, 1, 1, 0, 1, 1]),
    torch.tensor([0]),
    torch.tensor([1]),
]
PROMPTS = [3, 4, 2, 6]
WEIGHT, STEP = 3.0, 4


def head_args(**changes: Any) -> Namespace:
    flags: dict[str, Any] = {
        "loss_type": "value_loss",
        "recompute_loss_function": False,
        "rollout_temperature": 0.7,
    }
    return slime_args(
        **{
            **flags,
            **KEYS,
            "value_first_token_weight": WEIGHT,
            "calculate_per_token_loss": False,
            **changes,
        }
    )


def whole_batch() -> tuple[dict[str, Any], torch.Tensor]:
    """A micro-batch of all ranks, and its logits, laid end to end."""
    generator = torch.Generator().manual_seed(5)
    returns = [torch.randn(len(mask), generator=generator) for mask in MASKS]
    batch = micro_batch(MASKS, PROMPTS, returns=returns)
    return batch, torch.randn(sum(batch["total_lengths"]), BINS, generator=generator)


def expected(
    batch: dict[str, Any], logits: torch.Tensor, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient in float64, one token at a time; each sample is a training
    group."""
    rows = logits.double().detach().requires_grad_()
    terms, start = [], 0
    for prompt, mask, returns in zip(PROMPTS, MASKS, batch["returns"], strict=True):
        trained = mask.tolist()
        for j, is_trained in enumerate(trained):
            if is_trained:
                weight = 1.0 if j and trained[j - 1] else WEIGHT
                share = 1.0 if per_token else 1 / sum(trained) / STEP
                terms.append(
                    weight * share * HEAD.loss(rows[start + prompt - 1 + j], returns[j].double())
                )
        start += prompt + len(mask)
    loss = torch.stack(terms).sum()
    loss.backward()
    return loss.detach(), rows.grad


def loss_of_rank(args: Namespace) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """slime's loss on this context-parallel rank's slices, the gradient of the whole logits, and
    the rank's values."""
    batch, logits = whole_batch()
    whole = logits.clone().requires_grad_()
    slice_of_rank = megatron("cp_utils").slice_with_cp
    own_logits = torch.cat(
        [slice_of_rank(rows, 0.0) for rows in whole.split(batch["total_lengths"])]
    )[None]
    own, layout = dict(batch), current_layout()
    for name in ("values", "returns"):
        own[name] = local_tokens(batch, layout).split(torch.cat(batch[name]))
    loss, _, _ = megatron("model").loss_function(args, own, 1, STEP, own_logits)
    loss.backward()
    columns = {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, values = megatron("actor").get_values(own_logits.detach(), args=args, **columns)
    return loss.detach(), whole.grad, values["values"]


def loss_gradient_and_values_are_those_of_a_float64_reference() -> None:
    """Every rank adds up what all ranks got, and compares it with one process in float64."""
    batch, logits = whole_batch()
    ranks = dist.get_world_size()
    for per_token in (False, True):
        args = head_args(calculate_per_token_loss=per_token, context_parallel_size=ranks)
        with installed(args):
            loss, gradient, values = loss_of_rank(args)
        wanted, wanted_gradient = expected(batch, logits, per_token)
        for x in (loss, gradient):
            dist.all_reduce(x)
            x /= ranks  # Megatron takes the mean over ranks, and slime multiplies the loss for it
        torch.testing.assert_close(loss.double(), wanted, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient.double(), wanted_gradient, atol=1e-6, rtol=1e-5)
        rows = logits.split(batch["total_lengths"])
        means = [
            HEAD.expectation(row[prompt - 1 : -1].double())
            for row, prompt in zip(rows, PROMPTS, strict=True)
        ]
        slices = local_tokens(batch, current_layout()).split(torch.cat(means))
        for found, want in zip(values, slices, strict=True):
            assert found.dtype == torch.float32 and found.dim() == 1
            torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=0)


def they_are_with_context_parallelism_over_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, folder]
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
        said = [process.communicate(timeout=300)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], said


def one_of_two_ranks(folder: str, rank: int) -> None:
    allow_absent_packages()
    from megatron.core import parallel_state

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder) / "store"), 2), rank=rank, world_size=2
    )
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    megatron("actor")
    loss_gradient_and_values_are_those_of_a_float64_reference()
    dist.destroy_process_group()


def a_micro_batch_without_tokens_reaches_the_backward_pass() -> None:
    args = head_args()
    batch = {key: column[2:3] for key, column in whole_batch()[0].items()}
    logits = torch.zeros(1, 3, BINS, requires_grad=True)
    with installed(args):
        loss, _, _ = megatron("model").loss_function(args, batch, 1, STEP, logits)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


def slime_builds_the_head_which_starts_at_zero_and_multiplies_in_float32() -> None:
    args = vl_args(**KEYS)
    with installed(args):
        actor, critic = build(args, "actor"), build(args, "critic")
        head = critic.language_model.output_layer
        assert (
            actor.language_model.output_layer.weight.shape[0] != BINS
            and head.weight.shape[0] == BINS
        )
        hidden = torch.randn(1, 3, head.weight.shape[1], dtype=torch.bfloat16)
        head.bfloat16()
        logits = head(hidden)[0].detach()
        assert logits.dtype == torch.float32 and float(HEAD.expectation(logits).abs().max()) < 0.01
        head.weight.data.normal_()
        exact = hidden.double() @ head.weight.double().T + head.bias.double()
        torch.testing.assert_close(head(hidden)[0].double(), exact, atol=1e-4, rtol=0)
    with installed(vl_args()):
        assert build(vl_args(), "critic").language_model.output_layer.weight.shape[0] == 1


CHECKS = [
    loss_gradient_and_values_are_those_of_a_float64_reference,
    they_are_with_context_parallelism_over_two_ranks,
    a_micro_batch_without_tokens_reaches_the_backward_pass,
    slime_builds_the_head_which_starts_at_zero_and_multiplies_in_float32,
]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_of_two_ranks(sys.argv[1], int(sys.argv[2]))
    else:
        start()
        without_cuda()
        report(CHECKS)
