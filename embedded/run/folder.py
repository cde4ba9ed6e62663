"""A run's folder: the settings of the run that it holds, and what a run that was stopped continues
from.

Invariant: nothing that a run wrote is deleted, except by the same run when it continues.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

SETTINGS, CHECKPOINTS = "settings.json", "checkpoints"
"""What determines the run; and its checkpoints, which are deleted when it is finished."""
EPISODES = "episodes.jsonl"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
DONE = "done.json"
"""What a study's run writes at its end."""
ABOUT, TRAINING = "about.json", "training.jsonl"
"""Command, start, versions and the error that ended the run; and a sample of each update's turns
with what the trainer computed for their tokens."""


def check_out(folder: Path) -> None:
    """Raise ConfigError if a file stands where the folder is to be."""
    # Not at the top: `--help` works before anything is installed.
    from slime_verlog import ConfigError

    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out needs a folder, but {path} is a file; choose another --out")


def check_folder(folder: Path, resume: bool) -> None:
    """Raise ConfigError for a folder with a run, unless this command is to continue it; changes
    nothing."""
    from slime_verlog import ConfigError

    check_out(folder)
    results = [name for name in (METRICS, EPISODES, SUMMARY) if (folder / name).exists()]
    if not (folder / SETTINGS).exists():
        if results:
            raise ConfigError(
                f"{folder} holds {results[0]}, but not of a training run; choose another --out"
            )
    elif has_begun(folder) and not resume:
        state = "a finished" if is_finished(folder) else "an unfinished"
        choices = "--resume continues it; or delete the folder, or choose another --out"
        raise ConfigError(f"{folder} holds {state} run, and nothing was changed: {choices}")


def has_begun(folder: Path) -> bool:
    """Whether a run has more in its folder than its settings; if not, it failed before it played
    anything."""
    return not {path.name for path in folder.iterdir()} <= {SETTINGS, ABOUT, "config.yaml"}


@contextmanager
def claimed(folder: Path, settings: Mapping[str, Any], resume: bool = True) -> Iterator[None]:
    """Hold the folder for the run with these settings, and no other process meanwhile.

    Raises ConfigError as `check_folder` and `claim`, and if another process runs in it.
    """
    from slime_verlog import ConfigError

    check_folder(folder, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # of a file system such as /proc
        raise ConfigError(f"no folder can be made at {folder}; choose another --out") from error
    if (folder / SETTINGS).exists() and not has_begun(folder):
        with locked(folder / SETTINGS):
            (folder / SETTINGS).unlink()
    claim(folder, settings)
    with locked(folder / SETTINGS):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out of this file's folder; the lock ends with this process, however that
    ends."""
    from slime_verlog import ConfigError

    with open(path, encoding="utf-8") as file:
        if not (_lock(file, fcntl.LOCK_EX) or _lock(file, fcntl.LOCK_EX, after_s=0.2)):
            raise ConfigError(
                f"another process runs in {path.parent}; wait for it, or choose another --out"
            )
        yield


def is_claimed(folder: Path) -> bool:
    """Tell whether a process runs in the folder. Takes its lock for an instant, so `claimed` tries
    twice."""
    try:
        with open(folder / SETTINGS, encoding="utf-8") as file:
            return not _lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _lock(file: IO[str], kind: int, after_s: float = 0.0) -> bool:
    """Lock the file until it is closed; returns False if another process holds it."""
    time.sleep(after_s)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down the settings of a folder's run; raises ConfigError if it holds a run with
    others."""
    from slime_verlog import ConfigError

    path = folder / SETTINGS
    if not path.exists():
        write_text(path, json.dumps(settings, indent=1))
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(settings))
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); delete that run, or choose another --out"
        ) from error
    check_same(folder, found, wanted)


def check_same(place: Path, found: Any, wanted: Any) -> None:
    """Raise ConfigError if the settings `found` at a place differ from those of the run that is
    wanted there."""
    from slime_verlog import ConfigError

    for key, there, here in differences(found, wanted):
        if key == "keys.rollout_processes":  # says only how the work is spread
            continue
        differs = (
            f"{place} holds a run with other settings: {key} is {there!r} there and {here!r} here"
        )
        raise ConfigError(f"{differs}; choose another --out, or delete that run")


def differences(first: Any, second: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves of nested mappings that differ: dotted key and both values, None where there
    is none."""
    there = dict(leaves(first))
    here = dict(leaves(second))
    for key in {**there, **here}:
        if there.get(key) != here.get(key):
            yield key, there.get(key), here.get(key)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted key."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def is_finished(folder: Path) -> bool:
    """Tell whether the folder holds a run that trained to its end."""
    path = folder / SUMMARY
    return path.exists() and not json.loads(path.read_text(encoding="utf-8")).get(
        "interrupted", False
    )


def saved_updates(folder: Path) -> int:
    """Count the updates before the latest checkpoint in a run's folder; -1 without one."""
    latest = folder / CHECKPOINTS / "latest.json"
    return (
        json.loads(latest.read_text(encoding="utf-8"))["rollout_id"] + 1 if latest.exists() else -1
    )


def rewind(rows: Path, updates: int) -> None:
    """Drop the rows of a stopped run that were written after this many updates; a resumed run
    writes them again."""
    kept = [line for line in whole_lines(rows) if json.loads(line)["update"] <= updates]
    keep_lines(rows, kept)


def whole_lines(path: Path) -> list[str]:
    """Read the complete lines of a file; a last line that a kill cut short is dropped. No file: no
    lines."""
    whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
    return whole.decode().split("\n") if whole else []


def keep_lines(path: Path, lines: Sequence[str]) -> None:
    """Replace the file's content by these lines; without any, there will be no file."""
    if lines:
        write_text(path, "".join(line + "\n" for line in lines))
    else:
        path.unlink(missing_ok=True)


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write a run's command, start and versions, and the error that ended it."""
    write_text(folder / ABOUT, json.dumps(about, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that no reader sees half a file; raises OSError
    with the path."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Do the same with bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_text(path: Path, text: str) -> None:
    """Append whole lines; raises OSError with the path, and then the file is as it was."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "ab") as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise OSError(error.errno, error.strerror, str(path)) from error
