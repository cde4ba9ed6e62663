"""Compares two evaluations by pairs of equal setting, task and seed, with a paired bootstrap."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from inspection.records import Record, check_table_keys, read_episodes, without_large
from inspection.text import align
from slime_verlog import ConfigError

COLUMNS = {
    "success": "win rate",
    "return": "return",
    "progression": "progression",
    "turns": "turns",
}
RESAMPLES = 10_000
FEWEST = 4
"""Pairs of a task for an interval: that of fewer reaches from the least to the greatest
difference."""
SHOWN = 20  # seeds that a list names before it is cut
CAPTION = (
    f"Percentile bootstrap of the mean of paired differences, {RESAMPLES:,} resamples with a fixed "
    "seed, each task resampled on its own, and in `all` the settings of a seed together; * marks "
    f"an interval without 0. A task with fewer than {FEWEST} pairs has no interval (–)."
)

Key = tuple[str, str, int]
"""Setting, task name and seed; the repeats of a seed are one pair."""
Episodes = Mapping[Key, Record]
Pair = tuple[Record, Record]


def compare(a: Path, b: Path, settings: Sequence[str] | None = None) -> str:
    """Return the comparison as text; `settings` are the points of the sweep to take from A and from
    B (default: all).

    Raises ConfigError if a file is unreadable or has an episode twice, or the two have no episode
    in common.
    """
    of_a, of_b = settings or (None, None)
    first = _read(a, of_a)
    second = _read(b, of_b)
    common = sorted(key for key in first if key in second)
    if not common:
        examples = " and ".join(_name(next(iter(episodes))) for episodes in (first, second))
        nothing = f"{a} and {b} have no episode in common (setting, task, seed)"
        raise ConfigError(f"{nothing}: {examples}; --settings chooses one point of each sweep")
    pairs: dict[Key, Pair] = {}
    for key in common:
        pair = first[key], second[key]
        _check_game(key, *pair)
        if all(episode["stop"] != "failed" for episode in pair):
            pairs[key] = pair
    if not pairs:
        raise ConfigError(f"all {len(common)} pairs of {a} and {b} have a failed episode")
    caption = CAPTION
    if alone := len(first) + len(second) - 2 * len(common):
        caption += f" {alone} episodes that only one of the two played are left out."
    if failed := len(common) - len(pairs):
        caption += f" {failed} pairs with a failed episode are left out."
    parts = [f"A: {_title(a, first, of_a)}\nB: {_title(b, second, of_b)}", _table(pairs), caption]
    repeated = any(episode["success"] not in (0, 1) for pair in pairs.values() for episode in pair)
    for number, name in enumerate("AB"):
        won = [
            key
            for key, pair in pairs.items()
            if pair[number]["success"] > pair[1 - number]["success"]
        ]
        parts.append(
            _winners(f"seeds that {name} won more often:" if repeated else f"only {name} won", won)
        )
    return "\n\n".join(parts)


def _check_game(key: Key, of_a: Record, of_b: Record) -> None:
    """Raise ConfigError if the two are not the same game; one file may be named by two paths."""
    for name in ("env_path", "task"):
        in_a = str(of_a[name])
        in_b = str(of_b[name])
        is_one_file = in_a.endswith(".py") and Path(in_a).name == Path(in_b).name
        if in_a != in_b and not is_one_file:
            raise ConfigError(
                f"{_name(key)} is not the same game in A and B: {name} is {in_a!r} and {in_b!r}"
            )


def interval(differences: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of B - A; each task's [pairs] are resampled
    on their own."""
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
    found: dict[Key, dict[int, Record]] = {}
    settings = set()
    for number, episode in enumerate(read_episodes(path), 1):
        check_table_keys(episode, f"{path}, episode {number},")
        settings.add(episode["setting"])
        if setting not in (None, episode["setting"]):
            continue
        key = ("-" if setting else episode["setting"], episode["task_name"], episode["seed"])
        repeats = found.setdefault(key, {})
        repeat = episode.get("repeat", 0)
        if repeat in repeats:
            raise ConfigError(f"{path} has two episodes of {_name(key)}, so they cannot be paired")
        repeats[repeat] = without_large(episode)
    if not found:
        known = f"; it has {', '.join(sorted(settings))}" if settings else ""
        raise ConfigError(
            f"{path} has no episodes" + (f" of setting {setting!r}{known}" if setting else "")
        )
    return {key: _mean_of(list(repeats.values())) for key, repeats in found.items()}


def _mean_of(repeats: Sequence[Record]) -> Record:
    """The repeats of a seed as one episode; failed ones are left out if others ended."""
    good = [episode for episode in repeats if episode["stop"] != "failed"] or repeats
    means = {name: float(np.mean([episode[name] for episode in good])) for name in COLUMNS}
    return {**good[0], **means}


def _table(pairs: Mapping[Key, Pair]) -> str:
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    by_seed: dict[tuple[str, int], list[Pair]] = defaultdict(list)
    for (setting, task, seed), pair in pairs.items():
        groups[setting, task].append(pair)
        by_seed[task, seed].append(pair)
    rows = [["setting", "task", "pairs", "", "A", "B", "B - A", "95 % interval"]]
    for (setting, task), group in groups.items():
        rows += _rows(setting, task, [group])
    if len(groups) > 1:
        # The settings of a seed play the same episode, and are not independent.
        by_task: dict[str, list[Pair]] = defaultdict(list)
        for (task, _), settings in by_seed.items():
            of_a, of_b = zip(*settings, strict=True)
            by_task[task].append((_mean_of(of_a), _mean_of(of_b)))
        rows += _rows("all", "all", list(by_task.values()))
    if len({setting for setting, _ in groups}) == 1:
        rows = [row[1:] for row in rows]
    return "\n".join(align(rows))


def _rows(setting: str, task: str, groups: Sequence[Sequence[Pair]]) -> list[list[str]]:
    rows = []
    for column, title in COLUMNS.items():
        values = [
            np.array([[float(episode[column]) for episode in pair] for pair in group])
            for group in groups
        ]
        differences = [of_task[:, 1] - of_task[:, 0] for of_task in values]
        mean_a, mean_b = np.concatenate(values).mean(axis=0)
        together = np.concatenate(differences)
        if min(map(len, differences)) < FEWEST:
            text = "–"
        elif np.ptp(together) == 0:
            text = "the same in every pair"
        else:
            low, high = interval(differences)
            text = f"[{low:+.3f}, {high:+.3f}]" + (" *" if low > 0 or high < 0 else "")
        head = [setting, task, str(len(together))] if column == "success" else ["", "", ""]
        rows.append(
            [*head, title, f"{mean_a:.3f}", f"{mean_b:.3f}", f"{together.mean():+.3f}", text]
        )
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
