"""Planned contrasts: exact tests, Holm's correction, looks and verdicts."""

import itertools

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs pip install 'slime-verlog[studies]'")

from embedded.studies.contrasts import area_lines, areas, holm, numbers, results, sign_flip_p
from embedded.studies.results import Run
from embedded.studies.study import Study
from slime_verlog import ConfigError, read_settings

STUDY = {
    "question": "?",
    "seeds": list(range(20)),
    "variants": {"new": {}, "old": {}, "same": {}},
    "contrasts": {"first": {"new": 1, "old": -1}, "second": {"same": 1, "old": -1}},
}


def study(**changes: object) -> Study:
    return read_settings(Study, {**STUDY, **changes})


def runs(leads: list[float], second: list[float] | None = None) -> list[Run]:
    """Runs whose held-out curve is flat: 0.3 for `old`, and more for the others by the lead of each
    seed."""
    found = []
    for seed, lead in enumerate(leads):
        other = second[seed] if second else 0.0
        for variant, value in {"old": 0.3, "new": 0.3 + lead, "same": 0.3 + other}.items():
            rows = [{"turns": turns, "eval/success": value} for turns in (0.0, 500.0, 1000.0)]
            found.append(Run(variant, seed, rows, True))
    return found


@pytest.mark.parametrize("size", [1, 8])
def test_the_sign_flip_test_counts_all_flips(size: int) -> None:
    values = list(np.random.default_rng(size).normal(0.2, 0.3, size))
    flips = itertools.product((1, -1), repeat=size)
    sums = [
        abs(sum(sign * value for sign, value in zip(flip, values, strict=True))) for flip in flips
    ]
    assert sign_flip_p(values) == sum(total >= abs(sum(values)) - 1e-9 for total in sums) / 2**size


def test_holm_multiplies_the_smallest_p_most_and_never_lets_a_larger_p_pass_a_smaller_one() -> None:
    assert holm([0.01, 0.04, 0.03], tests=3) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([], tests=2) == []


def test_a_contrast_with_seeds_is_corrected_for_one_without() -> None:
    leads = [0.5, -0.2] * 3 + [0.5] * 6
    late = [run for run in runs([0.0] * 12, leads) if run.variant != "new" or run.seed < 8]
    first, second = results(study(), late)
    assert first.verdict == "open after 8 seeds"
    assert second.p is not None and second.adjusted == pytest.approx(2 * second.p)


def test_the_first_look_tests_the_primary_contrast_alone() -> None:
    first, second = results(study(), runs([0.5] * 8, [0.5] * 8))
    assert (first.verdict, first.p, first.adjusted) == ("yes", 2 / 256, 2 / 256)
    assert (second.verdict, second.p) == ("open after 8 seeds", None)


def test_what_a_look_decided_stays_decided_and_the_others_go_on() -> None:
    leads, rng = [0.5] * 8 + [-0.5] * 4, np.random.default_rng(0)
    first, second = results(study(), runs(leads, list(rng.normal(0, 0.4, 12))))
    assert first.verdict == "yes" and len(first.values) == 8
    assert second.verdict == "open after 12 seeds"


def test_seeds_between_two_looks_are_not_looked_at() -> None:
    first, _ = results(study(), runs([0.5, -0.4] * 4 + [0.5] * 3))
    assert first.verdict == "open after 8 seeds" and len(first.values) == 8


def test_the_last_look_tells_no_difference_from_cannot_tell() -> None:
    rng = np.random.default_rng(1)
    little, much = list(rng.normal(0, 0.02, 20)), list(rng.normal(0, 0.5, 20))
    assert [found.verdict for found in results(study(), runs(little, much))] == [
        "no difference above 0.05",
        "cannot tell",
    ]


def test_a_study_of_eight_seeds_has_one_look_at_all_its_contrasts() -> None:
    few = study(seeds=list(range(8)))
    first, second = results(few, runs([0.5] * 8, [0.01, -0.01] * 4))
    assert (first.verdict, first.adjusted) == ("yes", 4 / 256)
    assert second.verdict == "no difference above 0.05" and second.p == 1.0
    assert results(few, runs([0.5] * 7))[1].verdict == "open after 7 seeds"


def test_a_study_may_compare_the_late_mean_of_a_metric() -> None:
    rows = [
        {"update": 1.0, "turns": 5.0, "critic/explained_variance": value}
        for value in (0.9, 0.9, 0.5, 0.1)
    ]
    found = numbers(study(compared="critic/explained_variance"), [Run("new", 0, rows, True)])
    assert found["new"] == {0: pytest.approx(0.3)}
    with pytest.raises(ConfigError, match="new, seed 0: no update has critic/none"):
        numbers(study(compared="critic/none"), [Run("new", 0, rows, True)])


def test_areas_end_with_the_shortest_run_and_count_from_random_play_to_the_expert() -> None:
    rows = lambda end: [
        {"turns": 0.0, "eval/success": 0.2},
        {"turns": end, "eval/success": 0.2 + end / 1000},
    ]
    found = areas(
        study(scale=[0.2, 0.7]),
        [Run("new", 0, rows(500.0), True), Run("old", 0, rows(100.0), True)],
    )
    assert [found["old"][0], found["new"][0]] == pytest.approx([0.1, 0.1], abs=1e-3)


def test_the_share_of_turns_with_company_stands_beside_the_areas_if_runs_logged_it() -> None:
    start = {"update": 0.0, "turns": 0.0, "eval/success": 0.3}
    trained = {
        **start,
        "update": 1.0,
        "turns": 9.0,
        "train/actor_trains": 1.0,
        "rollout/shared_state_ratio": 0.25,
    }
    head, _, *lines = area_lines(study(), [Run("old", 0, [start, trained], True)])
    assert head.endswith("| turns that share their prompt |")
    assert [line.split(" | ")[-1] for line in lines] == ["- |", "0.25 |", "- |"]
    assert "share" not in area_lines(study(), [Run("old", 0, [start, start], True)])[0]


def test_a_seed_that_is_repeated_later_does_not_change_which_seeds_a_look_sees() -> None:
    whole = runs([0.5] * 3 + [-0.9] + [0.5] * 8)
    early = [Run(run.variant, run.seed, run.rows, run.seed != 3) for run in whole]
    assert results(study(), early)[0].verdict == "open after 3 seeds"
    assert results(study(), whole)[0].values[3] == pytest.approx(-0.9)
