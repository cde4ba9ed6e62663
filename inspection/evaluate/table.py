"""Reads the settings of an evaluation (`SweepPoint`), and makes its table: mean ± standard error per setting and task.

The YAML with `--set` and `--sweep` gives the points: checked settings, and the episodes to play with each.
"""

from __future__ import annotations

import csv
import io
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
from inspection.text import align
from rollout.bridge.settings import RolloutSettings, check_keys, read_value, set_key, split_assignment, with_assignments
from rollout.play.memory import build_memory
from rollout.spec import DEFAULT_MAX_TURNS, EpisodeSpec
from rollout.tasks import held_out_episodes, read_tasks, try_each_task
from slime_verlog import ConfigError, read_yaml_mapping

Key = tuple[str, str, int, int]
"""Setting, task name, seed and repeat: what tells the episodes of one player apart."""
SPEED_KEYS = ("n_env", "env_backend", "env_workers", "env_step_timeout_s", "env_reset_timeout_s", "engine")
"""YAML keys that do not change which episodes are played, nor how."""
COLUMNS = {**pairs.COLUMNS, "valid_action_ratio": "valid actions"}
"""Titles of the columns that every environment has, by key of the record."""
COUNTS = ("n", "failed", "context")
"""Columns that count episodes, as `Table` explains them."""
DASH = "–"


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep, or the only one."""

    values: Mapping[str, Any]
    """The swept keys."""
    config: Mapping[str, Any]
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

    @property
    def world(self) -> str:
        """Equal for points with the same environments."""
        settings = self.settings
        parts = (settings.rollout_interaction_env_path, settings.env, settings.tasks, settings.eval.tasks)
        return json.dumps([*parts, settings.max_turns, settings.eval.max_turns], default=str, sort_keys=True)


def read_sweep(options: Namespace) -> tuple[dict[str, Any], list[SweepPoint]]:
    """Return the mapping with `--set` and the sweep's points; tries every task, or raises SlimeVerlogError."""
    config = with_assignments(read_yaml_mapping(options.config, "YAML"), options.set, "--set")
    for key, given in {"eval.episodes": options.episodes, "n_env": options.concurrency}.items():
        config = config if given is None else set_key(config, key, given)
    points = []
    for values in sweep_points(options.sweep):
        swept = config
        for key, value in values.items():
            swept = set_key(swept, key, value)
        settings = check_keys(swept)
        build_memory(settings.memory)
        points.append(SweepPoint(values, swept, settings, options.repeats))
    twice = [a.label for a, b in itertools.combinations(points, 2) if a.label == b.label]
    if twice:
        raise ConfigError(f"--sweep has {twice[0]} twice")
    for settings in {point.world: point.settings for point in points}.values():
        for note in try_each_task(settings):
            print(f"note: {note}", file=sys.stderr)
    return config, points


def sweep_points(sweeps: Sequence[str]) -> list[dict[str, Any]]:
    """Return every combination of `key=v1,v2,...`, or one empty point; raises ConfigError for another form."""
    axes: list[list[tuple[str, Any]]] = []
    for sweep in sweeps:
        key, values = split_assignment(sweep, "--sweep", "memory.n=1,2,4")
        axes.append([(key, value) for value in read_value(f"[{values}]", sweep)])
    return [dict(point) for point in itertools.product(*axes)]


def without_speed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping without keys that only change how fast episodes are played, and how many."""
    held_out = {key: value for key, value in (config.get("eval") or {}).items() if key != "episodes"}
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
        return f"{self.mean:.{digits}f} ± " + (f"{self.se:.{digits}f}" if self.se is not None else DASH)


@dataclass(frozen=True)
class Table:
    """One row per setting and task, where `all` stands for all tasks together, and how to read them.

    Standard errors are over seeds: the repeats of a seed count as their mean. A row has the numbers of episodes `n` (in
    the means), `failed` (excluded: the environment was lost, or the prompt was refused) and `context` (in the means;
    ended because the next prompt was too long). Then come the fields of a `Cell` for each of `COLUMNS`, and under
    `metrics` for each of the environment's own numbers.
    """

    rows: Sequence[Mapping[str, Any]]
    caption: str

    def as_json(self) -> str:
        """All rows with all metrics."""
        return json.dumps({"caption": self.caption, "rows": self.rows}, indent=1, default=str) + "\n"

    def as_csv(self) -> str:
        """One line per row; each column has a second one with its standard error."""
        metrics = sorted({name for row in self.rows for name in row["metrics"]})
        head = ("setting", "task", "player", *COUNTS)
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*head, *(f"{name}{end}" for name in (*COLUMNS, *metrics) for end in ("", "_se"))])
        for row in self.rows:
            cells = [row[name] for name in COLUMNS] + [row["metrics"].get(name, {}) for name in metrics]
            writer.writerow([*(row[key] for key in head), *(cell.get(key) for cell in cells for key in ("mean", "se"))])
        return out.getvalue()

    def as_text(self) -> str:
        """For the terminal: aligned columns."""
        names, lines = self._grid()
        return "\n".join(align(lines, names)) + f"\n\n{self.caption}"

    def as_markdown(self) -> str:
        """For documents: a table with the caption below it."""
        names, (titles, *lines) = self._grid()
        marks = ["---"] * names + ["---:"] * (len(titles) - names)
        return "\n".join(f"| {' | '.join(line)} |" for line in (titles, marks, *lines)) + f"\n\n{self.caption}\n"

    def _grid(self) -> tuple[int, list[list[str]]]:
        """How many columns name a row, and the titles and rows as texts.

        Left out are the environment's numbers of a group, such as `achievement/place_stone`.
        """
        names = ["setting", "task"] if any(row["point"] for row in self.rows) else ["task"]
        names += ["player"] if len({row["player"] for row in self.rows}) > 1 else []
        counts = [name for name in COUNTS if name != "context" or any(row["context"] for row in self.rows)]
        metrics = sorted({name for row in self.rows for name in row["metrics"] if "/" not in name})
        lines = [[*names, *counts, *COLUMNS.values(), *(name.replace("_", " ") for name in metrics)]]
        for row in self.rows:
            cells = [Cell(**row[name]).text(1 if name == "turns" else 3) for name in COLUMNS]
            cells += [Cell(**row["metrics"][name]).text() if name in row["metrics"] else DASH for name in metrics]
            lines.append([*(str(row[name]) for name in (*names, *counts)), *cells])
        return len(names), lines


def build_table(
    player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Mapping[str, Any]], price: Sequence[float] | None
) -> Table:
    """Return the table of the episodes that the points name, as far as they were played.

    `price`: dollars per million tokens that an endpoint reads and writes; the caption then has the cost.
    """
    table: list[Mapping[str, Any]] = []
    for point in points:
        about = {"setting": point.label, "point": dict(point.values), "player": player}
        tasks = list(dict.fromkeys(task for _, task, _, _ in point.episodes))
        played = [rows[key] for key in point.episodes if key in rows]
        for task in tasks:
            table.append({**about, "task": task, **_means([row for row in played if row["task_name"] == task], point)})
        if len(tasks) > 1:
            table.append({**about, "task": "all", **_means(played, point)})
    return Table(table, _caption(player, points, rows, price))


def _means(episodes: Sequence[Mapping[str, Any]], point: SweepPoint) -> dict[str, Any]:
    good = [episode for episode in episodes if episode["stop"] != "failed"]
    by_seed: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for episode in good:
        by_seed[episode["task_name"], episode["seed"]].append(episode)
    metrics: dict[str, list[float]] = defaultdict(list)
    for repeats in by_seed.values():
        for name in dict.fromkeys(name for episode in repeats for name in episode["metrics"]):
            metrics[name].append(statistics.fmean(e["metrics"][name] for e in repeats if name in e["metrics"]))
        won, n = sum(bool(episode["success"]) for episode in repeats), len(repeats)
        for k in range(2, min(n, point.repeats) + 1):
            metrics[f"pass@{k}"].append(1 - math.comb(n - won, k) / math.comb(n, k))
            metrics[f"pass^{k}"].append(math.comb(won, k) / math.comb(n, k))
    seeds = {name: [statistics.fmean(e[name] for e in repeats) for repeats in by_seed.values()] for name in COLUMNS}
    return {
        "n": len(good),
        "failed": len(episodes) - len(good),
        "context": sum(episode["stop"] == "context" for episode in good),
        **{name: vars(Cell.of(values)) for name, values in seeds.items()},
        "metrics": {name: vars(Cell.of(values)) for name, values in metrics.items()},
    }


def _spread(played: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how much wins differ between the seeds of a setting and task, and between the repeats of a seed."""
    by_seed: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in played:
        if row["stop"] != "failed":
            by_seed[row["setting"], row["task_name"]][row["seed"]].append(float(row["success"]))
    groups = [[wins for wins in seeds.values() if len(wins) > 1] for seeds in by_seed.values()]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return []
    repeated = list(itertools.chain(*groups))
    within = statistics.fmean(map(statistics.variance, repeated))
    noise = within * statistics.fmean(1 / len(wins) for wins in repeated)  # of a seed's mean
    between = max(0.0, statistics.fmean(statistics.variance(map(statistics.fmean, group)) for group in groups) - noise)
    spread = f"{between**0.5:.2f}, between repeats of a seed {within**0.5:.2f}"
    return [f"Standard deviation of wins between seeds {spread}."]


def _caption(
    player: str, points: Sequence[SweepPoint], rows: Mapping[Key, Mapping[str, Any]], price: Sequence[float] | None
) -> str:
    wanted = [key for point in points for key in point.episodes]
    played = [rows[key] for key in wanted if key in rows]
    seeds = sorted({seed for _, _, seed, _ in wanted})
    sentences = [
        f"Player {player}, held-out seeds {seeds[0]} to {seeds[-1]}: mean ± standard error over n episodes.",
        "An episode is won if its progression reaches 1.",
    ]
    if (repeats := max(point.repeats for point in points)) > 1:
        sentences.append(f"Each seed was played {repeats} times; pass@k: one of k repeats wins, pass^k: all k win.")
        sentences += _spread(played)
    if failed := sum(row["stop"] == "failed" for row in played):
        sentences.append(f"{failed} failed episodes (environment lost, or prompt refused) are not part of the means.")
    if cut := sum(row["stop"] == "context" for row in played):
        sentences.append(f"{cut} episodes ended because the next prompt was too long (context); they are in the means.")
    if endless := sum(row["stop"] == "max_turns" and row["max_turns"] is None for row in played):
        why = "because neither eval.max_turns nor the environment limits them"
        sentences.append(f"{endless} episodes were ended after {DEFAULT_MAX_TURNS} turns, {why}.")
    used = Counter[str]()
    for row in played:
        used.update(row.get("usage", {}))
    if used:
        read, wrote = used["prompt_tokens"], used["completion_tokens"]
        cost = f", which cost ${(read * price[0] + wrote * price[1]) / 1e6:,.2f}" if price else ""
        tokens = f"read {read:,} and wrote {wrote:,} tokens{cost}" if read + wrote else "did not count its tokens"
        empty = f" ({used['empty']:,} answers were empty)" if used["empty"] else ""
        sentences.append(f"The endpoint answered {used['answers']:,} times{empty}, {tokens}.")
    if len(played) < len(wanted):
        sentences.append(f"Incomplete: {len(played)} of {len(wanted)} episodes were played.")
    return " ".join(sentences)
