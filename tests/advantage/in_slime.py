"""Checks inside slime, run as a program with slime on PYTHONPATH: `python -m
tests.advantage.in_slime`."""

import importlib
import inspect
import itertools
import random
from argparse import Namespace
from typing import Any
from unittest.mock import patch as mock_patch

import torch

from tests.fixtures.inside_slime import (
    installed,
    log,
    megatron,
    micro_batch,
    report,
    slime_args,
    start,
    uninstall,
)


class Engine:
    """Records the calls of an engine's actor."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return Namespace(remote=lambda *arguments, **named: self.calls.append((name, *arguments)))


def responses_in_flight_survive_new_weights() -> None:
    args = slime_args(
        on_update="continue", update_weight_transport="nccl", update_weight_mode="full"
    )
    pushing = megatron("update_weight.update_weight_from_distributed")
    updater = object.__new__(pushing.UpdateWeightFromDistributed)
    updater.weight_version, updater.quantization_config, engine = 0, None, Engine()
    alone = dict(get_data_parallel_rank=lambda **_: 1, get_pipeline_model_parallel_rank=lambda: 0)
    quiet = dict(barrier=lambda **_: None, get_rank=lambda: 0)
    with (
        installed(args),
        mock_patch.object(pushing, "mpu", Namespace(**alone)),
        mock_patch.object(pushing, "dist", Namespace(**quiet)),
        mock_patch.object(pushing, "ray", Namespace(get=list)),
        mock_patch.object(pushing, "get_gloo_group", lambda: None),
        mock_patch.object(updater, "_send_weights", lambda bar: None, create=True),
    ):
        updater.connect_rollout_engines([engine], None)
        updater.update_weights()
    pause = "_make_request", "pause_generation", {"mode": "retract"}
    assert engine.calls == [pause, ("flush_cache",), ("continue_generation",)], engine.calls


def mixed_batch(empty: int) -> dict[str, Any]:
    """A micro-batch of four trained turns and `empty` samples without trained tokens, all of them
    in one group."""
    masks = [torch.tensor([1, 1, 1]), torch.tensor([0, 1, 1, 0, 0, 1]), torch.tensor([1])] + [
        torch.tensor([0])
    ] * empty
    returns = [torch.arange(len(mask)) + 2.0 for mask in masks]
    sums = torch.full((len(masks),), 7.0)
    return micro_batch(masks, [1] * len(masks), returns=returns, rollout_mask_sums=sums)


def loss_of(args: Namespace, empty: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the trained samples' logits, slime's count of tokens, and its metrics'
    values."""
    batch = mixed_batch(empty)
    logits = torch.zeros(1, sum(batch["total_lengths"]), 1, requires_grad=True)
    loss, count, logged = megatron("model").loss_function(args, batch, 1, 4, logits)
    loss.backward()
    return logits.grad.flatten()[:13], torch.as_tensor(count), logged["values"]


VALUE_LOSS = {
    "loss_type": "value_loss",
    "recompute_loss_function": False,
    "rollout_temperature": 1.0,
}


def samples_without_trained_tokens_change_neither_gradients_nor_metrics() -> None:
    for per_token in (True, False):
        args = slime_args(
            calculate_per_token_loss=per_token, value_first_token_weight=3.0, **VALUE_LOSS
        )
        with installed(args):
            alone, beside = loss_of(args, 0), loss_of(args, 5)
            for without, with_empty in zip(alone, beside, strict=True):
                assert torch.equal(without, with_empty), (per_token, without, with_empty)
        assert alone[0].abs().sum() > 0 and alone[1] == (7 if per_token else 1)


def a_micro_batch_without_trained_tokens_counts_as_nothing_and_divides_no_metric_by_zero() -> None:
    model = megatron("model")
    args = slime_args(calculate_per_token_loss=True, **VALUE_LOSS)
    batch = {key: column[3:] for key, column in mixed_batch(2).items()}
    with installed(args):
        _, count, logged = model.loss_function(
            args, batch, 1, 4, torch.zeros(1, 4, 1, requires_grad=True)
        )
        usual = loss_of(args, 0)[2]
    assert count == 0 and logged["values"][0] > 0
    assert torch.equal(usual + logged["values"], usual)


POLICY_LOSS = {
    **{
        "loss_type": "policy_loss",
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "recompute_loss_function": False,
    },
    **{
        "log_probs_chunk_size": -1,
        "use_rollout_entropy": False,
        "use_unbiased_kl": False,
        "use_opsm": False,
    },
    **{
        "get_mismatch_metrics": False,
        "custom_tis_function_path": None,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
    },
    **{
        "custom_pg_loss_reducer_function_path": None,
        "entropy_coef": 0.01,
        "value_first_token_weight": 3.0,
    },
    **{
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "eps_clip_c": 3.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.1,
    },
    **{"use_tis": False, "global_batch_size": 12},
}
LOSSES = (
    {"loss_type": "value_loss"},
    {},
    {"use_tis": True},
    {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_coef": 0.0},
    {
        "policy_loss": "dis",
        "use_rollout_logprobs": True,
        "eps_clip": 0.3,
        "eps_clip_high": 5.0,
        "eps_clip_c": None,
    },
)


def chains_have_the_losses_and_gradients_of_a_sample_per_turn() -> None:
    from tests.fixtures.conversations import conversations, train_data

    stale = [k % 3 for k in range(12)]
    for number, (loss, per_token) in enumerate(itertools.product(LOSSES, (True, False))):
        args = slime_args(**{**POLICY_LOSS, **loss}, calculate_per_token_loss=per_token)
        segments, groups = conversations(random.Random(number), 3, 12)
        data = [
            train_data(args, segments, groups, stale, chains=chains) for chains in (False, True)
        ]
        with installed(args):
            alone, joined = (conversation_loss(args, batch) for batch in data)
        for one, other in zip(alone, joined, strict=True):
            torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-5, msg=str((loss, per_token)))
        assert alone[0].abs().max() > 1e-4, loss


def conversation_loss(args: Namespace, data: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The gradient of a causal model's weights under slime's loss of one step, its count, and its
    metrics."""
    from tests.fixtures.conversations import VOCABULARY

    weights = torch.Generator().manual_seed(3)
    table = torch.randn(VOCABULARY, 8, generator=weights)
    outputs = 1 if args.loss_type == "value_loss" else VOCABULARY
    head = torch.randn(8, outputs, generator=weights).requires_grad_()
    tokens = [torch.as_tensor(row).long() for row in data["tokens"]]
    hidden = [torch.tanh(table[row].cumsum(0) / 3) for row in tokens]
    lengths = data["response_lengths"]
    state = [rows[-n - 1 : -1] for rows, n in zip(hidden, lengths, strict=True)]
    batch: dict[str, Any] = {
        "unconcat_tokens": tokens,
        "total_lengths": [len(row) for row in tokens],
        "response_lengths": lengths,
        "loss_masks": [torch.as_tensor(mask).int() for mask in data["loss_masks"]],
        "rollout_mask_sums": torch.tensor(data["rollout_mask_sums"], dtype=torch.float32),
        "rollout_log_probs": [torch.as_tensor(row) for row in data["rollout_log_probs"]],
    }
    columns = ("values", "returns", "advantages", "log_probs", "ref_log_probs")
    batch |= {
        name: [rows[:, k] - 0.5 * (k > 2) for rows in state] for k, name in enumerate(columns)
    }
    logits = torch.cat(hidden)[None] @ head
    loss, count, logged = megatron("model").loss_function(args, batch, 1, 12, logits)
    loss.backward()
    return head.grad, torch.as_tensor(count), logged["values"].float()


def padding_is_in_no_mean_of_slimes_logger() -> None:
    from tests.advantage.batches import make_samples, rollout_data

    args = slime_args()
    data = rollout_data(make_samples(random.Random(3), 4))
    size = len(data["loss_masks"])
    del data["prompt"]
    numbers = list(range(size))
    data |= {
        "advantages": data["values"],
        "rewards": [float(k) for k in numbers],
        "truncated": [1] * size,
    }
    data |= {"round_number": numbers, "sample_indices": numbers}
    data["rollout_mask_sums"] = [mask.sum() for mask in data["loss_masks"]]
    one = torch.tensor([7.0])
    padding = {
        "response_lengths": 1,
        "total_lengths": 2,
        "rewards": 0.0,
        "truncated": 0,
        "round_number": 0,
    }
    padding |= {
        "sample_indices": -1,
        "loss_masks": torch.tensor([0]),
        "rollout_mask_sums": torch.tensor(5),
    }
    padding |= {"values": one, "kl": one, "advantages": one}
    only = {key: [padding[key]] * 3 for key in data}

    def logged(columns: dict[str, Any]) -> dict[str, Any]:
        sums = torch.stack(columns["rollout_mask_sums"]).float()
        return log(args, {**columns, "rollout_mask_sums": sums, "global_batch_sizes": [size]})

    with installed(args):
        wanted, nothing = logged(data), logged(only)
        assert wanted == logged({key: [*column, *only[key]] for key, column in data.items()})
    assert wanted["rewards"] == (sum(data["rewards"]), size)
    assert nothing.keys() == wanted.keys() and nothing["rewards"] == (0.0, 1)


def the_model_gets_the_actors_weights_back_after_another_checkpoint() -> None:
    actor = megatron("actor")
    weight, home = torch.zeros(2), importlib.import_module("slime.utils.tensor_backper")
    with (
        mock_patch.object(home, "accelerator", Namespace(synchronize=lambda: None), create=True),
        mock_patch.object(torch.cuda, "synchronize", lambda *_: None),
        installed(
            slime_args(advantage_estimator="grpo", custom_advantage_function_path="mine.advantages")
        ),
        mock_patch.object(torch, "empty_like", lambda x, **_: x.clone()),
    ):
        copies = actor.TensorBackuper.create(
            source_getter=lambda: [("weight", weight)], single_tag=None
        )
        copies.backup("actor")
        for tag, value in (("ref", 1.0), ("teacher", 2.0)):
            weight.fill_(value)
            copies.backup(tag)
            assert weight.tolist() == [0.0, 0.0] and copies.get(tag)["weight"].tolist() == [
                value,
                value,
            ]
        weight.fill_(3.0)
        copies.backup("actor")
        assert weight.tolist() == [3.0, 3.0]


def without_a_critic_the_given_advantages_stay_and_the_alarm_watches_with_and_without_the_patch() -> (
    None
):
    from advantage.group import compute_advantages
    from advantage.patch.versions import original
    from advantage.turn_table import TurnRow, TurnSpan, encode_row

    model, group = megatron("model"), "advantage.group.compute_advantages"
    args = slime_args(advantage_estimator="grpo", custom_advantage_function_path=group, kl_coef=0.0)
    args.n_samples_per_prompt, args.grpo_std_normalization = 2, False
    row = encode_row(
        TurnRow(segment=0, first_turn=0, terminated=True, turns=(TurnSpan(0, 2, 1.0),))
    )
    data = {
        "loss_masks": [torch.ones(2)],
        "response_lengths": [2],
        "total_lengths": [3],
        "prompt": [row],
    }
    gap = {"train_rollout_logprob_abs_diff": 0.4}
    for patched in (True, False):
        with mock_patch.object(model, "train_one_step", lambda *_: (dict(gap), 1.0)):
            if patched:
                with installed(args):
                    assert args.custom_advantage_function_path == group
                    metrics, _ = model.train_one_step(args, 0)
            else:
                compute_advantages(args, {**data, "kl": [torch.zeros(2)]})
                assert original(model.train_one_step) is not model.train_one_step
                metrics, _ = model.train_one_step(args, 0)
                uninstall()
        assert metrics == {**gap, "off_policy_alarms": 1.0}, metrics


def the_dual_clip_reaches_the_policy_loss() -> None:
    from advantage.patch.versions import original

    with installed(slime_args(eps_clip_c=3.0)):
        compute, caller = (
            megatron("loss").compute_policy_loss,
            megatron("loss").policy_loss_function,
        )
        passes = "eps_clip_c" in original(caller).__code__.co_names
        assert passes or compute.keywords == {"eps_clip_c": 3.0}
        assert "eps_clip_c" in inspect.signature(original(compute)).parameters


def whitening_reaches_over_context_parallelism_or_is_replaced() -> None:
    from advantage.patch.versions import find_slime, original

    args = slime_args(normalize_advantages=True, context_parallel_size=2)
    whitens_all_ranks = find_slime().whitens_all_ranks
    with installed(args):
        function = megatron("loss").compute_advantages_and_returns
        assert whitens_all_ranks or original(function) is not function


def slices_over_context_parallelism_are_slimes_own() -> None:
    from advantage.exchange import Group, Layout
    from advantage.packing import local_tokens

    utils = megatron("cp_utils")
    rng = random.Random(0)
    for _ in range(300):
        size, response = rng.choice([2, 4]), rng.randint(1, 40)
        total = response + rng.randint(1, 40)
        tokens = torch.arange(response).float()
        data = {"total_lengths": [total], "response_lengths": [response]}
        for rank in range(size):
            place = {"get_context_parallel_rank": rank, "get_context_parallel_world_size": size}
            with mock_patch.multiple(
                utils.mpu, **{name: lambda value=value: value for name, value in place.items()}
            ):
                theirs = utils.slice_log_prob_with_cp(tokens, total, response)
            (ours,) = local_tokens(data, Layout(context=Group(rank, size))).split(tokens)
            assert torch.equal(ours, theirs), (total, response, rank, size)


CHECKS = [
    responses_in_flight_survive_new_weights,
    samples_without_trained_tokens_change_neither_gradients_nor_metrics,
    a_micro_batch_without_trained_tokens_counts_as_nothing_and_divides_no_metric_by_zero,
    chains_have_the_losses_and_gradients_of_a_sample_per_turn,
    padding_is_in_no_mean_of_slimes_logger,
    the_model_gets_the_actors_weights_back_after_another_checkpoint,
    without_a_critic_the_given_advantages_stay_and_the_alarm_watches_with_and_without_the_patch,
    the_dual_clip_reaches_the_policy_loss,
    whitening_reaches_over_context_parallelism_or_is_replaced,
    slices_over_context_parallelism_are_slimes_own,
]


if __name__ == "__main__":
    start()
    report(CHECKS)
