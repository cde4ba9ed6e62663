"""Compares the variants of a study by contrasts that were fixed before it ran, with exact tests and
planned looks.

A contrast adds up areas under held-out curves, or another number of each run, with signs, for
example dual_400 - rloo_400 - dual_25 + rloo_25. Seeds are paired: each gives one value. The first
contrast of a study is the primary one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from embedded.studies.results import Run, iqm_cell, markdown, mean_cell
from embedded.studies.study import Study

LOOKS = {8: 0.01, 12: 0.015, 20: 0.025}
"""Numbers of seeds at which a contrast may be decided, and the error level of each look; they add
up to 5 %. A study of at most eight seeds has one look, at the end."""
SHARED = "rollout/shared_state_ratio"
MARGIN = 0.05
"""At the last look, "no difference" means that the 90 % interval lies within this distance of 0."""


@dataclass(frozen=True)
class Result:
    """A contrast at one look."""

    name: str
    values: Sequence[float]
    """One value per seed."""
    verdict: str
    p: float | None = None
    """Of the exact sign-flip test, two-sided; None before the first look at this contrast."""
    adjusted: float | None = None
    """After Holm's correction over the contrasts tested at this look."""


def sign_flip_p(values: Sequence[float]) -> float:
    """Compute the share of all 2^n ways to flip signs whose sum is at least as far from 0 as the
    observed one.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    is_as_far = np.abs(sums) >= abs(sum(values)) - 1e-9
    return float(is_as_far.mean())


def holm(p_values: Sequence[float], tests: int) -> list[float]:
    """Adjust by Holm's step-down method: p-values that may each be compared with the joint error
    level.

    With more `tests` than p-values, those still missing count as larger than all that are known,
    which is conservative.

    >>> holm([0.01, 0.04, 0.03], tests=3)
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    ascending = np.argsort(p_values).tolist()
    for rank, place in enumerate(ascending):
        corrected = min(1.0, (tests - rank) * p_values[place])
        largest = max(largest, corrected)
        adjusted[place] = largest
    return adjusted


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute Student's 90 % t interval of the mean."""
    mean = float(np.mean(values))
    quantile = float(stats.t.ppf(0.95, len(values) - 1))
    reach = quantile * float(stats.sem(values))  # `t.interval` is nan for equal values
    return mean - reach, mean + reach


def areas(study: Study, runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Compute areas under curves by variant and seed, over the turns that every finished run has
    played."""
    done = [run for run in runs if run.done]
    turns = [run.total("turns") for run in done]
    end = min(turns, default=0.0)
    found: dict[str, dict[int, float]] = {variant: {} for variant in study.variants}
    for run in done:
        mean = run.mean_result(end)
        if mean is not None:
            found[run.variant][run.seed] = study.score(mean)
    return found


def numbers(study: Study, runs: Sequence[Run]) -> dict[str, dict[int, float]]:
    """Compute what contrasts add up, by variant and seed: `study.compared` of every finished run,
    or areas."""
    if study.compared is None:
        return areas(study, runs)
    found: dict[str, dict[int, float]] = {variant: {} for variant in study.variants}
    for run in runs:
        if run.done:
            found[run.variant][run.seed] = run.late_mean(study.compared)
    return found


def results(study: Study, runs: Sequence[Run]) -> list[Result]:
    """Decide every contrast at the latest look that its seeds allow; before its first look it has
    no p-value.

    With eight seeds p is at least 2/256, which a correction over several contrasts would put out of
    reach, so the first of several looks tests the primary contrast alone. What a look has decided
    stays decided.
    """
    found = numbers(study, runs)
    values = {}
    decided = {}
    for name, signs in study.contrasts.items():
        values[name] = _paired(study, found, signs)
        decided[name] = Result(name, values[name], f"open after {len(values[name])} seeds")
    looks = LOOKS if len(study.seeds) > min(LOOKS) else {len(study.seeds): 0.05}
    first = min(looks)
    last = max(looks)
    for look, alpha in looks.items():
        planned = list(values)
        if look == first < last:
            planned = planned[:1]
        seen = {name: values[name][:look] for name in planned if len(values[name]) >= look}
        p_values = [sign_flip_p(own) for own in seen.values()]
        corrected = holm(p_values, len(planned))
        for (name, own), p, adjusted in zip(seen.items(), p_values, corrected, strict=True):
            if decided[name].verdict.startswith("open"):
                verdict = _verdict(own, adjusted, alpha, last=look == last)
                decided[name] = Result(name, own, verdict, p, adjusted)
    return list(decided.values())


def _paired(
    study: Study, found: Mapping[str, Mapping[int, float]], signs: Mapping[str, float]
) -> list[float]:
    """Return a contrast's value for each seed, up to the first seed that lacks a run.

    A run that is repeated later must not change which seeds a look sees.
    """
    values = []
    for seed in study.seeds:
        if any(seed not in found[variant] for variant in signs):
            break
        signed = [sign * found[variant][seed] for variant, sign in signs.items()]
        values.append(sum(signed))
    return values


def _verdict(values: Sequence[float], adjusted: float, alpha: float, *, last: bool) -> str:
    if adjusted <= alpha:
        return "yes" if np.mean(values) > 0 else "yes, the other way round"
    if not last:
        return f"open after {len(values)} seeds"
    low, high = interval(values)
    is_small = low >= -MARGIN and high <= MARGIN
    return f"no difference above {MARGIN}" if is_small else "cannot tell"


def contrast_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of the contrasts, the primary one first."""
    titles = ["seeds", "mean", "standard deviation", "90 % interval", "p", "after Holm", "verdict"]
    rows = {}
    for result in results(study, runs):
        values = result.values
        spread = ["-"] * 3
        tested = ["-"] * 2
        if len(values) > 1:
            low, high = interval(values)
            spread = [
                f"{np.mean(values):.3f}",
                f"{np.std(values, ddof=1):.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        if result.p is not None:
            tested = [f"{result.p:.4f}", f"{result.adjusted:.4f}"]
        rows[result.name] = [str(len(values)), *spread, *tested, result.verdict]
    return markdown("contrast", titles, rows)


def area_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """Return a Markdown table of the variants: scores, areas, seeds that end below their start,
    updates, CPU time.

    A study that compares a metric has a column with it. If a run trained without a critic and
    logged it, there is a column with the share of turns in a state with company.
    """
    titles = [
        "seeds",
        "score before",
        "score after",
        "area",
        "seeds that end below their start",
        "updates",
        "CPU, s",
    ]
    if study.compared is not None:
        titles.append(study.compared)
    compared = numbers(study, runs)
    has_shares = any(run.trained_mean(SHARED) is not None for run in runs)
    if has_shares:
        titles.append("turns that share their prompt")
    area_of = areas(study, runs)
    rows = {}
    for variant in study.variants:
        mine = [run for run in runs if run.done and run.variant == variant]
        before = [study.score(run.results()[0]) for run in mine]
        after = [study.score(run.results()[-1]) for run in mine]
        fallen = [end for start, end in zip(before, after, strict=True) if end < start]
        cells = [str(len(mine)), mean_cell(before, ".3f"), iqm_cell(after, ".3f")]
        cells.append(mean_cell(list(area_of[variant].values()), ".3f"))
        cells.append(f"{len(fallen)} of {len(mine)}")
        cells.append(mean_cell([run.rows[-1]["update"] for run in mine], ".0f"))
        cells.append(mean_cell([run.total("cpu") for run in mine], ".0f"))
        if study.compared is not None:
            cells.append(mean_cell(list(compared[variant].values()), ".3f"))
        if has_shares:
            shares = [run.trained_mean(SHARED) for run in mine]
            cells.append(mean_cell([share for share in shares if share is not None], ".2f"))
        rows[variant] = cells
    return markdown("variant", titles, rows)
