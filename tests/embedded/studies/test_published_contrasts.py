"""The contrasts on the results pages follow from the committed CSV files, by other code than the
tables'.

Areas by the trapezoid rule, p by counting all flips, Holm's correction and the plan's looks written
out again; nothing of `embedded.studies` is used.
"""

import csv
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[3]
LOOKS = {"long_horizon": {8: 0.01, 12: 0.015, 20: 0.025}, "recall": {8: 0.05}}
"""As the plans on the pages have them: seeds, and the error level."""
SCALES = {"long_horizon": (0.020, 0.788), "recall": (0.25, 1.0)}
LEADS = {
    "long_horizon": ("rloo", "all_ones", "episodes", "end_reward"),
    "recall": ("window", "inline_notes"),
}
"""What the pages' contrasts are against, in order."""
FIRST = {"long_horizon": "dual", "recall": "notes"}


@cache
def areas(study: str) -> dict[tuple[str, int], float]:
    curves: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    with open(REPOSITORY / "studies" / study / "raw.csv", encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["finished"] == "True" and line["eval/progression"]:
                point = float(line["turns"]), float(line["eval/progression"])
                curves[line["variant"], int(line["seed"])].append(point)
    low, high = SCALES[study]
    found = {}
    for run, points in curves.items():
        turns, values = map(np.array, zip(*sorted(points), strict=True))
        assert turns[-1] == 19_200
        found[run] = float(np.trapezoid((values - low) / (high - low), turns)) / 19_200
    return found


def leads(study: str, area: dict[tuple[str, int], float]) -> list[list[float]]:
    """By contrast, the values of seeds 0, 1, 2, ... up to the first that lacks a run."""
    found = []
    for other in LEADS[study]:
        values = []
        for seed in range(max(LOOKS[study])):
            runs = [
                (f"{method}_{length}", seed)
                for length in (400, 25)
                for method in (FIRST[study], other)
            ]
            if any(run not in area for run in runs):
                break
            new_late, old_late, new_early, old_early = (area[run] for run in runs)
            values.append(new_late - old_late - (new_early - old_early))
        found.append(values)
    return found


def flip_p(values: list[float]) -> float:
    signs = np.array(np.meshgrid(*[[1, -1]] * len(values))).reshape(len(values), -1)
    return float(np.mean(np.abs(np.array(values) @ signs) >= abs(sum(values)) - 1e-9))


def holm(p_values: dict[int, float], tests: int) -> dict[int, float]:
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, p_values[name] * (tests - rank)))
        adjusted[name] = largest
    return adjusted


@pytest.mark.parametrize("study", list(LOOKS))
def test_the_pages_contrasts_follow_from_the_committed_numbers(study: str) -> None:
    values = leads(study, areas(study))
    decided: dict[int, tuple[int, float, float, str]] = {}
    looks = LOOKS[study]
    for look, level in looks.items():
        planned = range(1 if look == min(looks) < max(looks) else len(values))
        p_values = {k: flip_p(values[k][:look]) for k in planned if len(values[k]) >= look}
        for k, adjusted in holm(p_values, len(planned)).items():
            if k not in decided or decided[k][3] == "":
                mean, found = np.mean(values[k][:look]), ""
                if adjusted <= level:
                    found = "yes" if mean > 0 else "yes, the other way round"
                elif look == max(looks):
                    reach = _t90(values[k][:look])
                    found = (
                        "no difference above 0.05" if abs(mean) + reach <= 0.05 else "cannot tell"
                    )
                decided[k] = look, p_values[k], adjusted, found
    table = re.search(
        rf"<!-- contrasts: {study} -->.*?<!-- end -->",
        (REPOSITORY / "docs" / "results" / f"{study}.md").read_text("utf-8"),
        re.DOTALL,
    )
    assert table is not None
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table[0].splitlines()
        if line.startswith("| ")
    ]
    assert len(rows) == 1 + len(values)
    for k, (_, seeds, mean, _, interval, p, adjusted, verdict) in enumerate(rows[1:]):
        if k not in decided:
            assert (verdict[:5], p) == ("open:", "-")
            continue
        look, expected_p, expected_adjusted, found = decided[k]
        assert int(seeds) == look and float(mean) == pytest.approx(
            np.mean(values[k][:look]), abs=2e-3
        )
        low, high = map(float, interval.split(" to "))
        assert high - low == pytest.approx(2 * _t90(values[k][:look]), abs=4e-3)
        assert (float(p), float(adjusted)) == pytest.approx(
            (expected_p, expected_adjusted), abs=2e-3
        )
        assert verdict == found or (found == "" and verdict.startswith("open"))


def _t90(values: list[float]) -> float:
    """Half of Student's 90 % interval of the mean."""
    quantile = {7: 1.8946, 11: 1.7959, 19: 1.7291}[len(values) - 1]
    return quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5


def explained_in_the_last_half(study: str) -> dict[tuple[str, int], float]:
    """The mean explained variance of each finished run, by variant and seed."""
    rows: dict[tuple[str, int], list[float]] = defaultdict(list)
    path = REPOSITORY / "studies" / study / "raw.csv"
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["finished"] == "True" and line["critic/explained_variance"]:
                run = line["variant"], int(line["seed"])
                rows[run].append(float(line["critic/explained_variance"]))
    return {run: float(np.mean(values[len(values) // 2 :])) for run, values in rows.items()}


def test_explained_variances_in_recall_are_those_of_the_page() -> None:
    late = explained_in_the_last_half("critic_head_recall")
    head, once, twice = (
        [late[name, seed] for seed in range(8)] for name in ("hl_gauss", "mse", "mse_twice")
    )
    more = [two - one for two, one in zip(twice, once, strict=True)]
    assert [round(min(more), 2), round(max(more), 2), round(np.mean(more), 2)] == [0.04, 0.14, 0.09]
    assert [round(min(twice), 2), round(max(twice), 2), round(max(once), 2)] == [0.05, 0.19, 0.10]
    assert max(head) < 0.0015
    assert [round(value, 2) for value in sorted(head)[:4]] == [-0.46, -0.43, -0.31, -0.20]
    pairs = [(late["mse_pretrained", seed], late["mse", seed]) for seed in (0, 3)]
    assert [(round(new, 2), round(old, 2)) for new, old in pairs] == [(0.45, 0.0), (0.11, 0.01)]
    assert [round(np.mean(values), 2) for values in (once, head, twice)] == [0.02, -0.17, 0.11]


def test_explained_variances_of_critic_heads_are_those_of_the_page() -> None:
    late = explained_in_the_last_half("critic_head_errands")
    means = [
        np.mean([late[name, seed] for seed in range(8)])
        for name in ("mse", "hl_gauss", "mse_twice")
    ]
    less = [late["mse", seed] - late["hl_gauss", seed] for seed in range(8)]
    more = [late["mse_twice", seed] - late["mse", seed] for seed in range(8)]
    assert [round(mean, 2) for mean in means] == [0.28, 0.27, 0.35]
    assert [round(min(less[:7]), 2), round(max(less), 2), round(less[7], 2)] == [0.02, 0.18, -0.48]
    assert sum(lead > 0 for lead in more) == 7
    assert sorted(set(range(8)) - {seed for name, seed in late if name == "mse_pretrained"}) == [
        4,
        5,
    ]


def test_ages_and_differences_of_the_off_policy_page_are_those_of_the_runs() -> None:
    columns = ("turn/staleness", "actor/train_rollout_logprob_abs_diff", "actor/ppo_kl")
    rows: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    path = REPOSITORY / "studies" / "off_policy_goto" / "raw.csv"
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["train/actor_trains"] not in ("", "0"):
                run = line["variant"], int(line["seed"])
                rows[run].append([float(line[name]) for name in columns])
    page = (REPOSITORY / "docs" / "results" / "off_policy_plan.md").read_text("utf-8")
    for age in (0, 1, 2, 4):
        of_seeds = [np.mean(rows[f"age_{age}_steps_4", seed], axis=0) for seed in range(8)]
        stale, difference, kl = np.mean(of_seeds, axis=0)
        assert f"| {age} | {stale:.2f} | {difference:.3f} | {kl:.3f} |" in page
