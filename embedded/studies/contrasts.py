"""Compares the variants of a study by contrasts that were fixed before it ran, with exact tests and planned looks.

A contrast adds up areas under held-out curves with signs, for example dual_400 - rloo_400 - dual_25 + rloo_25. Seeds
are paired: each gives one value. The first contrast of a study is the primary one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedded.studies.results import Run, iqm_cell, markdown, mean_cell
from embedded.studies.study import Study

LOOKS = {8: 0.01, 12: 0.015, 20: 0.025}
"""Numbers of seeds at which a contrast may be decided, and the error level of each look; they add up to 5 %. A study of
at most eight seeds has one look, at the end."""
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
        if (mean := run.mean_result("turns", end)) is not None:
            found[run.variant][run.seed] = study.score(mean)
    return found


def results(study: Study, runs: Sequence[Run]) -> list[Result]:
    """Decide every contrast at the latest look that its seeds allow; before its first look it has no verdict.

    With eight seeds p is at least 2/256, which a correction over several contrasts would put out of reach, so the first
    of several looks tests the primary contrast alone. What a look has decided stays decided, so a seed counts only once
    all seeds before it are finished.
    """
    found = areas(study, runs)
    looks = LOOKS if len(study.seeds) > min(LOOKS) else {len(study.seeds): sum(LOOKS.values())}
    values: dict[str, list[float]] = {}
    for name, signs in study.contrasts.items():
        is_whole = lambda seed, signs=signs: all(seed in found[variant] for variant in signs)
        whole = itertools.takewhile(is_whole, study.seeds)
        values[name] = [sum(sign * found[variant][seed] for variant, sign in signs.items()) for seed in whole]
    decided: dict[str, Result] = {}
    for look, alpha in looks.items():
        planned = list(values)[: 1 if look == min(looks) < max(looks) else None]
        tested = [name for name in planned if len(values[name]) >= look]
        p_values = [sign_flip_p(values[name][:look]) for name in tested]
        for name, p, adjusted in zip(tested, p_values, holm(p_values, len(planned)), strict=True):
            if name not in decided or decided[name].verdict.startswith("open"):
                verdict = _verdict(values[name][:look], adjusted, alpha, last=look == max(looks))
                decided[name] = Result(name, tuple(values[name][:look]), p, adjusted, verdict)
    primary = next(iter(values), None)
    first = {name: sorted(looks)[name != primary and len(looks) > 1] for name in values}
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
            numbers[:3] = [f"{np.mean(values):.3f}", f"{np.std(values, ddof=1):.3f}", f"{low:.3f} to {high:.3f}"]
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
