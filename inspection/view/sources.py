"""Finds and reads the episodes of a run: `episodes.jsonl`, a folder with such files, or slime's
dumps."""

from collections.abc import Iterator
from pathlib import Path

from embedded.run.folder import ABOUT, SUMMARY, TRAINING
from inspection.records import FILE, Record, read_episodes, rollout_of
from inspection.view.training import metric_files
from slime_verlog import ConfigError


def find_files(run: Path) -> list[Path]:
    """Return the run's `.jsonl` files of episodes, or slime's `.pt` dumps; raises ConfigError if
    there are none."""
    if run.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{run} is a YAML; view takes a run's folder or its {FILE}")
    if run.is_file():
        return [run]
    if "{rollout_id}" in run.name:
        return _require(_dumps(run.parent, run.name.replace("{rollout_id}", "*")), run)
    if not run.exists():
        raise ConfigError(f"{run} does not exist")
    if (run / FILE).is_file():
        return [run / FILE]
    found = sorted([*run.glob("episodes*.jsonl"), *run.glob("*/episodes*.jsonl")])
    if found:
        return found
    folders = [run / name for name in ("rollout_data", "train_data") if (run / name).is_dir()]
    return _require([dump for folder in folders or [run] for dump in _dumps(folder, "*.pt")], run)


def _dumps(folder: Path, pattern: str) -> list[Path]:
    return sorted(sorted(folder.glob(pattern)), key=rollout_of)


def episode_sources(run: Path, *, with_training: bool) -> list[Path]:
    """Return what `read_run` reads for a page: the run, if it has episodes, and the sample of its
    training."""
    training = [run / TRAINING] if with_training and (run / TRAINING).is_file() else []
    try:
        find_files(run)
    except ConfigError:
        if not training and not metric_files(run):
            raise
        return training
    return [run, *training]


def files_of(run: Path) -> list[Path]:
    """Return every file that a page about the run reads."""
    found = [
        path for part in episode_sources(run, with_training=False) for path in find_files(part)
    ]
    others = [run / TRAINING, run / SUMMARY, run / ABOUT, *metric_files(run)]
    return [*found, *(path for path in others if path.is_file())]


def _require(found: list[Path], run: Path) -> list[Path]:
    if not found:
        dumps = ".pt files from slime's --dump-details, --save-debug-rollout-data or --save-debug-train-data"
        makers = "`slime-verlog train` and `slime-verlog evaluate` make a run"
        raise ConfigError(f"{run} has no episodes: expected {FILE}, or {dumps}; {makers}")
    return found


def read_run(
    run: Path,
    tokenizer: str | None = None,
    trusted: bool = False,
    *,
    needs_text: bool = False,
    quiet: bool = False,
) -> Iterator[Record]:
    """Yield the run's episodes, in order. If it has several files of records, `setting` names the
    file as well.

    `tokenizer` (a folder), `trusted`, `needs_text` are those of `read_dumps`, and `quiet` is that
    of `read_episodes`. Raises ConfigError as `find_files`, or if a file cannot be read.
    """
    files = find_files(run)
    if any(path.suffix == ".pt" for path in files):
        from inspection.view.dumps import read_dumps

        yield from read_dumps(files, tokenizer, trusted, needs_text)
        return
    for path in files:
        for episode in read_episodes(path, quiet):
            if len(files) > 1:
                file = path.relative_to(run).with_suffix("").as_posix()
                file = file.removesuffix("/episodes").removeprefix("episodes_") or file
                setting = episode.get("setting") or "-"
                episode = {**episode, "setting": file if setting == "-" else f"{file}, {setting}"}
            yield episode
