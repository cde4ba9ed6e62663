"""Names what got slower between two result files: `python -m benchmarks.compare BEFORE.json AFTER.json`.

Every benchmark's JSON can be compared. Which direction is worse follows from a measurement's name. Exits with 1 if a
measurement got worse by more than the threshold.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_verlog import SlimeVerlogError, command

BETTER_IF_MORE = re.compile(r"per_s$|share|busy")
BETTER_IF_LESS = re.compile(r"\bms\b|_ms_|_ms$|_s$|seconds|bytes|ratio_to")
NAMING = ("loop", "turns", "engines", "places")
"""Keys that name a row of a table."""


class Change(NamedTuple):
    """A measurement that both files have."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """How much worse it became; below 1 if it became better."""
        less = not BETTER_IF_MORE.search(self.name)
        worse, better = (self.after, self.before) if less else (self.before, self.after)
        return worse / better if better else float("inf") if worse else 1.0


def measurements(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a result whose direction is known, by the path of their keys."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from measurements(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, list):
        for number, row in enumerate(found):
            named = isinstance(row, Mapping) and all(key in row for key in NAMING)
            label = " ".join(f"{key} {row[key]}" for key in NAMING) if named else str(number)
            yield from measurements(row, f"{name}[{label}]")
    elif isinstance(found, int | float) and (BETTER_IF_MORE.search(name) or BETTER_IF_LESS.search(name)):
        yield name, float(found)


def changes(before: Path, after: Path) -> list[Change]:
    """All measurements that both files have.

    Raises:
        SlimeVerlogError: a file cannot be read, or they share nothing.
    """
    old, new = (dict(measurements(_read(path))) for path in (before, after))
    if not old.keys() & new.keys():
        raise SlimeVerlogError(f"{before} and {after} have no measurement in common: compare runs of one benchmark")
    return [Change(name, value, new[name]) for name, value in old.items() if name in new]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SlimeVerlogError(f"{path} is not a result file: {type(error).__name__}: {error}") from error


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threshold", type=float, default=1.05, help="ratio above which a change is a regression")
    options = parser.parse_args(arguments)
    found = changes(options.before, options.after)
    worse = [change for change in found if change.ratio > options.threshold]
    for change in sorted(worse, key=lambda change: -change.ratio):
        print(f"{change.ratio:.2f} x worse: {change.name}: {change.before:.4g}, now {change.after:.4g}")
    print(f"{len(worse)} of {len(found)} measurements are worse by more than {options.threshold:g} x")
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    main()
