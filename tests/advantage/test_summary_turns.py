"""Turns in which the model writes its notes: what they are worth to other turns, and what is logged
of them."""

import random

import pytest

from tests.advantage.batches import FakeSample, check_rows, in_float64, run, turn


def notes(index: int, value: float) -> FakeSample:
    return turn(0, index, [value], moves=False)


def win(index: int, value: float = 0.7) -> FakeSample:
    return turn(0, index, [value], 1.0, terminated=True)


def episode(summaries_after: set[int], rng: random.Random) -> list[FakeSample]:
    """A win at environment turn 100; a summary follows each environment turn in
    `summaries_after`."""
    samples: list[FakeSample] = []
    for k in range(99):
        samples.append(turn(0, len(samples), [(k % 7) / 7]))
        if k in summaries_after:
            samples.append(notes(len(samples), rng.gauss(0, 5)))
    return [*samples, win(len(samples))]


@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_win_at_turn_100_is_worth_the_same_with_any_number_of_summaries(every: int) -> None:
    """With `lambda_step: 1`, to every turn of the environment."""
    samples = episode({k for k in range(99) if k % every == every - 1}, random.Random(every))
    plain = run(in_float64(episode(set(), random.Random(0))), kl_coef=0.0, lambda_step=1.0)
    noted = run(in_float64(samples), kl_coef=0.0, lambda_step=1.0)
    assert noted["returns"][0].item() == pytest.approx(0.99**99)
    of_environment = [k for k, sample in enumerate(samples) if sample.row.turns[0].moves]
    check_rows([noted["advantages"][k] for k in of_environment], plain["advantages"], atol=1e-9)


def test_notes_and_the_prompts_after_them_are_compared_with_other_turns() -> None:
    samples = [turn(0, 0, [0.5]), turn(0, 1, [0.5]), notes(2, 0.6), win(3)]
    data = run(samples, kl_coef=0.0, slime_verlog_role="actor")
    after_notes, *others = (float(data["advantages"][k][0]) for k in (3, 1, 2))
    assert data["summary_optimism"].item() == pytest.approx(sum(others) / 2 - after_notes)
    turns = [others[0], after_notes]
    assert (
        data["summary_advantage"].item() == pytest.approx(others[1])
        and data["summary_advantage_std"].item() == 0
    )
    assert data["turn_advantage"].item() == pytest.approx(sum(turns) / 2)
    assert data["turn_advantage_std"].item() == pytest.approx(abs(turns[0] - turns[1]) / 2)
    for role, batch in (("critic", samples), ("actor", [turn(0, 0), win(1)])):
        assert "summary_optimism" not in run(batch, slime_verlog_role=role)
