"""Reads and writes `episodes.jsonl`: one episode per line, as `rollout.transcript.Transcript.facts` describes it.

Two keys are added to the facts: `setting` (the point of a sweep, `-` without one) and `player`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_verlog import ConfigError

FILE = "episodes.jsonl"
LARGE_KEYS = ("messages", "pictures", "story")  # keys of a record that tables do not need


def append_episode(path: Path, episode: Mapping[str, Any], player: str, setting: str = "-") -> None:
    """Add one episode to the file as a single line, so that an interrupted run loses no finished episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"setting": setting, "player": player, **episode}, ensure_ascii=False, default=str)
    with open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write(line + "\n")


def read_episodes(path: Path, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a file, or of `episodes.jsonl` in a folder, after the first `skip`, which are not parsed.

    A last line without its end is left out. Raises ConfigError if the file cannot be read, or a line is not an episode.
    """
    path = path / FILE if path.is_dir() else path
    try:
        with open(path, "rb") as file:  # the last line may end within a character
            for number, line in enumerate(file, 1):
                is_whole = line.endswith(b"\n")
                if number <= skip and is_whole:
                    continue
                try:
                    episode = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if not is_whole:
                        return
                    reason = getattr(error, "msg", error)
                    hint = "delete this line, or copy the file again"
                    raise ConfigError(f"{path}, line {number}, is not JSON ({reason}); {hint}") from error
                if number <= skip:
                    continue
                if not isinstance(episode, dict):
                    raise ConfigError(f"{path}, line {number}, is not an episode")
                for key in ("messages", "story"):
                    if not isinstance(episode.get(key), list):
                        raise ConfigError(f"{path}, line {number}, is not an episode: it has no list {key!r}")
                yield episode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` if the block ends well. Raises ConfigError for an OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
