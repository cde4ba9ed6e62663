"""Compares two evaluations by pairs of equal setting, task and seed, with a paired bootstrap."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inspection.records import LARGE_KEYS, Record, read_episodes
from inspection.report.reading import read_record
from inspection.text import align
from slime_verlog import ConfigError

COLUMNS = {"success": "win rate", "return": "return", "progression": "progression", "turns": "turns"}
KEYS = ("setting", "player", "task_name", "task", "env_path", "seed", "stop")
"""What a comparison needs of an episode beside the columns."""
RESAMPLES = 10_000
FEWEST = 4
"""Pairs of a task for an interval: that of fewer reaches from the least to the greatest difference."""
SHOWN = 20  # seeds that a list names before it is cut

Key = tuple[str, str, int]
"""Setting, task name and seed; the repeats of a seed are one pair."""
Episodes = Mapping[Key, Record]
Pair = tuple[Record, Record]


def compare(a: Path, b: Path, settings: Sequence[str] | None = None) -> str:
    """Return the comparison as text; `settings` are the points of the sweep to take from A and from B (default: all).

    Raises ConfigError if a file is unreadable or has an episode twice, or the two have no episode in common.
    """
    of_a, of_b = settings or (None, None)
    first, second = _read(a, of_a), _read(b, of_b)
    common = sorted(key for key in first if key in second)
    if not common:
        examples = " and ".join(_name(next(iter(episodes))) for episodes in (first, second))
        nothing = f"{a} and {b} have no episode in common (setting, task, seed)"
        raise ConfigError(f"{nothing}: {examples}; --settings chooses one point of each sweep")
    for key, name in itertools.product(common, ("env_path", "task")):
        in_a, in_b = str(first[key][name]), str(second[key][name])
        # The same file may be named by its relative or its absolute path.
        is_one_file = in_a.endswith(".py") and Path(in_a).name == Path(in_b).name
        if in_a != in_b and not is_one_file:
            raise ConfigError(f"{_name(key)} is not the same game in A and B: {name} is {in_a!r} and {in_b!r}")
    good = [key for key in common if "failed" not in (first[key]["stop"], second[key]["stop"])]
    if not good:
        raise ConfigError(f"all {len(common)} pairs of {a} and {b} have a failed episode")
    pairs = {key: (first[key], second[key]) for key in good}
    repeated = any(episode["success"] not in (0, 1) for pair in pairs.values() for episode in pair)
    won = "seeds that {} won more often:" if repeated else "only {} won"
    caption = (
        f"Percentile bootstrap of the mean of paired differences, {RESAMPLES:,} resamples with a fixed seed, each task "
        "resampled on its own, and in `all` the settings of a seed together; * marks an interval without 0. "
        f"With fewer than {FEWEST} pairs of a task there is no interval (–)."
    )
    if alone := len(first) + len(second) - 2 * len(common):
        caption += f" {alone} episodes that only one of the two played are left out."
    if failed := len(common) - len(good):
        caption += f" {failed} pairs with a failed episode are left out."
    of_a_alone = [key for key, (in_a, in_b) in pairs.items() if in_a["success"] > in_b["success"]]
    of_b_alone = [key for key, (in_a, in_b) in pairs.items() if in_b["success"] > in_a["success"]]
    parts = [f"A: {_title(a, first, of_a)}\nB: {_title(b, second, of_b)}", _table(pairs), caption]
    parts += [_winners(won.format("A"), of_a_alone), _winners(won.format("B"), of_b_alone)]
    return "\n\n".join(parts)


def interval(differences: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of B - A; each task's [pairs] are resampled on their own."""
    draw = np.random.default_rng(0)
    sums = np.zeros(RESAMPLES)
    for values in differences:
        for start in range(0, RESAMPLES, 1000):  # bounds the memory
            chosen = draw.integers(len(values), size=(1000, len(values)))
            sums[start : start + 1000] += values[chosen].sum(axis=1)
    low, high = np.percentile(sums / sum(map(len, differences)), [2.5, 97.5])
    return float(low), float(high)


def _read(path: Path, setting: str | None) -> Episodes:
    """The episodes by key, without their messages; under one name if a setting is chosen."""
    found: dict[Key, list[dict[str, Any]]] = {}
    repeats: set[tuple[Key, int]] = set()
    settings = set()
    for number, episode in enumerate(read_episodes(path), 1):
        if missing := [name for name in (*KEYS, *COLUMNS) if name not in episode]:
            raise ConfigError(f"{path}, episode {number}, has no key {missing[0]!r}, so it cannot be compared")
        read_record(episode, f"{path}, episode {number},")
        settings.add(episode["setting"])
        if setting is not None and episode["setting"] != setting:
            continue
        key = ("-" if setting is not None else episode["setting"], episode["task_name"], episode["seed"])
        if (repeat := (key, episode.get("repeat", 0))) in repeats:
            raise ConfigError(f"{path} has two episodes of {_name(key)}, so they cannot be paired")
        repeats.add(repeat)
        found.setdefault(key, []).append({k: v for k, v in episode.items() if k not in LARGE_KEYS})
    if not found:
        known = f"; it has {', '.join(sorted(settings))}" if settings else ""
        raise ConfigError(f"{path} has no episodes" + (f" of setting {setting!r}{known}" if setting else ""))
    return {key: _mean_of(episodes) for key, episodes in found.items()}


def _mean_of(repeats: Sequence[Record]) -> Record:
    """The repeats of a seed as one episode; failed ones are left out if others ended."""
    good = [episode for episode in repeats if episode["stop"] != "failed"] or repeats
    return {**good[0], **{name: float(np.mean([episode[name] for episode in good])) for name in COLUMNS}}


def _table(pairs: Mapping[Key, Pair]) -> str:
    groups: dict[tuple[str, str], list[Pair]] = {}
    for (setting, task, _), pair in pairs.items():
        groups.setdefault((setting, task), []).append(pair)
    rows = [["setting", "task", "pairs", "", "A", "B", "B - A", "95 % interval"]]
    for (setting, task), group in groups.items():
        rows += _rows(setting, task, [group])
    if len(groups) > 1:
        rows += _rows("all", "all", _seeds_by_task(pairs))
    if len({setting for setting, _ in groups}) == 1:
        rows = [row[1:] for row in rows]
    return "\n".join(align(rows))


def _seeds_by_task(pairs: Mapping[Key, Pair]) -> list[list[Pair]]:
    """One pair per seed and task: the settings of a seed play the same episode, and are not independent."""
    found: dict[str, dict[int, list[Pair]]] = {}
    for (_, task, seed), pair in pairs.items():
        found.setdefault(task, {}).setdefault(seed, []).append(pair)
    return [[_mean_pair(settings) for settings in seeds.values()] for seeds in found.values()]


def _mean_pair(pairs: Sequence[Pair]) -> Pair:
    of_a, of_b = zip(*pairs, strict=True)
    return _mean_of(of_a), _mean_of(of_b)


def _rows(setting: str, task: str, groups: Sequence[Sequence[Pair]]) -> list[list[str]]:
    rows = []
    for column, title in COLUMNS.items():
        values = [np.array([[float(episode[column]) for episode in pair] for pair in group]) for group in groups]
        by_task = [of_task[:, 1] - of_task[:, 0] for of_task in values]
        (mean_a, mean_b), differences = np.concatenate(values).mean(axis=0), np.concatenate(by_task)
        if min(map(len, by_task)) < FEWEST:
            text = "–"
        elif np.ptp(differences) == 0:
            text = "the same in every pair"
        else:
            low, high = interval(by_task)
            text = f"[{low:+.3f}, {high:+.3f}]" + (" *" if low > 0 or high < 0 else "")
        head = [setting, task, str(len(differences))] if column == "success" else ["", "", ""]
        rows.append([*head, title, f"{mean_a:.3f}", f"{mean_b:.3f}", f"{differences.mean():+.3f}", text])
    return rows


def _winners(name: str, keys: Sequence[Key]) -> str:
    shown = ", ".join(map(_name, keys[:SHOWN]))
    more = f", and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{name} {len(keys)}" + (f": {shown}{more}" if keys else "")


def _title(path: Path, episodes: Episodes, setting: str | None) -> str:
    players = sorted({str(episode["player"]) for episode in episodes.values()})
    return f"{path} ({', '.join([*players, *([setting] if setting else [])])})"


def _name(key: Key) -> str:
    setting, task, seed = key
    return f"{task} {seed}" + (f" ({setting})" if setting != "-" else "")
