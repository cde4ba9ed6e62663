"""Reads how a run trained: metrics, alarms, settings, versions. Each file counts as far as it can be read."""

import json
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from embedded.run.alarms import LIMITS, Alarms
from embedded.run.folder import ABOUT, DONE, METRICS, SETTINGS, SUMMARY, is_claimed, leaves
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
    **{f"train/{name}": f"actor/{name}" for name in ("ppo_kl", "pg_loss", "pg_clipfrac", "grad_norm")},
}
"""slime's names of metrics that runs on one machine also have."""
Rows = dict[int, dict[str, float]]  # metrics by number of updates


def metric_files(run: Path) -> list[Path]:
    """Return the files with the run's metrics: JSON lines, or TensorBoard's events; none for episodes alone."""
    rows = [run / name for name in _ROWS if (run / name).is_file()]
    return rows or (sorted(run.glob(f"tensorboard/**/{_EVENTS}")) or sorted(run.glob(_EVENTS)) if run.is_dir() else [])


def expand_runs(runs: Iterable[Path]) -> list[Path]:
    """Replace each folder of training runs, such as one with several seeds, by the runs in it."""
    return [found for run in runs for found in (_inside(run) if not metric_files(run) else []) or [run]]


def _inside(folder: Path) -> list[Path]:
    """The folders with metrics, without those below another, such as the critic of value pretraining."""
    found = {path.parent for name in _ROWS for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{name}")}
    return sorted(path for path in found if found.isdisjoint(path.parents))


def read_training(run: Path, name: str) -> dict[str, Any] | None:
    """Return what the page shows of a run's training; None if the run wrote no metrics."""
    from embedded.arguments import EmbeddedFlags
    from rollout.bridge.settings import RolloutSettings

    files = metric_files(run)
    if not files:
        return None
    problems: list[str] = []
    rows = _json_rows(files[0], problems) if files[0].suffix == ".jsonl" else _tensorboard_rows(files, problems)
    settings = _mapping(run / SETTINGS, problems, "settings")
    keys, flags = (settings[key] if isinstance(settings.get(key), dict) else None for key in ("keys", "flags"))
    summary = _mapping(run / SUMMARY, problems, "results and the verdict")
    about = _mapping(run / ABOUT, problems, "command and the versions") | summary
    started = about.get("started", min(path.stat().st_mtime for path in (files[0], run / SETTINGS) if path.exists()))
    changed = _changed(keys or _yaml_keys(run, problems), RolloutSettings) | _changed(flags or {}, EmbeddedFlags)
    alarms, state = _alarms(rows, summary, problems), _state(run, about)
    warned = about.get("warnings")
    words = [word for word in warned if isinstance(word, str)] if isinstance(warned, list) else []
    problems += [f"Before training: {word}." for word in words]
    trained = any(row.get("train/actor_trains") for row in rows.values())
    return {
        "name": name,
        "variant": _SEED.sub("", name).rstrip(string.punctuation + " ") or run.resolve().parent.name,
        "folder": str(run),
        "columns": _columns(rows, problems),
        "limits": {limit.metric: [number(limit.lowest), number(limit.highest)] for limit in LIMITS},
        "alarms": alarms,
        "state": state,
        "healthy": trained and not alarms and not problems and not str(state).startswith("stopped"),
        "waiting": _waiting(run, rows, settings) if state == "running" and not trained else None,
        "settings": changed,
        "planned": (flags or {}).get("num_rollout"),
        "about": {"started": started, "written": files[-1].stat().st_mtime, **about},
        "problems": problems,
    }


def _state(run: Path, about: Mapping[str, Any]) -> str | None:
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


def _waiting(run: Path, rows: Rows, settings: Mapping[str, Any]) -> str:
    """Say what a run does before an update has trained the policy."""
    if any(row.get("rollout/turns") for row in rows.values()):
        return "only the critic trains so far; no update of the policy yet"
    imitates = isinstance(settings.get("warm"), dict)  # otherwise a path: PPO starts from that model
    if imitates and not rows and not (run / "policy_before" / "imitation.json").exists():
        return "imitating demonstrations; no update yet"
    return "evaluating the policy or pretraining the critic; no update yet" if not rows else "no update yet"


def _json_rows(path: Path, problems: list[str]) -> Rows:
    rows: Rows = {}
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        problems.append(f"{path.name}: the last row is cut or still being written, and is left out.")
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            update = int(row.pop("update"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problems.append(f"{path.name}, line {place}, is not a row of metrics and is left out.")
            continue
        found = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        rows.setdefault(update, {}).update(found)
    return rows


def _tensorboard_rows(files: Iterable[Path], problems: list[str]) -> Rows:
    """slime's metrics. Several training steps belong to an update; the last one counts."""
    try:
        found = sorted(event for file in files for event in _events(file))
    except ImportError:
        problems.append("The metrics are TensorBoard's; to read them, install it: pip install tensorboard.")
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
    """The rollout of a training step: the last logged one, or in asynchronous training one before it.

    slime numbers the n steps of rollout r from r * n on, and n differs between rollouts, as in the critic's warm-up.
    """
    return next(r for r in range(rollout, -1, -1) if not r or (step >= r and step // (step // r) == r))


def _events(file: Path) -> Iterator[tuple[float, str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for event in LegacyEventFileLoader(str(file)).Load():
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield event.wall_time, value.tag, int(event.step), float(value.simple_value)


def _columns(rows: Rows, problems: list[str]) -> dict[str, list[Any]]:
    """One list per metric over the updates; of long runs, at most `_MOST_POINTS` and every evaluation."""
    step = math.ceil(len(rows) / _MOST_POINTS)
    kept = [u for n, u in enumerate(sorted(rows)) if n % step == 0 or any(k.startswith("eval/") for k in rows[u])]
    names = dict.fromkeys(name for update in sorted(rows) for name in rows[update])
    for name in names:
        broken = [update for update in sorted(rows) if not math.isfinite(rows[update].get(name, 0.0))]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            problems.append(f"{name} is not a finite number in update {broken[0]}{more}; the curve leaves it out.")
    columns = {name: [number(rows[update].get(name)) for update in kept] for name in names}
    counts = ("rollout/faults/", "rollout/stop/")
    return {"update": kept, **{k: v for k, v in columns.items() if any(v) or not k.startswith(counts)}}


def _alarms(rows: Rows, summary: Mapping[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """The alarms that the rows raise, and those that the run recorded although their rows are missing."""
    watch, found = Alarms(), []
    for update in sorted(rows):
        known = set(watch.raised)
        watch.watch(update, rows[update])
        found += [{"metric": m, "update": update, "sentence": watch.raised[m]} for m in watch.raised if m not in known]
    last, updates = max(rows, default=0), summary.get("updates", 0)
    if last < updates:
        problems.append(f"The metrics end at update {last} of {updates}; later ones are missing.")
        recorded = dict(summary.get("alarms") or {}).items()
        found += [{"metric": m, "update": last, "sentence": text} for m, text in recorded if m not in watch.raised]
    return found


def _mapping(path: Path, problems: list[str], holds: str) -> dict[str, Any]:
    """Read a file with a mapping; if it is damaged, a problem says that what it `holds` is missing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is cut or damaged, so the {holds} are missing.")
        return {}
    return found


def _yaml_keys(run: Path, problems: list[str]) -> dict[str, Any]:
    yaml = next((run / name for name in ("config.yaml", "run.yaml") if (run / name).is_file()), None)
    try:
        return read_yaml_mapping(str(yaml), "the run's YAML") if yaml else {}
    except ConfigError as error:
        problems.append(f"{error}.")
        return {}


def _changed(given: Mapping[str, Any], model: type[Settings]) -> dict[str, list[Any]]:
    """Dotted names of settings whose value differs from the default, with both; None: there is no default."""
    fields = {k: f.get_default(call_default_factory=True) for k, f in model.model_fields.items() if not f.is_required()}
    dumped = {key: value.model_dump() if isinstance(value, Settings) else value for key, value in fields.items()}
    defaults: Mapping[str, Any] = json.loads(json.dumps(dict(leaves(dumped)), default=str))
    found = dict(leaves(given)) if given else {}
    return {key: [value, defaults.get(key)] for key, value in found.items() if value != defaults.get(key)}
