"""The hook refuses invalid batches, and gives the actor's loss what it needs; test_dual_gae.py
checks its numbers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.errors import TurnTableError
from advantage.hook import compute_advantages
from advantage.turn_table import STALENESS, TurnKind, TurnRow, TurnSpan, encode_row
from tests.advantage.batches import FakeSample, make_args, rollout_data, run, sample_of, state, turn


def test_the_actors_loss_gets_the_staleness_of_each_token_and_the_critics_does_not() -> None:
    spans = (TurnSpan(0, 2, 1.0, staleness=3), TurnSpan(4, 5, 2.0, staleness=0))
    samples = [
        sample_of(TurnRow(0, 0, terminated=True, turns=spans), [1, 1, 0, 0, 1]),
        turn(1, 0),
        state(1, 1),
    ]
    data = run(samples, policy_loss="dis", slime_verlog_role="actor")
    assert [row.tolist() for row in data[STALENESS]] == [[3, 3, -1, -1, 0], [-1, -1], [-1]]
    for changes in (
        {"slime_verlog_role": "critic", "policy_loss": "dis"},
        {"slime_verlog_role": "actor"},
    ):
        assert STALENESS not in run(samples, **changes)


def test_a_rank_without_samples_gets_empty_lists() -> None:
    data = run([])
    assert data["advantages"] == data["returns"] == []


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([turn(7, 3)], r"segment 7, turn 3: it neither terminated nor truncated"),
        ([turn(7, 0), turn(7, 2, terminated=True)], r"segment 7, turn 0: the next turn is missing"),
        (
            [turn(7, 0, terminated=True), turn(7, 0, terminated=True)],
            r"segment 7, turn 0: it is in the batch twice",
        ),
        (
            [turn(7, 0, terminated=True), turn(7, 1, terminated=True)],
            r"segment 7, turn 0: it ended the episode",
        ),
        (
            [state(7, 0), turn(7, 1, terminated=True)],
            r"segment 7, turn 0: a bootstrap sample is followed",
        ),
        (
            [sample_of(TurnRow(7, 0, TurnKind.BOOTSTRAP), [])],
            "sample 0: a bootstrap sample needs one response token",
        ),
        (
            [replace(state(7, 0), mask=[1])],
            r"sample 0: its loss mask includes token 0 .* belongs to no turn",
        ),
    ],
)
def test_turns_that_do_not_form_an_episode_are_named(
    samples: list[FakeSample], message: str
) -> None:
    with pytest.raises(TurnTableError, match=message):
        run(samples)


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("values", float("nan"), "sample 1, response token 2: the value is nan, not finite"),
        ("kl", float("inf"), "sample 1, response token 2: -kl_coef x KL is -inf, not finite"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_with_its_sample_and_token(
    key: str, wrong: float, message: str
) -> None:
    # The token between the turns belongs to neither.
    spans = (TurnSpan(0, 1, 1.0), TurnSpan(2, 3, 1.0))
    samples = [turn(0, 0), sample_of(TurnRow(0, 1, terminated=True, turns=spans), [1, 0, 1])]
    data = rollout_data(samples)
    data[key][1][2] = wrong
    with pytest.raises(ValueError, match=message):
        compute_advantages(make_args(), data)
    data = rollout_data(samples)
    data[key][1][1] = wrong
    compute_advantages(make_args(), data)


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("values", None, "--advantage-estimator ppo"),
        (
            "loss_masks",
            [torch.ones(3, dtype=torch.int)],
            "sample 0: .* 3 entries for 2 response tokens",
        ),
        ("prompt", [encode_row(turn(0, 0).row)] * 2, "2 rows for 1 samples"),
    ],
)
def test_data_that_do_not_fit_together_are_refused(key: str, wrong: Any, message: str) -> None:
    data = {**rollout_data([turn(0, 0, terminated=True)]), key: wrong}
    if wrong is None:
        del data[key]
    with pytest.raises(TurnTableError, match=message):
        compute_advantages(make_args(), data)
