"""A study's table, plot and CSV files, from the rows that its runs wrote."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from embedded.run.log import actor_fault
from embedded.studies.plots import plot
from embedded.studies.results import MEASURES, Run, iqm_cell, mean_cell, read_runs
from embedded.studies.study import Study

COLUMNS = (
    ("{measure} before", "before", ".3f"),
    ("{measure} after", "after", ".3f"),
    ("mean {measure} over equal turns", "mean_by_turns", ".3f"),
    ("turns per episode after", "length", ".1f"),
    ("value loss", "value_loss", ".4f"),
    ("explained variance", "explained_variance", ".2f"),
    ("turns played", "turns", ".0f"),
    ("CPU, s", "cpu", ".0f"),
)
TIME_COLUMNS = (
    ("{measure} before", "before", ".3f"),
    ("{measure} after", "after", ".3f"),
    ("mean {measure} over equal turns", "mean_by_turns", ".3f"),
    ("mean {measure} over equal time", "mean_by_seconds", ".3f"),
    ("staleness", "staleness", ".2f"),
    ("explained variance", "explained_variance", ".2f"),
    ("wall time, s", "seconds", ".0f"),
    ("trainer CPU, s", "trainer_cpu", ".0f"),
    ("engine CPU, s", "engine_cpu", ".0f"),
)
"""For studies with `compares_time`."""
AGGREGATED = ("after", "mean_by_turns", "mean_by_seconds")
"""Columns with interquartile means and bootstrap intervals. The others have means and standard errors."""
NOTE = (
    "Held-out results after training are interquartile means over seeds, with 95 % bootstrap intervals; with fewer "
    "than four seeds, that is the plain mean. Other columns are means ± standard errors. Losses are means over "
    "the updates that trained the actor. Means over equal turns or time are of the held-out curve, from the first "
    "update to the end of the shortest run in the table. Time is without evaluations and checkpoints."
)
COUNTS = ("update", "turns", "seconds")
"""What every row has."""


def write_report(folder: Path, study: Study) -> str:
    """Write `table.md`, `runs.csv`, `raw.csv` and `plot.png` into the study's folder, and return the table as text."""
    runs = read_runs(folder, study)
    write_csv(folder / "raw.csv", runs)
    write_summary_csv(folder / "runs.csv", runs)
    text = table(study, runs)
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(folder / "plot.png", study, runs)
    return f"{text}\nwritten to {folder}/: table.md, plot.png, runs.csv, raw.csv"


def faults_of(runs: Sequence[Run]) -> list[str]:
    """A sentence for each finished run whose actor learned nothing."""
    found = [(run, actor_fault(run.rows)) for run in runs if run.done]
    return [f"{run.variant} seed {run.seed}: {fault}" for run, fault in found if fault]


def table(study: Study, runs: Sequence[Run]) -> str:
    """The study's table with its question and notes; runs that are not finished are named and not counted."""
    open_runs = [f"{run.variant} seed {run.seed}" for run in runs if not run.done]
    notes = [NOTE, study.note]
    notes += [f"Not finished, and not counted: {', '.join(open_runs)}."] if open_runs else []
    notes += [f"Warning, {fault}." for fault in faults_of(runs)]
    lines = [f"**{study.question}**", "", *table_lines(study, [run for run in runs if run.done])]
    return "\n".join([*lines, "", *(note for note in notes if note)]) + "\n"


def table_lines(study: Study, runs: Sequence[Run]) -> list[str]:
    """One Markdown row per variant, and a second table if there are several held-out tasks."""
    columns = TIME_COLUMNS if study.compares_time else COLUMNS
    runs = [run for run in runs if run.rows]
    shortest = {over: min((run.total(over) for run in runs), default=0.0) for over in ("turns", "seconds")}
    rows = {}
    for variant in study.variants:
        mine = [run for run in runs if run.variant == variant]
        means = [{f"mean_by_{over}": run.mean_result(over, end) for over, end in shortest.items()} for run in mine]
        found = [{**run.columns(), **mean} for run, mean in zip(mine, means, strict=True)]
        rows[f"{variant} | {len(mine)}"] = [_cell(found, key, form) for _, key, form in columns]
    titles = [title.format(measure=MEASURES[study.measure]) for title, _, _ in columns]
    return [*_markdown("variant | seeds", titles, rows), *_task_table(study, runs)]


def _task_table(study: Study, runs: Sequence[Run]) -> list[str]:
    tasks = sorted({task for run in runs for task in run.task_results()})
    if not tasks:
        return []
    rows = {}
    for variant in study.variants:
        results = [run.task_results() for run in runs if run.variant == variant]
        rows[variant] = [iqm_cell([found[task] for found in results if task in found], ".3f") for task in tasks]
    return ["", *_markdown("win rate after, by held-out task", tasks, rows)]


def _markdown(first: str, titles: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    head = f"| {first} | {' | '.join(titles)} |"
    return [head, "|" + "---|" * (head.count("|") - 1), *(f"| {name} | {' | '.join(rows[name])} |" for name in rows)]


def _cell(found: Sequence[Mapping[str, float | None]], key: str, form: str) -> str:
    values = [value for row in found if (value := row[key]) is not None]
    return iqm_cell(values, form) if key in AGGREGATED else mean_cell(values, form)


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every number of every update and evaluation, with six digits."""
    names = sorted({key for run in runs for row in run.rows for key in row} - set(COUNTS))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *COUNTS, *names])
        writer.writeheader()
        for run in runs:
            short = [{key: f"{value:.6g}" for key, value in row.items()} for row in run.rows]
            about = {"variant": run.variant, "seed": run.seed, "finished": run.done}
            writer.writerows({**about, **row} for row in short)


def write_summary_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write one row per run, with the table's columns."""
    names = list(Run("", 0, [], False).columns())
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["variant", "seed", "finished", *names])
        writer.writeheader()
        writer.writerows({"variant": r.variant, "seed": r.seed, "finished": r.done, **r.columns()} for r in runs)
