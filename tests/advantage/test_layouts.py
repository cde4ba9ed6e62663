"""Every parallel layout gives the single-process result, over real Megatron process groups (gloo,
four processes)."""

import os
import random
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from advantage import hook
from advantage.critic import Progress
from advantage.errors import OtherRankError
from advantage.exchange import Group, Layout, current_layout
from advantage.hook import compute_advantages
from advantage.kl_split import log_kl_split, split_kl
from advantage.packing import PackedTurns, local_tokens
from advantage.saved_critic import fingerprint
from advantage.settings import KL_SPLIT, ROLE, ValuePretrainingSettings
from advantage.training.losses import whiten
from advantage.turn_table import read_columns
from advantage.values import take_metrics
from tests.advantage.batches import (
    FakeSample,
    check_rows,
    expected,
    make_args,
    make_samples,
    rollout_data,
    turn,
)
from tests.advantage.test_group import check_ranks_share
from tests.advantage.test_pretraining import collected
from tests.fixtures.warm_python import WARM

WORLD = 4
LAYOUTS = {
    "dp4": {},
    "dp2 tp2": {"tensor_model_parallel_size": 2},
    "dp2 pp2": {"pipeline_model_parallel_size": 2},
    "dp2 cp2": {"context_parallel_size": 2},
    "dp1 cp4": {"context_parallel_size": 4},
    "dp1 tp2 cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "dp1 pp2 cp2": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
}
CASES = 4
STEPS = {
    "read": (hook, "read_turn_table"),
    "prepare": (hook, "solve_inside"),
    "finish": (PackedTurns, "put"),
}
"""What the hook calls before anything crosses ranks, between the exchanges, and after them."""


def test_a_single_process_needs_no_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert current_layout() == Layout()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four processes saw: layout (and check) to None or the text of what went
    wrong."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[embedded]'")
    folder = tmp_path_factory.mktemp("layouts")
    mp.start_processes(_worker, args=(str(folder),), nprocs=WORLD, start_method=WARM)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def check_ranks(outcomes: list[dict[Any, Any]], key: Any) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[key] is None, f"rank {rank}: {outcome[key]}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["advantages", "measurements"])
def test_random_sharding_gives_the_single_process_result(
    outcomes: list[dict[str, Any]], layout: str, what: str
) -> None:
    check_ranks(outcomes, (layout, what))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", STEPS)
def test_any_error_on_any_one_rank_stops_every_rank_of_its_stage(
    outcomes: list[dict[str, Any]], layout: str, where: str
) -> None:
    check_ranks(outcomes, (layout, where))


def test_group_estimators_give_the_single_process_result(outcomes: list[dict[str, Any]]) -> None:
    check_ranks(outcomes, "groups")


def test_the_traffic_does_not_grow_with_the_tokens(outcomes: list[dict[str, Any]]) -> None:
    """The number of turns, eight numbers per turn, and at the end whether the rank failed."""
    for outcome in outcomes:
        short, long = outcome["bytes"]
        assert short == long == [8, 10 * 8 * 8, 8]


def _worker(rank: int, folder: str) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    outcome: dict[Any, Any] = {}
    checks = {
        "advantages": lambda: [_check_case(seed) for seed in range(CASES)],
        "measurements": lambda: [_check_measured(seed) for seed in range(3)],
        **{where: partial(_check_any_error, where) for where in STEPS},
    }
    for name, sizes in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**sizes)
        for what, check in checks.items():
            outcome[name, what] = _text_of(check)
        if name == "dp4":
            outcome["groups"] = _text_of(lambda: check_ranks_share(rank, WORLD))
            outcome["bytes"] = [_bytes_of(tokens) for tokens in (2, 200)]
        parallel_state.destroy_model_parallel()
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _text_of(check: Any) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def _shard(
    samples: list[FakeSample], layout: Layout, seed: int
) -> tuple[list[int], dict[str, Any]]:
    """This rank's samples (positions and rollout data), sliced over context parallelism."""
    rng = random.Random(1000 + seed)
    owners = rng.sample(range(layout.data.size), rng.randint(1, layout.data.size))
    owner = [rng.choice(owners) for _ in samples]
    mine = [i for i in range(len(samples)) if owner[i] == layout.data.rank]
    data = rollout_data([samples[i] for i in mine])
    for key in ("values", "kl"):
        data[key] = sliced(data[key], data, layout)
    return mine, data


def sliced(rows: list[torch.Tensor], data: dict[str, Any], layout: Layout) -> list[torch.Tensor]:
    """This rank's slice of every row."""
    return local_tokens(data, layout).split(torch.cat([*rows, torch.zeros(0)])) if rows else []


def _check_case(seed: int) -> None:
    rng = random.Random(seed)
    discounts = dict(gamma_token=rng.choice([1.0, 0.9]), lambda_token=rng.choice([1.0, 0.8]))
    args = make_args(**discounts, rollout_data_postprocess_path=KL_SPLIT)
    samples = make_samples(rng, rng.randint(1, 9))
    layout = current_layout()
    mine, data = _shard(samples, layout, seed)
    if not layout.last_stage:
        del data["values"], data["kl"]
        compute_advantages(args, data)
        before = set(data) - {"prompt"}
        log_kl_split(args, 0, data)
        assert set(data) == before and "advantages" not in before
        return
    compute_advantages(args, data)
    whole = expected(samples, args)
    for k, key in enumerate(("advantages", "returns")):
        check_rows(data[key], sliced([whole[i][k] for i in mine], data, layout))
    _check_whitening(samples, mine, data, [advantages for advantages, _ in whole])
    log_kl_split(args, 0, data)
    alone = rollout_data(samples)
    columns = read_columns(alone["prompt"], alone["response_lengths"])
    wanted = split_kl(columns, alone, alone["kl"], Layout())
    assert {f"kl_{kind}" for kind in wanted} == {key for key in data if key.startswith("kl_")}
    for kind, mean in wanted.items():
        assert data[f"kl_{kind}"].item() == pytest.approx(mean, abs=1e-6)


def _check_whitening(
    samples: list[FakeSample], mine: list[int], data: dict[str, Any], raw: list
) -> None:
    """Over all data- and context-parallel ranks, those without a token included."""
    layout = current_layout()
    everywhere = torch.cat(
        [a[torch.tensor(s.mask).bool()] for a, s in zip(raw, samples, strict=True)]
    )
    if everywhere.numel() < 2:
        return
    masks = sliced(data["loss_masks"], data, layout)
    white = whiten(data["advantages"], masks, layout.data_context)
    for got, want in zip(white, sliced([raw[i] for i in mine], data, layout), strict=True):
        wanted = (want - everywhere.mean()) / (everywhere.var() + 1e-8).sqrt()
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


def _check_any_error(where: str) -> None:
    """Each rank in turn meets an error that no check foresaw, as running out of memory would be."""
    layout = current_layout()
    _, data = _shard(make_samples(random.Random(1), 6), layout, 0)
    if not layout.last_stage:
        return
    for rank in range(layout.stage.size):
        fails = rank == layout.stage.rank
        broken = patch.object(*STEPS[where], side_effect=MemoryError(f"{where} failed here"))
        try:
            with broken if fails else nullcontext():
                compute_advantages(make_args(), dict(data))
        except (MemoryError, OtherRankError) as error:
            assert isinstance(error, MemoryError) == fails, (
                f"rank {layout.stage.rank} raised {error!r}"
            )
        else:
            raise AssertionError(f"rank {layout.stage.rank} went on")


def _check_measured(seed: int) -> None:
    """Held-out explained variance, with the KL in place of the returns."""
    samples, layout, settings = (
        collected(seed),
        current_layout(),
        ValuePretrainingSettings(batches=1),
    )
    _, data = _shard(samples, layout, seed)
    alone, here, whole = Progress(), Progress(), rollout_data(samples)
    alone.begin_pass(settings, {**whole, "returns": whole["kl"]}, [], Layout())
    here.begin_pass(settings, {**data, "returns": data["kl"]}, [], layout)
    assert here.explained == pytest.approx(alone.explained, abs=1e-9)
    _check_metrics(whole, data, layout)
    if layout.pipeline.size == 1:
        fails = layout.stage.rank == 0
        with pytest.raises(KeyError if fails else OtherRankError):
            here.begin_pass(
                settings, data if fails else {**data, "returns": data["kl"]}, [], layout
            )


def _check_metrics(whole: dict[str, Any], data: dict[str, Any], layout: Layout) -> None:
    """Each role's numbers on new turns, and the fingerprint of the turns, are those of one
    process."""
    ranks = {**data, "tokens": [torch.arange(n) for n in data["total_lengths"]]}
    alone = {**whole, "tokens": [torch.arange(n) for n in whole["total_lengths"]]}
    assert fingerprint(ranks, layout) == fingerprint(alone, Layout())
    found = [_metrics_of(role, ranks) for role in ("critic", "actor")]
    with patch.object(hook, "current_layout", Layout):
        wanted = [_metrics_of(role, alone) for role in ("critic", "actor")]
    if layout.last_stage:
        assert found == [pytest.approx(metrics, abs=1e-5) for metrics in wanted]
        assert [len(metrics) for metrics in found] == [10, 5]


def _metrics_of(role: str, data: dict[str, Any]) -> dict[str, float]:
    """What the hook measures of the critic, or of notes."""
    data = dict(data)
    args = make_args(kl_coef=0.0, **{ROLE: role}, value_loss="hl_gauss", value_range=[-1.0, 1.0])
    compute_advantages(args, data)
    notes = {
        name: float(number)
        for name, number in data.items()
        if name.startswith(("summary_", "turn_"))
    }
    return take_metrics(data) | notes


def _bytes_of(tokens: int) -> list[int]:
    """Bytes that this rank gives to each gather, for ten turns on every rank, each of so many
    tokens."""
    rank = current_layout().data.rank
    samples = [turn(10 * rank + k, 0, [0.0] * tokens, terminated=True) for k in range(10)]
    sent, gather = [], Group.all_gather

    def counted(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
        sent.append(x.numel() * x.element_size())
        return gather(group, x)

    with patch.object(Group, "all_gather", counted):
        compute_advantages(make_args(), rollout_data(samples))
    return sent
