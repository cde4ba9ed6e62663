"""Reads the settings of an evaluation (`SweepPoint`), and makes its table: mean ± standard error
per setting and task.

The YAML with `--set` and `--sweep` gives the points: checked settings, and the episodes to play
with each.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from inspection.evaluate import pairs
from inspection.records import Record
from inspection.target import evaluated
from inspection.text import align
from rollout.bridge.settings import (
    RolloutSettings,
    check_keys,
    read_value,
    set_key,
    split_assignment,
)
from rollout.play.memory import build_memory
from rollout.spec import DEFAULT_MAX_TURNS, EpisodeSpec
from rollout.tasks import held_out_episodes, panel_hash, read_tasks, try_each_task
from slime_verlog import ConfigError

Key = tuple[str, str, int, int]
"""Setting, task name, seed and repeat: what tells the episodes of one player apart."""
SPEED_KEYS = (
    "n_env",
    "env_backend",
    "env_workers",
    "env_step_timeout_s",
    "env_reset_timeout_s",
    "engine",
)
"""YAML keys that do not change which episodes are played, nor how."""
COLUMNS = {**pairs.COLUMNS, "valid_action_ratio": "valid actions"}
"""Titles of the columns that every environment has, by key of the record."""
DASH = "–"


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep, or the only one."""

    values: Record
    """The swept keys."""
    config: Record
    """The YAML's mapping at this point."""
    settings: RolloutSettings
    repeats: int = 1

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "-"

    @cached_property
    def episodes(self) -> dict[Key, EpisodeSpec]:
        """The held-out episodes."""
        specs = held_out_episodes(self.settings, read_tasks(self.settings, self.settings.eval))
        found = {}
        for repeat, spec in itertools.product(range(self.repeats), specs):
            key = (self.label, spec.name, spec.env.metadata["seed"], repeat)
            # The sampling depends on the episode's id.
            found[key] = replace(spec, episode_id=spec.episode_id + repeat * len(specs))
        return found

    @cached_property
    def panel(self) -> str:
        """Hash of the held-out episodes."""
        return panel_hash(self.episodes.values())


def read_sweep(options: Namespace) -> tuple[Record, list[SweepPoint]]:
    """Return the mapping with `--set` and the sweep's points; tries every task, or raises
    SlimeVerlogError."""
    config = evaluated(options)
    given = {split_assignment(text, "--set", "n_env=8")[0] for text in options.set}
    points = []
    for values in sweep_points(options.sweep):
        swept = config
        for key, value in values.items():
            if key in given:
                raise ConfigError(f"{key} is given by --set and by --sweep; leave one of them out")
            swept = set_key(swept, key, value)
        settings = check_keys(swept)
        build_memory(settings.memory)
        points.append(SweepPoint(values, swept, settings, options.repeats))
    twice = [a.label for a, b in itertools.combinations(points, 2) if a.label == b.label]
    if twice:
        raise ConfigError(f"--sweep has {twice[0]} twice")
    for settings in {point.panel: point.settings for point in points}.values():
        for note in try_each_task(settings):
            print(f"note: {note}", file=sys.stderr)
    return config, points


def sweep_points(sweeps: Sequence[str]) -> list[Record]:
    """Return every combination of `key=v1,v2,...`, or one empty point; raises ConfigError for
    another form."""
    axes: list[list[tuple[str, Any]]] = []
    for sweep in sweeps:
        key, values = split_assignment(sweep, "--sweep", "memory.n=1,2,4")
        if any(key == other for axis in axes for other, _ in axis):
            raise ConfigError(f"--sweep {key} is given twice; give all its values at once")
        axes.append([(key, value) for value in read_value(f"[{values}]", sweep)])
    return [dict(point) for point in itertools.product(*axes)]


def without_speed(config: Record) -> Record:
    """Return the mapping without keys that only change how fast episodes are played, and how
    many."""
    held_out = {
        key: value for key, value in (config.get("eval") or {}).items() if key != "episodes"
    }
    kept = {key: value for key, value in config.items() if key not in (*SPEED_KEYS, "eval")}
    return {**kept, "eval": held_out}


@dataclass(frozen=True)
class Cell:
    """Mean and standard error of a column; None where there are too few episodes."""

    mean: float | None
    se: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        n = len(values)
        se = statistics.stdev(values) / n**0.5 if n > 1 else None
        return cls(statistics.fmean(values) if n else None, se, n)

    def text(self, digits: int = 3) -> str:
        if self.mean is None:
            return DASH
        error = DASH if self.se is None else f"{self.se:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {error}"


@dataclass(frozen=True)
class Table:
    """One row per setting and task, where `all` stands for all tasks together, and how to read
    them.

    Standard errors are over seeds: the repeats of a seed count as their mean. A row has the numbers
    of episodes `n` (in the means), `failed` (excluded: the environment was lost, or the prompt was
    refused) and `context` (in the means; ended because the next prompt was too long). Then come the
    fields of a `Cell` for each of `COLUMNS`, and under `metrics` for each of the environment's own
    numbers.
    """

    rows: Sequence[Record]
    caption: str

    def as_json(self) -> str:
        """All rows with all metrics."""
        return (
            json.dumps({"caption": self.caption, "rows": self.rows}, indent=1, default=str) + "\n"
        )

    def as_markdown(self) -> str:
        """An aligned table with the caption below it, for documents and the terminal."""
        names, (titles, *lines) = self._grid()
        lines = [[_in_markdown(cell) for cell in line] for line in lines]
        marks = ["---"] * names + ["---:"] * (len(titles) - names)
        rows = align([titles, marks, *lines], names, border=" | ")
        return "\n".join([*(f"| {row} |" for row in rows), "", self.caption, ""])

    def _grid(self) -> tuple[int, list[list[str]]]:
        """How many columns name a row, and the titles and rows as texts.

        Left out are the environment's numbers of a group, such as `achievement/place_stone`.
        """
        names = ["setting", "task"] if any(row["point"] for row in self.rows) else ["task"]
        counts = ["n", "failed", *(["context"] if any(row["context"] for row in self.rows) else [])]
        metrics = sorted({name for row in self.rows for name in row["metrics"] if "/" not in name})
        lines = [
            [*names, *counts, *COLUMNS.values(), *(name.replace("_", " ") for name in metrics)]
        ]
        for row in self.rows:
            cells = [str(row[name]) for name in (*names, *counts)]
            for name in COLUMNS:
                cells.append(Cell(**row[name]).text(1 if name == "turns" else 3))
            for name in metrics:
                cells.append(
                    Cell(**row["metrics"][name]).text() if name in row["metrics"] else DASH
                )
            lines.append(cells)
        return len(names), lines


def _in_markdown(cell: str) -> str:
    """Return a text that neither ends its cell nor its row."""
    return " ".join(cell.replace("|", "\\|").split())


def build_table(player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Record]) -> Table:
    """Return the table of the episodes that the points name, as far as they were played."""
    table: list[Record] = []
    for point in points:
        about = {
            "setting": point.label,
            "point": point.values,
            "player": player,
            "panel": point.panel,
        }
        played = [rows[key] for key in point.episodes if key in rows]
        tasks = dict.fromkeys(task for _, task, _, _ in point.episodes)
        for task in tasks:
            of_task = [row for row in played if row["task_name"] == task]
            table.append({**about, "task": task, **_means(of_task, point.repeats)})
        if len(tasks) > 1:
            table.append({**about, "task": "all", **_means(played, point.repeats)})
    return Table(table, _caption(player, points, rows))


def _means(episodes: Sequence[Record], most_repeats: int) -> Record:
    good = [episode for episode in episodes if episode["stop"] != "failed"]
    by_seed: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for episode in good:
        by_seed[episode["task_name"], episode["seed"]].append(episode)
    columns = {name: [_mean(repeats, name) for repeats in by_seed.values()] for name in COLUMNS}
    metrics: dict[str, list[float]] = defaultdict(list)
    for repeats in by_seed.values():
        own = [episode["metrics"] for episode in repeats]
        for name in dict.fromkeys(itertools.chain(*own)):
            metrics[name].append(_mean([numbers for numbers in own if name in numbers], name))
        won = sum(bool(episode["success"]) for episode in repeats)
        lost = len(repeats) - won
        for k in range(2, min(len(repeats), most_repeats) + 1):
            choices = math.comb(len(repeats), k)
            metrics[f"pass@{k}"].append(1 - math.comb(lost, k) / choices)
            metrics[f"pass^{k}"].append(math.comb(won, k) / choices)
    return {
        "n": len(good),
        "failed": len(episodes) - len(good),
        "context": sum(episode["stop"] == "context" for episode in good),
        **_cells(columns),
        "metrics": _cells(metrics),
    }


def _mean(records: Sequence[Record], name: str) -> float:
    return statistics.fmean(record[name] for record in records)


def _cells(columns: Mapping[str, Sequence[float]]) -> Record:
    return {name: vars(Cell.of(values)) for name, values in columns.items()}


def _caption(player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Record]) -> str:
    wanted = [key for point in points for key in point.episodes]
    played = [rows[key] for key in wanted if key in rows]
    stops = Counter(row["stop"] for row in played)
    seeds = [seed for _, _, seed, _ in wanted]
    panels = dict.fromkeys(point.panel for point in points)
    repeats = points[0].repeats
    sentences = [
        f"Player {player}, held-out seeds {min(seeds)} to {max(seeds)}: mean ± standard error "
        "over n episodes.",
        f"Held-out panel: {', '.join(panels)}.",
        "An episode is won if its progression reaches 1.",
    ]
    if repeats > 1:
        sentences.append(
            f"Each seed was played {repeats} times; pass@k: one of k repeats wins, pass^k: all k "
            "win."
        )
    if failed := stops["failed"]:
        sentences.append(
            f"{failed} failed episodes (environment lost, or prompt refused) are not part of the "
            "means."
        )
    if cut := stops["context"]:
        sentences.append(
            f"{cut} episodes ended because the next prompt was too long (context); they are in the "
            "means."
        )
    if endless := sum(row["stop"] == "max_turns" and row["max_turns"] is None for row in played):
        why = "because neither eval.max_turns nor the environment limits them"
        sentences.append(f"{endless} episodes were ended after {DEFAULT_MAX_TURNS} turns, {why}.")
    used = Counter[str]()
    for row in played:
        used.update(row.get("usage", {}))
    if used:
        tokens = f"read {used['prompt_tokens']:,} and wrote {used['completion_tokens']:,} tokens"
        empty = f" ({used['empty']:,} answers were empty)" if used["empty"] else ""
        sentences.append(f"The endpoint answered {used['answers']:,} times{empty}, {tokens}.")
    if len(played) < len(wanted):
        sentences.append(f"Incomplete: {len(played)} of {len(wanted)} episodes were played.")
    return " ".join(sentences)
