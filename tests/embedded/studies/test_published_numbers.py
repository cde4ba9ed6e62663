"""Numbers in the text of the results pages that no table holds follow from the committed CSV files."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from tests.embedded.studies.test_published_contrasts import areas, flip_p

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def page(name: str) -> str:
    return " ".join((RESULTS / f"{name}.md").read_text(encoding="utf-8").split())


def told(**signs: int) -> tuple[str, str, str]:
    """Mean, 90 % interval and p of these areas' signed sum over the first eight seeds of the long horizons."""
    area = areas("long_horizon")
    values = [sum(sign * area[name, seed] for name, sign in signs.items()) for seed in range(8)]
    mean, reach = float(np.mean(values)), 1.8946 * float(np.std(values, ddof=1)) / 8**0.5
    return f"{mean:.2f}", f"{mean - reach:.2f} to {mean + reach:.2f}", f"{flip_p(values):.4f}"


def rows(study: str, variant: str, seed: int = 0) -> list[dict[str, float]]:
    """The updates of one seed, in order."""
    with open(RESULTS / study / "raw.csv", encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if (line["variant"], line["seed"]) == (variant, str(seed))]
    numbers = [{k: float(v) for k, v in line.items() if v and k not in ("variant", "finished")} for line in lines]
    return sorted((row for row in numbers if "critic/explained_variance" in row), key=lambda row: row["update"])


def test_the_critics_explained_variance_by_stretch() -> None:
    variants = ("hidden", "shown", "two_updates", "pretrained", "plain_returns")
    text = (RESULTS / "critic.md").read_text(encoding="utf-8")
    for first, last in ((3, 15), (16, 30), (31, 45), (46, 60)):
        (line,) = re.findall(rf"^\| {first} to {last} \| (.*) \|$", text, re.MULTILINE)
        told = [float(cell.split()[0]) for cell in line.split(" | ")]
        values = [
            [row["critic/explained_variance"] for row in rows("time_left", variant) if first <= row["update"] <= last]
            for variant in variants
        ]
        assert told == pytest.approx([float(np.mean(found)) for found in values], abs=0.012)


def test_crafters_achievements_and_score() -> None:
    played, text = rows("crafter_long", "ppo"), page("crafter_long")

    def shares(part: list[dict[str, float]]) -> dict[str, float]:
        ended = [row for row in part if row.get("episode/finished")]
        games = np.array([row["episode/finished"] for row in ended])
        names = [name for name in ended[0] if name.startswith("episode/env/achievement/")]
        means = {
            name.rpartition("/")[2]: np.array([row[name] for row in ended]) @ games / games.sum() for name in names
        }
        assert len(means) == 22
        return means

    def score(found: dict[str, float]) -> float:
        """Crafter's: the geometric mean of one more than each success rate in percent, less one."""
        return float(np.exp(np.mean(np.log1p(100 * np.array(list(found.values()))))) - 1)

    early, late = shares(played[:20]), shares(played[-49:])
    assert f"is {score(late):.1f}, from {score(early):.1f} in the first 20 updates" in text
    for names in (
        ("collect_sapling", "place_plant"),
        ("collect_wood", "place_table"),
        ("collect_drink",),
        ("wake_up",),
    ):
        cells = (", ".join(f"{found[name]:.2f}" for name in names) for found in (early, late))
        assert f"| {' | '.join(cells)} |" in text
    assert max(row.get("episode/env/achievement/make_wood_pickaxe", 0) for row in played) == 0
    explained = [row["critic/explained_variance"] for row in played]
    assert f"explains {np.mean(explained[98:]):.2f} of the variance" in text


def test_what_explains_the_primary_contrast() -> None:
    area, text = areas("long_horizon"), page("long_horizon")
    mean, interval, _ = told(dual_400=1, four_episodes_400=-1)
    assert f"That is {mean} of the distance" in text and f"interval {interval})" in text
    mean, interval, p = told(four_episodes_400=1, rloo_400=-1)
    assert f"The other {mean} ({interval}, p = {p})" in text
    mean, interval, p = told(all_ones_400=1, rloo_400=-1, all_ones_25=-1, rloo_25=1)
    assert f"grows by {mean} from 25 to 400 turns ({interval}, p = {p})" in text
    slow, common = (np.mean([area[f"rloo{kind}_400", seed] for seed in range(8)]) for kind in ("_slow", ""))
    assert f"`rloo_slow_400`: {slow:.3f}, where `rloo_400` has {common:.3f}; p" in text
    assert f"= {float(told(rloo_slow_400=1, rloo_400=-1)[2]):.2f})" in text


def test_what_100_turns_per_episode_show() -> None:
    area, text = areas("long_horizon"), page("long_horizon")
    for lead, length in (
        ("is {} at 25 turns (90 % interval {})", 25),
        ("{} at 100 ({})", 100),
        ("{} at 400 ({})", 400),
    ):
        assert lead.format(*told(**{f"dual_{length}": 1, f"rloo_{length}": -1})[:2]) in text
    for short, long in ((25, 100), (100, 400)):
        signs = {f"dual_{long}": 1, f"rloo_{long}": -1, f"dual_{short}": -1, f"rloo_{short}": 1}
        mean, interval, p = told(**signs)
        assert re.search(rf"by {mean} from {short}( turns)? to {long}( turns)? \({interval}, p = {p}\)", text)
    for method in ("dual", "rloo"):
        means = [f"{np.mean([area[f'{method}_{length}', s] for s in range(8)]):.3f}" for length in (25, 100, 400)]
        assert f"({', '.join(means)})" in text


def test_the_cpu_time_of_the_runs_of_100_turns() -> None:
    runs = [rows("long_horizon", "dual_100", seed) for seed in range(8)]
    cpu_s = [sum(row["perf/trainer_cpu_s"] + row["perf/engine_cpu_s"] for row in run) for run in runs]
    assert f"took {min(cpu_s):.0f} to {max(cpu_s):.0f} there" in page("long_horizon")
    assert f"would take {min(cpu_s) * 40_000 / 19_200 / 60:.1f} minutes at best" in page("long_horizon")
