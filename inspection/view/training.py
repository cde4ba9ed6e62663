"""Reads how a run trained: metrics, alarms, settings, versions. Each file counts as far as it can
be read."""

import json
import math
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from embedded.run.alarms import LIMITS, Alarms
from embedded.run.folder import (
    ABOUT,
    DONE,
    METRICS,
    SETTINGS,
    SUMMARY,
    is_claimed,
    leaves,
    whole_lines,
)
from inspection.records import Record
from inspection.view.page import number
from slime_verlog import ConfigError, Settings, read_yaml_mapping

_ROWS = (METRICS, "rows.jsonl")
"""Names of the file with a row of metrics per update, in a run and in a run of a study."""
_EVENTS = "events.out.tfevents.*"
_MOST_POINTS = 400
_SEED = re.compile(r"(?<![^\W_])seed[\W_]?\d+$")
"""The end of a run's name that tells the seeds of a variant apart."""
_FROM_SLIME = {
    "rollout/kl": "actor/ref_kl",
    "train/entropy_loss": "actor/entropy",
    "train/critic-value_loss": "critic/value_loss",
    **{
        f"train/{name}": f"actor/{name}"
        for name in ("ppo_kl", "pg_loss", "pg_clipfrac", "grad_norm")
    },
}
"""slime's names of metrics that runs on one machine also have."""
_COUNTS = ("rollout/faults/", "rollout/stop/")
"""Metrics that are left out where they are always 0."""
Rows = dict[int, dict[str, float]]  # metrics by number of updates


def metric_files(run: Path) -> list[Path]:
    """Return the files with the run's metrics: JSON lines, or TensorBoard's events; none for
    episodes alone."""
    rows = [run / name for name in _ROWS if (run / name).is_file()]
    if rows or not run.is_dir():
        return rows
    return sorted(run.glob(f"tensorboard/**/{_EVENTS}")) or sorted(run.glob(_EVENTS))


def expand_runs(runs: Iterable[Path]) -> list[Path]:
    """Replace each folder of training runs, such as one with several seeds, by the runs in it."""
    found: list[Path] = []
    for run in runs:
        inside = [] if metric_files(run) else _inside(run)
        found += inside or [run]
    return found


def _inside(folder: Path) -> list[Path]:
    """The folders with metrics, without those below another, such as the critic of value
    pretraining."""
    found = {
        path.parent
        for name in _ROWS
        for depth in ("*", "*/*")
        for path in folder.glob(f"{depth}/{name}")
    }
    return sorted(path for path in found if found.isdisjoint(path.parents))


def read_training(run: Path, name: str) -> Record | None:
    """Return what the page shows of a run's training; None if the run wrote no metrics."""
    from embedded.arguments import EmbeddedFlags
    from rollout.bridge.settings import RolloutSettings

    files = metric_files(run)
    if not files:
        return None
    problems: list[str] = []
    is_ours = files[0].suffix == ".jsonl"
    rows = _json_rows(files[0], problems) if is_ours else _tensorboard_rows(files, problems)
    settings = _mapping(run / SETTINGS, problems, "settings")
    keys = _section(settings, "keys")
    flags = _section(settings, "flags")
    about = _mapping(run / ABOUT, problems, "command and the versions")
    about |= _mapping(run / SUMMARY, problems, "results and the verdict")
    changed = _changed(keys or _yaml_keys(run, problems), RolloutSettings)
    changed |= _changed(flags, EmbeddedFlags)
    warned = about.get("warnings")
    problems += [
        f"Before training: {word}." for word in (warned if isinstance(warned, list) else ())
    ]
    columns = _columns(rows, problems)
    alarms = _alarms(rows)
    state = _state(run, about)
    trained = any(row.get("train/actor_trains") for row in rows.values())
    is_stopped = str(state).startswith("stopped")
    started = min(path.stat().st_mtime for path in (files[0], run / SETTINGS) if path.exists())
    return {
        "name": name,
        "variant": _SEED.sub("", name).rstrip(string.punctuation + " ")
        or run.resolve().parent.name,
        "folder": str(run),
        "columns": columns,
        "limits": {limit.metric: [number(limit.lowest), number(limit.highest)] for limit in LIMITS},
        "alarms": alarms,
        "state": state,
        "healthy": trained and not alarms and not problems and not is_stopped,
        "settings": changed,
        "planned": flags.get("num_rollout"),
        "about": {"started": started, "written": files[-1].stat().st_mtime, **about},
        "problems": problems,
    }


def _section(settings: Record, name: str) -> Record:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _state(run: Path, about: Record) -> str | None:
    """Whether the run goes on or how it ended; None if its folder does not tell."""
    if is_claimed(run):
        return "running"
    if about.get("stopped"):
        return f"stopped: {about['stopped']}"
    if about.get("interrupted"):
        return "interrupted"
    if about.get("verdict") or (run / DONE).exists():
        return "finished"
    is_ours = (run / ABOUT).exists() or (run / SETTINGS).exists()
    return "stopped: its process ended and left no reason" if is_ours else None


def _json_rows(path: Path, problems: list[str]) -> Rows:
    rows: Rows = {}
    try:
        for line in whole_lines(path):
            row = json.loads(line)
            found = {
                key: float(value) for key, value in row.items() if isinstance(value, int | float)
            }
            rows.setdefault(int(row["update"]), {}).update(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(
            f"{path.name} is damaged after {len(rows)} updates ({error}); what follows is left out."
        )
    for row in rows.values():
        row.pop("update", None)
    return rows


def _tensorboard_rows(files: Iterable[Path], problems: list[str]) -> Rows:
    """slime's metrics. Several training steps belong to an update; the last one counts."""
    try:
        found = sorted(event for file in files for event in _events(file))
    except ImportError:
        problems.append(
            "The metrics are TensorBoard's; to read them, install it: pip install tensorboard."
        )
        return {}
    rows: Rows = {}
    rollout = 0
    for _, tag, step, value in found:
        if tag.startswith(("rollout/", "turn/")):
            rollout = step
        is_first = tag.startswith("eval/") and step == 0
        update = _trained(step, rollout) + 1 if tag.startswith("train/") else step + (not is_first)
        rows.setdefault(update, {})[_FROM_SLIME.get(tag, tag)] = value
    for row in rows.values():
        if "actor/ppo_kl" in row:
            row.setdefault("train/actor_trains", 1.0)
    return rows


def _trained(step: int, rollout: int) -> int:
    """The rollout of a training step: the last logged one, or in asynchronous training one before
    it.

    slime numbers the n steps of rollout r from r * n on, and n differs between rollouts, as in the
    critic's warm-up.
    """
    while rollout and (step < rollout or step // (step // rollout) != rollout):
        rollout -= 1
    return rollout


def _events(file: Path) -> Iterator[tuple[float, str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield event.wall_time, value.tag, int(event.step), float(value.simple_value)


def _columns(rows: Rows, problems: list[str]) -> dict[str, list[Any]]:
    """One list per metric over the updates; of long runs, at most `_MOST_POINTS` and every
    evaluation."""
    updates = sorted(rows)
    step = math.ceil(len(rows) / _MOST_POINTS)
    kept = []
    for place, update in enumerate(updates):
        is_evaluation = any(name.startswith("eval/") for name in rows[update])
        if place % step == 0 or is_evaluation:
            kept.append(update)
    columns: dict[str, list[Any]] = {"update": kept}
    for name in dict.fromkeys(name for update in updates for name in rows[update]):
        broken = [update for update in updates if not math.isfinite(rows[update].get(name, 0.0))]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            problems.append(
                f"{name} is not a finite number in update {broken[0]}{more}; the curve leaves it "
                "out."
            )
        column = [number(rows[update].get(name)) for update in kept]
        if any(column) or not name.startswith(_COUNTS):
            columns[name] = column
    return columns


def _alarms(rows: Rows) -> list[Record]:
    """The alarms that the rows raise."""
    watch = Alarms()
    updates: dict[str, int] = {}
    for update in sorted(rows):
        watch.watch(update, rows[update])
        for metric in watch.raised:
            updates.setdefault(metric, update)
    return [
        {"metric": metric, "update": updates[metric], "sentence": said}
        for metric, said in watch.raised.items()
    ]


def _mapping(path: Path, problems: list[str], holds: str) -> Record:
    """Read a file with a mapping; if it is damaged, a problem says that what it `holds` is
    missing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is cut or damaged, so the {holds} are missing.")
        return {}
    return found


def _yaml_keys(run: Path, problems: list[str]) -> Record:
    yaml = next(
        (run / name for name in ("config.yaml", "run.yaml") if (run / name).is_file()), None
    )
    try:
        return read_yaml_mapping(str(yaml), "the run's YAML") if yaml else {}
    except ConfigError as error:
        problems.append(f"{error}.")
        return {}


def _changed(given: Record, model: type[Settings]) -> dict[str, list[Any]]:
    """Dotted names of settings whose value differs from the default, with both; None: there is no
    default."""
    if not given:
        return {}
    defaults = {}
    for key, field in model.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            defaults[key] = value.model_dump() if isinstance(value, Settings) else value
    usual: Record = json.loads(json.dumps(dict(leaves(defaults)), default=str))
    return {key: [value, usual.get(key)] for key, value in leaves(given) if value != usual.get(key)}
