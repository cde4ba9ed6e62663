"""Alarms of a run: raised once, with what to try; and what is warned of before training begins."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.arguments import EmbeddedFlags
from embedded.run.alarms import LIMITS, PATIENCE, Alarms, warnings_of
from embedded.run.ending import is_better, judge
from embedded.warmstart.demonstrations import Demonstration
from embedded.warmstart.imitation import Imitation, statistics_of
from slime_verlog import read_settings

METRICS = Path(__file__).parents[3] / "docs" / "training_metrics.md"
HEALTHY = {"train/actor_trains": 1.0, "turn/valid_action_ratio": 0.98, "actor/ref_kl": 0.2}


def test_a_metric_that_stays_outside_its_range_is_reported_once_with_what_to_try() -> None:
    alarms, said = Alarms(), []
    for update in range(40):
        said.append(
            alarms.watch(update, {**HEALTHY, "actor/ref_kl": 2.95, "turn/valid_action_ratio": 0.79})
        )
    assert [len(sentences) for sentences in said] == [0] * (PATIENCE - 1) + [2] + [0] * (
        40 - PATIENCE
    )
    valid, kl = said[PATIENCE - 1]
    assert (
        "(turn/valid_action_ratio) is 0.79 after 4 updates" in valid
        and "healthy is 0.8 to 1: read the" in valid
    )
    assert "(actor/ref_kl) is 2.95" in kl and "lower the learning rate (--set-flag lr=1e-4)" in kl
    assert set(alarms.raised) == {"turn/valid_action_ratio", "actor/ref_kl"}


def test_a_step_ten_times_too_far_is_reported_at_once() -> None:
    [sentence] = Alarms().watch(7, {**HEALTHY, "actor/ppo_kl": 6.66})
    assert "is 6.66 after 7 updates, far outside its range" in sentence
    assert not Alarms().watch(7, {**HEALTHY, "actor/ppo_kl": 0.9})


def test_a_single_bad_batch_a_frozen_actor_and_missing_metrics_raise_nothing() -> None:
    alarms, bad = Alarms(), {**HEALTHY, "actor/ref_kl": 2.95}
    for update in range(3 * PATIENCE):
        assert not alarms.watch(update, bad if update % PATIENCE else HEALTHY)
        assert not alarms.watch(update, {**bad, "train/actor_trains": 0.0})
        assert not alarms.watch(update, {"train/actor_trains": 1.0})


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.metric)
def test_the_page_of_metrics_has_every_bound(limit: Any) -> None:
    bound = (
        f"below {limit.lowest:g}"
        if limit.highest in (1.0, math.inf)
        else f"above {limit.highest:g}"
    )
    assert f"| `{limit.metric}` | {bound} |" in METRICS.read_text()


def flags(**given: Any) -> EmbeddedFlags:
    return read_settings(EmbeddedFlags, {"hf_checkpoint": "", "num_rollout": 40, **given})


GOOD = Imitation(0.1, 100, 20, mean_turns=38.0)


@pytest.mark.parametrize(
    ("imitation", "given", "n_env", "sentence"),
    [
        (GOOD, {}, 32, None),
        (
            Imitation(0.1, 1, 1, same_thoughts=1.0),
            {},
            32,
            "in 100% of the demonstrated episodes, the thought never",
        ),
        (
            Imitation(0.1, 1, 1, unfinished=0.8),
            {},
            32,
            "80% of the demonstrated games were cut before their end",
        ),
        (
            Imitation(0.1, 1, 1, mean_turns=60),
            {},
            32,
            "an episode has 60 turns and each of the 32 slots plays 8 per",
        ),
        (
            GOOD,
            {"num_rollout": 8, "num_critic_only_steps": 4},
            32,
            "only 4 of 8 updates train the policy",
        ),
        (
            GOOD,
            {"num_rollout": 6, "num_critic_only_steps": 6},
            32,
            "all 6 updates train the critic alone",
        ),
    ],
)
def test_what_will_keep_a_run_from_learning_is_said_before_it_begins(
    imitation: Imitation, given: dict[str, Any], n_env: int, sentence: str | None
) -> None:
    found = list(warnings_of(imitation, flags(**given), n_env))
    assert len(found) == (sentence is not None) and (sentence is None or sentence in found[0])


def test_demonstrations_are_counted_by_episode() -> None:
    episode = lambda seed, thoughts, finished: [
        Demonstration([], f"THINK: {thought}\nACTION: go {k}", "t", seed, k, finished=finished)
        for k, thought in enumerate(thoughts)
    ]
    turns = [*episode(1, "aaa", True), *episode(2, "ab", False), *episode(3, "a", True)]
    assert statistics_of(turns) == {"mean_turns": 2.0, "unfinished": 1 / 3, "same_thoughts": 0.5}


def scored(wins: int, n: int, total: float = 0.0, progression: float = 0.0) -> list[dict[str, Any]]:
    """Episodes of which some were won, with returns that differ a little from seed to seed."""
    return [
        {
            "task_name": "t",
            "seed": seed,
            "fault": None,
            "success": float(seed < wins),
            "progression": max(float(seed < wins), progression),
            "return": total + 0.01 * (seed % 7),
        }
        for seed in range(n)
    ]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (scored(6, 128), scored(6, 128), "no significant change"),
        (scored(60, 128), scored(126, 128), "improved"),
        (scored(0, 4), scored(4, 4), "4 held-out episodes are too few to tell"),
    ],
)
def test_the_verdict_needs_two_standard_errors_of_the_paired_difference(
    before: list[dict[str, Any]], after: list[dict[str, Any]], verdict: str
) -> None:
    found = judge(before, after)
    assert found["verdict"] == verdict and found["sentence"].startswith(verdict)
    low, high = found["interval"]
    assert low <= found["change"] <= high


@pytest.mark.parametrize(
    ("before", "after", "verdict", "measure"),
    [
        (scored(0, 32, 0.1), scored(2, 32, 0.4), "improved", "return"),
        (scored(0, 64, 0.1), scored(1, 64, 0.1, 0.5), "improved", "progression"),
        (scored(0, 64, 0.4), scored(2, 64, 0.1), "worse", "return"),
        (scored(5, 64, 0.4), scored(60, 64, 0.1), "improved", "success"),
    ],
)
def test_a_single_win_does_not_hide_what_return_and_progression_say(
    before: list[dict[str, Any]], after: list[dict[str, Any]], verdict: str, measure: str
) -> None:
    found = judge(before, after)
    assert (found["verdict"], found["measure"]) == (verdict, measure)
    assert all(name in found["sentence"] for name in ("win rate", "return"))


def test_the_best_policy_is_chosen_by_the_rule_of_the_verdict() -> None:
    assert is_better(scored(0, 64, 0.4), scored(1, 64, 0.1)), (
        "one win by chance is not more than a higher return"
    )
    assert not is_better(scored(1, 64, 0.1), scored(0, 64, 0.4))
    assert is_better(scored(60, 64, 0.1), scored(5, 64, 0.4))
    assert is_better(scored(3, 4), scored(2, 4)), "of too few episodes, the higher win rate"
    assert not is_better(scored(3, 64), scored(3, 64)), "the first of equals stays"
