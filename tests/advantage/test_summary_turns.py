"""Turns in which the model writes its notes: exact values, for the hook and for the group estimators."""

import random
from typing import Any

import pytest
import torch

from advantage.group import compute_advantages as compute_group_advantages
from advantage.hook import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data

Numbers = list[tuple[float, float]]
"""Advantage and return of each turn's first token."""


def turn(index: int, value: float, *, moves: bool = True, reward: float = 0.0, end: bool = False) -> FakeSample:
    row = TurnRow(0, index, terminated=end, turns=(TurnSpan(0, 1, reward, moves=moves),))
    return FakeSample(row, 2, [1], torch.tensor([value], dtype=torch.float64), torch.zeros(1))


def state(index: int, value: float) -> FakeSample:
    return FakeSample(TurnRow(0, index, TurnKind.BOOTSTRAP), 2, [0], torch.tensor([value]).double(), torch.zeros(1))


def run(samples: list[FakeSample], **changes: Any) -> Numbers:
    """Shuffled, because the order of samples must not matter."""
    order = list(range(len(samples)))
    random.Random(len(samples)).shuffle(order)
    data = rollout_data([samples[i] for i in order])
    compute_advantages(make_args(kl_coef=0.0, **changes), data)
    rows = zip(data["advantages"], data["returns"], strict=True)
    found = dict(zip(order, [(float(a[0]), float(r[0])) for a, r in rows], strict=True))
    return [found[i] for i in range(len(samples))]


def win(index: int) -> FakeSample:
    return turn(index, 0.7, reward=1.0, end=True)


def flat(numbers: Numbers) -> list[float]:
    return [x for pair in numbers for x in pair]


@pytest.mark.parametrize("form", ["dual", "turn", "bi_level"])
def test_the_edge_out_of_a_summary_carries_no_step_discount(form: str) -> None:
    found = run([turn(0, 0.5), turn(1, 0.6, moves=False), win(2)], gae_form=form)
    assert flat(found) == pytest.approx([0.4702, 0.9702, 0.4, 1.0, 0.3, 1.0])


def test_a_batch_that_ends_after_the_summary_bootstraps_from_the_next_prompt() -> None:
    found = run([turn(0, 0.5), turn(1, 0.6, moves=False), state(2, 0.7)])
    assert flat(found[:2]) == pytest.approx([0.18805, 0.68805, 0.1, 0.7])


def episode(environment_turns: int, summaries_after: set[int], draw: Any) -> list[FakeSample]:
    """A win at the last environment turn; a summary follows each environment turn in `summaries_after`."""
    samples: list[FakeSample] = []
    for k in range(environment_turns):
        last = k == environment_turns - 1
        samples.append(turn(len(samples), (k % 7) / 7, reward=float(last), end=last))
        if k in summaries_after:
            samples.append(turn(len(samples), draw(), moves=False))
    return samples


def of_environment(samples: list[FakeSample], found: Numbers) -> list[float]:
    return [a for sample, (a, _) in zip(samples, found, strict=True) if sample.row.turns[0].moves]


@pytest.mark.parametrize("seed", range(5))
def test_with_lambda_step_1_summaries_change_no_advantage_of_an_environment_turn(seed: int) -> None:
    rng = random.Random(seed)
    plain = episode(12, set(), rng.random)
    noted = episode(12, set(rng.sample(range(11), 4)), lambda: rng.gauss(0, 5))
    expected, found = (of_environment(s, run(s, lambda_step=1.0)) for s in (plain, noted))
    assert found == pytest.approx(expected, abs=1e-6)
    assert run([turn(0, 0.5), turn(1, rng.gauss(0, 9), moves=False), win(2)], lambda_step=1.0)[0][0] == pytest.approx(
        0.49
    )


@pytest.mark.parametrize("summaries", [0, 9, 99])
def test_a_win_at_turn_100_is_worth_the_same_with_any_number_of_summaries(summaries: int) -> None:
    after = {k for k in range(99) if summaries == 99 or (summaries and k % 10 == 9)}
    assert len(after) == summaries
    samples = episode(100, after, lambda: 0.3)
    assert run(samples, lambda_step=1.0)[0][1] == pytest.approx(0.99**99, abs=1e-5)
    lost = FakeSample(TurnRow(1, 0, terminated=True, turns=(TurnSpan(0, 1, 0.0),)), 2, [1], *[torch.zeros(1)] * 2)
    data = rollout_data([*samples, lost])
    estimator = {"group_estimator": "rloo", "n_samples_per_prompt": 1}
    compute_group_advantages(make_args(kl_coef=0.0, **estimator), data)
    won = torch.cat(data["advantages"])[:-1].tolist()
    assert won == pytest.approx([0.99**99] * len(samples)), "a summary gets the advantage of its episode"


def test_notes_and_the_prompts_after_them_are_compared_with_other_turns() -> None:
    samples = [turn(0, 0.5), turn(1, 0.5), turn(2, 0.6, moves=False), win(3)]
    data = rollout_data(samples)
    compute_advantages(make_args(kl_coef=0.0, slime_verlog_role="actor"), data)
    after_notes, *others = (float(data["advantages"][k][0]) for k in (3, 1, 2))
    assert data["summary_optimism"].item() == pytest.approx(sum(others) / 2 - after_notes)
    turns = [others[0], after_notes]
    assert data["summary_advantage"].item() == pytest.approx(others[1]) and data["summary_advantage_std"].item() == 0
    assert data["turn_advantage"].item() == pytest.approx(sum(turns) / 2)
    assert data["turn_advantage_std"].item() == pytest.approx(abs(turns[0] - turns[1]) / 2)
    for role, batch in (("critic", samples), ("actor", [turn(0, 0.5), win(1)])):
        data = rollout_data(batch)
        compute_advantages(make_args(slime_verlog_role=role), data)
        assert "summary_optimism" not in data
