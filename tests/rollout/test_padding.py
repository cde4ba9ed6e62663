"""Padding makes every optimizer step fit slime's schedule of micro-batches, and changes nothing
that is trained."""

import asyncio
import copy
import math
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from advantage.hook import compute_advantages
from advantage.turn_table import TurnKind, decode_row
from rollout.bridge.roles import samples_multiple
from rollout.samples import convert_samples_to_train_data
from tests.fixtures.checkouts import CHECKOUTS, checkout_or_skip
from tests.fixtures.playing import flat, playing

STEP, TURNS, BATCHES = 16, 48, 3
Played = tuple[Namespace, list[list[Any]]]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Flags, and the samples of batches whose steps have any number of bootstrap samples."""

    async def play() -> Played:
        sizes = {"rollout_batch_size": TURNS, "global_batch_size": STEP, "n_env": 8, "save": None}
        env = {"max_length": 9, "show": 200}
        async with playing(tmp_path_factory.mktemp("played"), **sizes, env=env) as run:
            return run.args, [flat(await run.batch(k)) for k in range(BATCHES)]

    return asyncio.run(play())


@pytest.fixture
def played(batches: Played) -> Played:
    """The same, with samples that a test may change."""
    args, samples = batches
    return args, [[copy.copy(sample) for sample in batch] for batch in samples]


def on(args: Namespace, **layout: Any) -> Namespace:
    """The flags of a run on so many GPUs."""
    return Namespace(**{**vars(args), "actor_num_nodes": 1, "actor_num_gpus_per_node": 1, **layout})


@pytest.fixture(params=list(CHECKOUTS))
def build_dp_schedule(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """slime's own function; slime is gone from this process afterwards."""
    checkout = checkout_or_skip(request.param)
    before = set(sys.modules)
    sys.path.insert(0, str(checkout))
    try:
        from slime.utils.dp_schedule import build_dp_schedule as function

        yield function
    finally:
        sys.path.remove(str(checkout))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "slime":
                del sys.modules[name]


def schedule(
    build: Callable[..., Any], data: dict[str, Any], cap: int, dp: int, cp: int = 1, group: int = 0
) -> Any:
    """What slime makes of a batch; `group` is the group of micro-batches of an interleaved
    pipeline, 0 without one."""
    flags = Namespace(
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=cap,
        balance_by_flops=False,
        balance_data=False,
    )
    layout = {"dp_size": dp, "cp_size": cp, "vpp_size": 2 if group else 1}
    layout["microbatch_group_size_per_vp_stage"] = group or 1
    lengths = [len(tokens) for tokens in data["tokens"]]
    return build(
        flags, layout, lengths, global_batch_size=STEP, rollout_indices=data["rollout_ids"]
    )


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_slimes_schedule_takes_every_batch(
    played: Played, build_dp_schedule: Callable[..., Any], dp: int, cp: int, group: int
) -> None:
    args, batches = played
    pipeline = (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        if group
        else {}
    )
    layout = on(
        args,
        actor_num_gpus_per_node=dp * cp * (2 if group else 1),
        context_parallel_size=cp,
        **pipeline,
    )
    for samples in batches:
        data = convert_samples_to_train_data(layout, samples)
        longest = max(len(sample.tokens) for sample in samples)
        for cap in (longest // 2, longest, longest + 1, 2 * longest, 4 * longest):
            partitions, _, _, groups = schedule(
                build_dp_schedule, data, -(-cap // cp), dp, cp, group
            )
            assert groups == [STEP] * (TURNS // STEP)
            assert sorted(place for rank in partitions for place in rank) == list(
                range(len(data["tokens"]))
            )


def test_padding_changes_neither_groups_nor_steps_nor_advantages_nor_the_mean_reward(
    played: Played,
) -> None:
    args, batches = played
    padded = 0
    for samples in batches:
        plain = convert_samples_to_train_data(on(args, actor_num_gpus_per_node=1), samples)
        data = convert_samples_to_train_data(on(args, actor_num_gpus_per_node=8), samples)
        count, total = len(samples), len(data["tokens"])
        padded += total - count
        assert all(len(column) == total for column in data.values())
        for key, column in plain.items():
            assert list(map(plain_of, column)) == list(map(plain_of, data[key]))[: len(column)], key
        assert list(dict.fromkeys(data["rollout_ids"])) == list(dict.fromkeys(plain["rollout_ids"]))
        assert data["sample_indices"][count:] == [-1] * (total - count)
        assert all(mask.tolist() == [0] for mask in data["loss_masks"][count:])
        assert {len(tokens) for tokens in data["tokens"][count:]} <= {2}
        assert math.isclose(
            sum(data["raw_reward"]) / total, sum(plain["raw_reward"]) / count, rel_tol=1e-12
        )
        rows = [decode_row(vector) for vector in data["prompt"]]
        assert all(row.kind is TurnKind.BOOTSTRAP for row in rows[count:])
        segments = [row.segment for row in rows[count:]]
        assert len(set(segments)) == len(segments) and not {
            row.segment for row in rows[:count]
        } & set(segments)
        for got, wanted in zip(advantages(data), advantages(plain), strict=False):
            assert torch.equal(got, wanted)
    assert padded


def plain_of(value: Any) -> Any:
    """An array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value


def advantages(data: dict[str, Any]) -> list[torch.Tensor]:
    lengths = data["response_lengths"]
    values = [torch.linspace(0, 1, length) for length in lengths]
    rollout_data = {
        "values": values,
        "kl": [torch.zeros(length) for length in lengths],
        "prompt": data["prompt"],
    }
    rollout_data |= {"loss_masks": [torch.as_tensor(mask).int() for mask in data["loss_masks"]]}
    rollout_data |= {
        "response_lengths": lengths,
        "total_lengths": [len(tokens) for tokens in data["tokens"]],
    }
    compute_advantages(Namespace(), rollout_data)
    return rollout_data["advantages"]


@pytest.mark.parametrize("seed", range(8))
def test_any_groups_fill_every_step_to_a_multiple(played: Played, seed: int) -> None:
    """Samples of whole episodes: groups of any size, whose members need not lie side by side."""
    args, batches = played
    rng = random.Random(seed)
    samples, ranks, step = (
        list(batches[0]),
        rng.choice([2, 3, 4, 8, 16]),
        rng.choice([1, 2, 3, 5, 8]),
    )
    groups = rng.randint(step, 20)
    for place, sample in enumerate(samples):
        sample.rollout_id = place if place < groups else rng.randrange(groups)
    data = convert_samples_to_train_data(
        on(args, actor_num_gpus_per_node=ranks, global_batch_size=step), samples
    )
    ids, counts = list(dict.fromkeys(data["rollout_ids"])), Counter(data["rollout_ids"])
    assert ids == list(range(groups))
    for end in range(step, groups + 1, step):
        assert sum(counts[group] for group in ids[end - step : end]) % ranks == 0
    dropped = set(ids[groups - groups % step :])
    added = data["rollout_ids"][len(samples) :]
    assert not dropped & set(added) and len(added) < ranks * (groups // step)


PIPELINE = {"actor_num_gpus_per_node": 8, "pipeline_model_parallel_size": 4}


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}, 16),
        (
            {
                "actor_num_gpus_per_node": 8,
                "tensor_model_parallel_size": 2,
                "context_parallel_size": 2,
            },
            2,
        ),
        ({**PIPELINE, "virtual_pipeline_model_parallel_size": 2}, 8),
        (
            {
                **PIPELINE,
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 5,
            },
            10,
        ),
    ],
)
def test_the_multiple_follows_from_the_layout_of_the_gpus(
    layout: dict[str, int], multiple: int
) -> None:
    assert samples_multiple(on(Namespace(global_batch_size=64), **layout)) == multiple
