"""Estimators without a critic equal their definition, also over sharded batches and for incomplete episodes."""

import random
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from advantage.group import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data
from tests.fixtures.warm_python import WARM

ESTIMATORS = ("grpo", "rloo", "gigpo")
GAMMA = 0.9
WORLD = 2


def sample(row: TurnRow, tokens: int, trained: bool = True) -> FakeSample:
    return FakeSample(row, 3, [int(trained)] * tokens, torch.zeros(tokens), torch.zeros(tokens))


def episodes_of(rng: random.Random, count: int) -> list[list[FakeSample]]:
    """Window samples of whole and cut episodes in three groups; few rewards and anchors, so that many are equal."""
    found = []
    for segment in range(count):
        first = rng.choice([0, 0, 0, 4])
        turns, ending = rng.choice([1, 2, 5]), rng.choice(["terminated", "terminated", "truncated", "cut"])
        group = rng.randrange(3)
        episode = []
        for k in range(turns):
            tokens, last = rng.choice([1, 2, 7]), k == turns - 1
            reward, moves = rng.choice([-0.1, 0.0, 1.0]), rng.random() < 0.8
            span = TurnSpan(0, tokens, reward, anchor=rng.randrange(4) if moves else -1, moves=moves)
            flags = {"terminated": last and ending == "terminated", "truncated": last and ending == "truncated"}
            episode.append(sample(TurnRow(segment, first + k, turns=(span,), group=group, **flags), tokens))
        if ending == "cut":
            episode.append(sample(TurnRow(segment, first + turns, TurnKind.BOOTSTRAP), 1, trained=False))
        found.append(episode)
    return found


def by_definition(
    episodes: list[list[FakeSample]], estimator: str, discount: str = "step"
) -> dict[tuple[int, int], float]:
    """Advantage of every turn, by (segment, turn): loops over groups, exactly as the papers write it."""
    whole: dict[int, list[list[TurnRow]]] = defaultdict(list)
    scores = {}
    for episode in episodes:
        rows = [s.row for s in episode if s.row.kind is TurnKind.TURN]
        scores |= {(row.segment, row.first_turn): 0.0 for row in rows}
        if rows[0].first_turn == 0 and (rows[-1].terminated or rows[-1].truncated):
            whole[rows[0].group].append(rows)

    def to_go(rows: list[TurnRow], gamma: float = GAMMA) -> float:
        moved = list(accumulate((row.turns[0].moves for row in rows[:-1]), initial=0))
        return sum(gamma**n * row.turns[0].reward for n, row in zip(moved, rows, strict=True))

    episode_gamma = 1.0 if estimator == "gigpo" and discount == "step" else GAMMA
    relative = lambda x, others: (x - mean(others)) / (stdev(others) + 1e-6) if len(others) > 1 else 0.0
    for members in whole.values():
        returns = [to_go(rows, episode_gamma) for rows in members]
        states: dict[int, list[float]] = defaultdict(list)
        for rows in members:
            for k, row in enumerate(rows):
                states[row.turns[0].anchor].append(to_go(rows[k:]))
        for i, rows in enumerate(members):
            others = returns[:i] + returns[i + 1 :]
            if estimator == "rloo":
                score = returns[i] - mean(others) if others else 0.0
            else:
                score = relative(returns[i], returns)
            for k, row in enumerate(rows):
                compared = estimator == "gigpo" and row.turns[0].anchor >= 0
                state = relative(to_go(rows[k:]), states[row.turns[0].anchor]) if compared else 0.0
                scores[row.segment, row.first_turn] = score + state
    return scores


def computed(samples: list[FakeSample], estimator: str, **more: Any) -> dict[tuple[int, int], list[float]]:
    data = rollout_data(samples)
    args = make_args(kl_coef=0.0, gamma_step=GAMMA, group_estimator=estimator, n_samples_per_prompt=4, **more)
    compute_advantages(args, data)
    rows = zip(samples, data["advantages"], strict=True)
    return {(s.row.segment, s.row.first_turn): row.tolist() for s, row in rows if s.row.kind is TurnKind.TURN}


def check(found: dict[tuple[int, int], list[float]], wanted: dict[tuple[int, int], float]) -> None:
    for turn, row in found.items():
        assert row == pytest.approx([wanted[turn]] * len(row), abs=1e-5), turn


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_batch_agrees_with_the_definition_in_any_order(estimator: str, seed: int) -> None:
    rng = random.Random(seed)
    episodes = episodes_of(rng, 12)
    samples = [s for episode in episodes for s in episode]
    rng.shuffle(samples)
    check(computed(samples, estimator), by_definition(episodes, estimator))


@pytest.mark.parametrize("seed", range(20))
def test_gigpo_may_discount_the_episodes_return_as_well(seed: int) -> None:
    episodes = episodes_of(random.Random(seed), 12)
    samples = [s for episode in episodes for s in episode]
    check(computed(samples, "gigpo", gigpo_discount="both"), by_definition(episodes, "gigpo", "both"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_without_complete_episodes_gives_zero_advantages(estimator: str) -> None:
    samples = []
    for segment in range(4):
        samples.append(sample(TurnRow(segment, 0, turns=(TurnSpan(0, 2, 1.0, anchor=1),), group=0), 2))
        samples.append(sample(TurnRow(segment, 1, TurnKind.BOOTSTRAP), 1, trained=False))
    assert all(row == [0.0, 0.0] for row in computed(samples, estimator).values())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_when_every_episode_ends_on_its_first_turn_of_one_token_returns_are_rewards(estimator: str) -> None:
    episodes = [
        [sample(TurnRow(k, 0, terminated=True, turns=(TurnSpan(0, 1, reward, anchor=1),), group=0), 1)]
        for k, reward in enumerate([1.0, 0.0, 0.0, 1.0])
    ]
    found = computed([s for episode in episodes for s in episode], estimator)
    check(found, by_definition(episodes, estimator))
    assert found[0, 0] == found[3, 0] == [-found[1, 0][0]] and found[0, 0][0] > 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_episodes_of_400_turns_agree_with_the_definition(estimator: str) -> None:
    rng = random.Random(0)
    episodes = [
        [
            sample(TurnRow(e, k, terminated=k == 399, turns=(TurnSpan(0, 1, rng.random(), anchor=k % 7),), group=0), 1)
            for k in range(400)
        ]
        for e in range(3)
    ]
    check(computed([s for episode in episodes for s in episode], estimator), by_definition(episodes, estimator))


def test_how_samples_are_spread_over_ranks_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install -e '.[embedded]'")
    mp.start_processes(_worker, args=(str(tmp_path),), nprocs=WORLD, start_method=WARM)
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for rank in range(WORLD):
        for estimator, rows in torch.load(tmp_path / f"{rank}.pt").items():
            found.setdefault(estimator, {}).update(rows)
    episodes = episodes_of(random.Random(5), 12)
    for estimator in ESTIMATORS:
        wanted = by_definition(episodes, estimator)
        assert found[estimator].keys() == wanted.keys()
        check(found[estimator], wanted)


def _worker(rank: int, folder: str) -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel()
    samples: list[Any] = [s for episode in episodes_of(random.Random(5), 12) for s in episode]
    random.Random(1).shuffle(samples)
    # Uneven on purpose: a third here, the rest there.
    mine = samples[: len(samples) // 3] if rank == 0 else samples[len(samples) // 3 :]
    torch.save({estimator: computed(mine, estimator) for estimator in ESTIMATORS}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
