"""What a study's runs wrote: curves over turns and time, the means and intervals that a table shows, and contrasts.

Contrasts between variants are fixed before a study runs, with exact tests and planned looks. One adds up areas under
held-out curves with signs, for example dual_400 - rloo_400 - dual_25 + rloo_25. Seeds are paired: each gives one value.
The first contrast of a study is the primary one.
"""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embedded.run.record import Row, read_rows
from embedded.studies.study import DONE, ROWS, Study
from rollout.play.metrics import mean

MEASURES = {"success": "win rate", "progression": "progression", "return": "return"}
"""Names of what held-out episodes are compared by."""
REPETITIONS = 2000  # bootstrap samples per interval
_TASK_WIN_RATE = re.compile("eval/(.+)/success")


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    rows: list[Row]
    done: bool
    measure: str = "success"

    def columns(self) -> dict[str, float | None]:
        """Compute the table's columns. Losses and staleness are means over the updates that also trained the actor."""
        results = [row for row in self.rows if self.key in row]
        trained = [row for row in self.rows if row.get("train/actor_trains")]
        mean_of = lambda key: mean(found) if (found := [row[key] for row in trained if key in row]) else None
        sum_of = lambda key: sum(row.get(key, 0.0) for row in self.rows)
        return {
            "before": results[0][self.key] if results else None,
            "after": results[-1][self.key] if len(results) > 1 else None,
            "length": results[-1]["eval/turns"] if len(results) > 1 else None,
            "value_loss": mean_of("critic/value_loss"),
            "explained_variance": mean_of("critic/explained_variance"),
            "turns": self.total("turns") if self.rows else None,
            "staleness": mean_of("turn/staleness"),
            "seconds": self.total("seconds") if self.rows else None,
            "cpu": self.total("cpu") if self.rows else None,
            "trainer_cpu": sum_of("perf/trainer_cpu_s"),
            "engine_cpu": sum_of("perf/engine_cpu_s"),
        }

    @property
    def key(self) -> str:
        """Name of the compared number in the rows."""
        return f"eval/{self.measure}"

    def total(self, over: str) -> float:
        """Count all turns, seconds or CPU seconds of the run."""
        return _positions(self.rows, over)[-1]

    def mean_result(self, over: str, end: float) -> float | None:
        """Average the held-out curve over the first `end` turns or seconds, linear between evaluations."""
        xs, ys = curve(self.rows, self.key, over)
        if len(xs) < 2 or end <= 0:
            return None
        return float(np.interp([end * i / 1000 for i in range(1001)], xs, ys).mean())

    def task_results(self) -> dict[str, float]:
        """Return the last evaluation's win rate in each held-out task, if there are several."""
        results = [row for row in self.rows if self.key in row]
        last = results[-1] if len(results) > 1 else {}
        return {found[1]: value for key, value in last.items() if (found := _TASK_WIN_RATE.fullmatch(key))}


def read_runs(folder: Path, study: Study) -> list[Run]:
    """Read all runs in the folder, in the study's order of variants."""
    runs = []
    for variant in study.variants:
        paths = {int(path.parent.name.split("_")[1]): path for path in (folder / variant).glob(f"seed_*/{ROWS}")}
        for seed, path in sorted(paths.items()):
            runs.append(Run(variant, seed, read_rows(path), path.with_name(DONE).exists(), study.measure))
    return runs


def read_csv(path: Path, measure: str = "success") -> list[Run]:
    """Read the runs in a study's `raw.csv`."""
    rows: dict[tuple[str, int, bool], list[Row]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            run = (line.pop("variant"), int(line.pop("seed")), line.pop("finished") == "True")
            rows.setdefault(run, []).append({key: float(value) for key, value in line.items() if value})
    return [Run(variant, seed, found, done, measure) for (variant, seed, done), found in rows.items()]


def curve(rows: Sequence[Row], key: str, over: str = "turns") -> tuple[list[float], list[float]]:
    """(turns, seconds or CPU seconds so far; values) of one run, with losses smoothed over five updates."""
    found = [(x, row[key]) for x, row in zip(_positions(rows, over), rows, strict=True) if key in row]
    values = [value for _, value in found]
    if not key.startswith("eval/"):
        values = [sum(values[max(0, i - 4) : i + 1]) / len(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
    return [x for x, _ in found], values


def _positions(rows: Sequence[Row], over: str) -> list[float]:
    """Tell how far the run was at each row: in turns, wall seconds, or CPU seconds of trainer and engine (`cpu`)."""
    if over != "cpu":
        return [row.get(over, 0.0) for row in rows]
    spent = [row.get("perf/trainer_cpu_s", 0.0) + row.get("perf/engine_cpu_s", 0.0) for row in rows]
    return np.cumsum(spent).tolist()


def interquartile_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Compute the interquartile mean and the ends of its 95 % percentile bootstrap interval.

    Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021). A quarter of
    the values is left out at each end, rounded down, so this is the mean of up to three values.
    """
    found, cut = np.asarray(values, dtype=float), len(values) // 4
    draws = found[np.random.RandomState(0).randint(len(found), size=(REPETITIONS, len(found)))]
    means = [np.sort(x)[..., cut : len(found) - cut].mean(-1) for x in (found, draws)]
    low, high = np.percentile(means[1], [2.5, 97.5])
    return float(means[0]), float(low), float(high)


def markdown(first: str, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; `first` is the heading of the rows' names."""
    head = f"| {first} | {' | '.join(titles)} |"
    return [head, "|" + "---|" * (head.count("|") - 1), *(f"| {name} | {' | '.join(rows[name])} |" for name in rows)]


def iqm_cell(values: Sequence[float], form: str) -> str:
    """Return a table's cell: interquartile mean and interval."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else "-"
    mean, low, high = interquartile_mean(values)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def mean_cell(values: Sequence[float], form: str) -> str:
    """Return a table's cell: mean ± standard error."""
    if not values:
        return "-"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:{form}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{error}"


LOOKS = {8: 0.01, 12: 0.015, 20: 0.025}
"""Numbers of seeds at which a contrast may be decided, and the error level of each look; they add up to 5 %."""
MARGIN = 0.05
"""At the last look, "no difference" means that the 90 % interval lies within this distance of 0."""


@dataclass(frozen=True)
class Result:
    """A contrast at one look."""

    name: str
    values: tuple[float, ...]
    """One value per seed."""
    p: float | None
    """Of the exact sign-flip test, two-sided; None before the first look at this contrast."""
    adjusted: float | None
    """After Holm's correction over the contrasts tested at this look."""
    verdict: str


def sign_flip_p(values: Sequence[float]) -> float:
    """Compute the share of all 2^n ways to flip signs whose sum is at least as far from 0 as the observed one.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return float((np.abs(sums) >= abs(sum(values)) - 1e-9).mean())


def holm(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Adjust by Holm's step-down method: p-values that may each be compared with the joint error level.

    With more `tests` than p-values, those still missing count as larger than all that are known, which is conservative.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, ((tests or len(p_values)) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute Student's 90 % t interval of the mean."""
    from scipy import stats

    mean, error = float(np.mean(values)), float(stats.sem(values))
    reach = float(stats.t.ppf(0.95, len(values) - 1)) * error  # `t.interval` is nan for equal values
    return mean - reach, mean + reach


def areas(study: Study, runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Compute areas under curves by variant and seed, over the turns that every finished run has played."""
    done = [run for run in runs if run.done]
    end = min((run.total("turns") for run in done), default=0.0)
    found: dict[str, dict[int, float]] = {variant: {} for variant in study.variants}
    for run in done:
        mean = run.mean_result("turns", end)
        if mean is not None:
            found[run.variant][run.seed] = study.score(mean)
    return found


def results(study: Study, runs: Sequence[Run]) -> list[Result]:
    """Decide every contrast at the latest look that its seeds allow; before its first look it has no verdict.

    With eight seeds p is at least 2/256, which a correction over several contrasts would put out of reach, so the first
    look tests the primary contrast alone. What a look has decided stays decided.
    """
    found = areas(study, runs)
    values: dict[str, list[float]] = {}
    for name, signs in study.contrasts.items():  # of each seed whose runs are all finished
        whole = [seed for seed in study.seeds if all(seed in found[variant] for variant in signs)]
        values[name] = [sum(sign * found[variant][seed] for variant, sign in signs.items()) for seed in whole]
    decided: dict[str, Result] = {}
    for look, alpha in LOOKS.items():
        planned = list(values)[: 1 if look == min(LOOKS) else None]
        tested = [name for name in planned if len(values[name]) >= look]
        p_values = [sign_flip_p(values[name][:look]) for name in tested]
        for name, p, adjusted in zip(tested, p_values, holm(p_values, len(planned)), strict=True):
            if name not in decided or decided[name].verdict.startswith("open"):
                verdict = _verdict(values[name][:look], adjusted, alpha, last=look == max(LOOKS))
                decided[name] = Result(name, tuple(values[name][:look]), p, adjusted, verdict)
    primary = next(iter(values), None)
    first = {name: sorted(LOOKS)[name != primary] for name in values}
    early = lambda name: f"open: {len(values[name])} of {first[name]} seeds for its first look"
    return [decided.get(name) or Result(name, tuple(values[name]), None, None, early(name)) for name in values]


def _verdict(values: Sequence[float], adjusted: float, alpha: float, *, last: bool) -> str:
    if adjusted <= alpha:
        return "yes" if np.mean(values) > 0 else "yes, the other way round"
    if not last:
        return f"open after {len(values)} seeds"
    low, high = interval(values)
    return f"no difference above {MARGIN}" if low >= -MARGIN and high <= MARGIN else "cannot tell"


def contrast_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of the contrasts, the primary one first."""
    titles = ["seeds", "mean", "standard deviation", "90 % interval", "p", "after Holm", "verdict"]
    rows = {}
    for found in results(study, runs):
        values = found.values
        numbers = ["-"] * 5
        if len(values) > 1:
            low, high = interval(values)
            spread = f"{np.std(values, ddof=1):.3f}"
            numbers[:3] = [f"{np.mean(values):.3f}", spread, f"{low:.3f} to {high:.3f}"]
        if found.p is not None:
            numbers[3:] = [f"{found.p:.4f}", f"{found.adjusted:.4f}"]
        rows[found.name] = [str(len(values)), *numbers, found.verdict]
    return markdown("contrast", titles, rows)


def area_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of the variants: scores, areas, seeds that end below their start, updates, CPU time."""
    found, done, rows = areas(study, runs), [run for run in runs if run.done], {}
    titles = ["seeds", "score before", "score after", "area", "seeds that end below their start", "updates", "CPU, s"]
    for variant in study.variants:
        mine = [run for run in done if run.variant == variant]
        columns = [run.columns() for run in mine]
        numbers = lambda key, columns=columns: [value for row in columns if (value := row[key]) is not None]
        before, after = ([study.score(value) for value in numbers(key)] for key in ("before", "after"))
        fallen = sum(end < start for start, end in zip(before, after, strict=True))
        cells = [mean_cell(before, ".3f"), iqm_cell(after, ".3f"), mean_cell(list(found[variant].values()), ".3f")]
        cells += [f"{fallen} of {len(mine)}", mean_cell([run.rows[-1]["update"] for run in mine], ".0f")]
        rows[variant] = [str(len(mine)), *cells, mean_cell(numbers("cpu"), ".0f")]
    return markdown("variant", titles, rows)
