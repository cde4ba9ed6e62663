"""Alarms of a run: raised once, with what to try; and what is warned of before training begins."""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from embedded.arguments import EmbeddedFlags
from embedded.run.alarms import LIMITS, PATIENCE, Alarms, warnings_of
from embedded.run.ending import describe_played, is_better, judge, next_step
from embedded.warmstart.demonstrations import Demonstration
from embedded.warmstart.imitation import Imitation, statistics_of
from slime_verlog import read_settings

METRICS = Path(__file__).parents[3] / "docs" / "metrics.md"
RESULTS = METRICS.parent / "results"
VALID = "turn/valid_action_ratio"
HEALTHY = {"train/actor_trains": 1.0, "turn/valid_action_ratio": 0.98, "actor/ref_kl": 0.2}


def test_a_metric_that_stays_outside_its_range_is_reported_once_with_what_to_try() -> None:
    alarms, said = Alarms(), []
    for update in range(40):
        said.append(alarms.watch(update, {**HEALTHY, "actor/ref_kl": 2.95, "turn/valid_action_ratio": 0.79}))
    assert [len(sentences) for sentences in said] == [0] * (PATIENCE - 1) + [2] + [0] * (40 - PATIENCE)
    valid, kl = said[PATIENCE - 1]
    assert "(turn/valid_action_ratio) is 0.79 after 4 updates" in valid and "healthy is 0.8 to 1: read the" in valid
    assert "(actor/ref_kl) is 2.95" in kl and "lower the learning rate (--set-flag lr=1e-4)" in kl
    assert set(alarms.raised) == {"turn/valid_action_ratio", "actor/ref_kl"}


def test_a_step_ten_times_too_far_is_reported_at_once_and_hardly_ever_in_good_runs() -> None:
    bound = 10 * next(limit.highest for limit in LIMITS if limit.metric == "actor/ppo_kl")
    [sentence] = Alarms().watch(7, {**HEALTHY, "actor/ppo_kl": 6.66})
    assert "is 6.66 after 7 updates, far outside its range" in sentence
    assert not Alarms().watch(7, {**HEALTHY, "actor/ppo_kl": 0.9})
    good = bad = 0
    for rows in recorded_runs():
        scores = scores_of(rows, "win_rate", "eval/progression", "eval/success")
        if any(float(row["actor/ppo_kl"]) > bound for row in rows if row.get("actor/ppo_kl")):
            is_bad = scores[-1] < scores[0] - 0.02 or scores[-1] < 0.7 * max(scores)
            good, bad = good + (not is_bad), bad + is_bad
    assert bad >= 5 and good <= 2


def test_a_single_bad_batch_a_frozen_actor_and_missing_metrics_raise_nothing() -> None:
    alarms, bad = Alarms(), {**HEALTHY, "actor/ref_kl": 2.95}
    for update in range(3 * PATIENCE):
        assert not alarms.watch(update, bad if update % PATIENCE else HEALTHY)
        assert not alarms.watch(update, {**bad, "train/actor_trains": 0.0})
        assert not alarms.watch(update, {"train/actor_trains": 1.0})


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("critic/explained_variance", 0.0, "healthy is 0.001 or more: train the critic longer alone"),
        ("critic/explained_variance", 0.0004, "healthy is 0.001 or more"),
        ("critic/return_rms", 62.0, "healthy is 0 to 10: divide the rewards in the environment"),
    ],
)
def test_a_critic_that_is_no_better_than_a_constant_and_its_usual_cause_are_reported(
    metric: str, value: float, words: str
) -> None:
    alarms = Alarms()
    said = [sentence for k in range(PATIENCE) for sentence in alarms.watch(k, {**HEALTHY, metric: value})]
    assert len(said) == 1 and words in said[0]
    assert not [s for k in range(PATIENCE) for s in Alarms().watch(k, {**HEALTHY, "critic/explained_variance": 0.05})]


def test_nan_is_outside_every_range() -> None:
    assert not any(limit.holds(math.nan) for limit in LIMITS)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.metric)
def test_the_page_of_metrics_has_every_bound(limit: Any) -> None:
    bound = f"below {limit.lowest:g}" if limit.highest in (1.0, math.inf) else f"above {limit.highest:g}"
    assert f"| `{limit.metric}` | {bound} |" in METRICS.read_text()


def flags(**given: Any) -> EmbeddedFlags:
    return read_settings(EmbeddedFlags, {"hf_checkpoint": "", "num_rollout": 40, **given})


GOOD = Imitation(0.1, 100, 20, mean_turns=38.0)


@pytest.mark.parametrize(
    ("imitation", "given", "n_env", "sentence"),
    [
        (GOOD, {}, 32, None),
        (Imitation(0.1, 1, 1, same_thoughts=1.0), {}, 32, "in 100% of the demonstrated episodes, the thought never"),
        (Imitation(0.1, 1, 1, unfinished=0.8), {}, 32, "80% of the demonstrated games were cut before their end"),
        (Imitation(0.1, 1, 1, mean_turns=60), {}, 32, "an episode has 60 turns and each of the 32 slots plays 8 per"),
        (Imitation(0.1, 1, 1, mean_turns=60), {}, 8, None),
        (GOOD, {"num_rollout": 8, "num_critic_only_steps": 4}, 32, "only 4 of 8 updates train the policy"),
        (GOOD, {"num_rollout": 6, "num_critic_only_steps": 6}, 32, "all 6 updates train the critic alone"),
        (GOOD, {"num_rollout": 12, "num_critic_only_steps": 6, "advantage_estimator": "grpo"}, 32, None),
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


def played(wins: int, n: int, first: int = 0) -> list[dict[str, Any]]:
    won = [float(k < wins) for k in range(n)]
    keys = {"task_name": "t"}
    return [
        {**keys, "seed": first + k, "success": bool(x), "progression": x, "return": 0.1 * x} for k, x in enumerate(won)
    ]


def scored(wins: int, n: int, total: float, progression: float = 0.0) -> list[dict[str, Any]]:
    """Episodes of which some were won, with returns and progression that differ a little from seed to seed."""
    found = played(wins, n)
    for k, episode in enumerate(found):
        episode["return"] = total + 0.01 * (k % 7)
        episode["progression"] = max(episode["progression"], progression)
    return found


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (played(6, 128), played(6, 128), "no significant change"),
        (played(60, 128), played(126, 128), "improved"),
        (played(126, 128), played(60, 128), "worse"),
        (played(0, 4), played(4, 4), "4 held-out episodes are too few to tell"),
        (played(0, 40), played(0, 40), "no significant change"),
    ],
)
def test_the_verdict_needs_two_standard_errors_of_the_paired_difference(
    before: list[dict[str, Any]], after: list[dict[str, Any]], verdict: str
) -> None:
    found = judge(before, after)
    assert found["verdict"] == verdict and found["sentence"].startswith(verdict)
    low, high = found["interval"]
    assert low <= found["change"] <= high


def test_the_verdict_names_both_results_and_their_errors() -> None:
    sentence = judge(played(6, 128), played(6, 128))["sentence"]
    assert sentence.startswith("no significant change: win rate 0.047 ± 0.019 before, 0.047 ± 0.019 after; change +0.0")
    assert judge(played(0, 20), played(0, 20))["measure"] == "return"


@pytest.mark.parametrize(
    ("before", "after", "verdict", "measure"),
    [
        (scored(0, 32, 0.1), scored(2, 32, 0.4), "improved", "return"),
        (scored(1, 64, 0.1), scored(0, 64, 0.4), "improved", "return"),
        (scored(0, 64, 0.1), scored(1, 64, 0.1, 0.5), "improved", "progression"),
        (scored(0, 64, 0.4), scored(2, 64, 0.1), "worse", "return"),
        (scored(5, 64, 0.4), scored(60, 64, 0.1), "improved", "success"),
        (scored(0, 64, 0.1), scored(1, 64, 0.1), "no significant change", "success"),
    ],
)
def test_a_single_win_does_not_hide_what_return_and_progression_say(
    before: list[dict[str, Any]], after: list[dict[str, Any]], verdict: str, measure: str
) -> None:
    found = judge(before, after)
    assert (found["verdict"], found["measure"]) == (verdict, measure)
    assert all(name in found["sentence"] for name in ("win rate", "return"))


def test_the_best_policy_is_chosen_by_the_rule_of_the_verdict() -> None:
    assert is_better(scored(0, 64, 0.4), scored(1, 64, 0.1)), "one win by chance is not more than a higher return"
    assert not is_better(scored(1, 64, 0.1), scored(0, 64, 0.4))
    assert is_better(scored(60, 64, 0.1), scored(5, 64, 0.4))
    assert is_better(played(3, 4), played(2, 4)), "of too few episodes, the higher win rate"
    assert not is_better(played(3, 64), played(3, 64)), "the first of equals stays"


def test_failed_episodes_are_said_beside_the_win_rate_and_instead_of_it() -> None:
    episodes = [{"success": k < 2, "fault": "no room" if k == 3 else None} for k in range(4)]
    assert describe_played(episodes[:3]) == "win rate 0.667 ± 0.272 over 3 seeds"
    partly = "win rate 0.500 ± 0.250 over 4 seeds; 1 of 4 held-out episodes failed and count as 0"
    assert describe_played(episodes) == partly
    assert describe_played(episodes[3:]) == "1 of 1 held-out episodes failed and count as 0"


def test_the_next_step_begins_with_the_alarms() -> None:
    summary = {"alarms": {}, "win_rate_before": {"mean": 0.1}, "win_rate_after": {"mean": 0.1}, "updates": 12}
    assert next_step({**summary, "actor_updates": 6}) == "train longer: --updates 60, in another --out"
    assert "no held-out episode was ever won" in next_step(
        {**summary, "actor_updates": 60, "win_rate_after": {"mean": 0.0}}
    )
    assert next_step({**summary, "alarms": {"actor/ref_kl": "KL is 0.95"}}).endswith("KL is 0.95")


def recorded_runs() -> Iterator[list[dict[str, str]]]:
    """The rows of every run in docs/results."""
    for path in [*RESULTS.glob("*/raw.csv"), RESULTS / "quickstart" / "runs.csv"]:
        runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                runs[row["variant"], row["seed"]].append(row)
        yield from runs.values()


def scores_of(rows: list[dict[str, str]], *names: str) -> list[float]:
    name = next(name for name in names if name in rows[0])
    return [float(row[name]) for row in rows if row[name]]


def stays(values: list[float], outside: Callable[[float], bool]) -> bool:
    """Whether `PATIENCE` values in a row are outside."""
    return any(all(map(outside, values[k : k + PATIENCE])) for k in range(len(values) - PATIENCE + 1))


def test_the_bound_of_the_kl_tells_recorded_runs_that_fell_from_good_ones() -> None:
    bound = next(limit.highest for limit in LIMITS if limit.metric == "actor/ref_kl")
    counts: Counter[tuple[bool, bool]] = Counter()
    for rows in recorded_runs():
        kl = [float(row["actor/ref_kl"]) for row in rows if row.get("actor/ref_kl")]
        if len(kl) >= PATIENCE and any(kl):
            scores = scores_of(rows, "win_rate", "eval/success")
            counts[stays(kl, lambda value: value > bound), scores[-1] < max(scores) - 0.15] += 1
    assert counts == {(True, True): 6, (True, False): 6, (False, True): 1, (False, False): 161}


def test_the_bound_of_valid_answers_finds_bad_recorded_runs_and_spares_good_ones() -> None:
    bound = next(limit.lowest for limit in LIMITS if limit.metric == "turn/valid_action_ratio")
    alarms: dict[bool, list[bool]] = {True: [], False: []}
    for rows in recorded_runs():
        trained = [row for row in rows if row.get("train/actor_trains") != "0"]
        valid = [float(row[VALID]) for row in trained if row.get(VALID)]
        scores = scores_of(rows, "win_rate", "eval/progression", "eval/success")
        if len(valid) >= PATIENCE and len(scores) > 1:
            is_bad = scores[-1] < scores[0] - 0.02 or scores[-1] < 0.7 * max(scores)
            alarms[is_bad].append(stays(valid, lambda value: value < bound))
    assert len(alarms[True]) > 20 and sum(alarms[True]) > 0.3 * len(alarms[True])
    assert len(alarms[False]) > 200 and sum(alarms[False]) < 0.03 * len(alarms[False])
