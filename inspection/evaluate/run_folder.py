"""The folder of a run: `run.json` with its configuration, and `episodes.jsonl`, to which episodes are appended.

Invariant: the file holds at most one episode per setting, task and seed, all of one configuration and one player.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embedded.run.folder import differences, write_text
from inspection.evaluate.sweep import Key
from inspection.records import FILE, LARGE_KEYS, append_episode, read_episodes
from slime_verlog import ConfigError

RUN = "run.json"


class RunFolder:
    """A run's folder; a context manager that keeps other processes from writing into it."""

    def __init__(self, path: Path, player: str, identity: Mapping[str, Any]) -> None:
        """Open the folder, or make it; raises ConfigError if it is in use, unusable, or another run's."""
        self.path, self.player = path, player
        self.rows: dict[Key, dict[str, Any]] = {}
        """Finished episodes without their messages; failed ones of this call included."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115 - held until the process ends or `__exit__`
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another evaluation is writing to {path}; wait for it, or give another --out") from error
        self._check(json.loads(json.dumps(identity, default=str)))
        self._read()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def append(self, episode: Mapping[str, Any], setting: str) -> None:
        """Keep an episode."""
        append_episode(self.path / FILE, episode, self.player, setting)
        self._add({"setting": setting, "player": self.player, **episode})

    def _add(self, episode: Mapping[str, Any]) -> None:
        key = (episode["setting"], episode["task_name"], episode["seed"], episode.get("repeat", 0))
        self.rows[key] = {name: value for name, value in episode.items() if name not in LARGE_KEYS}

    def _check(self, identity: Mapping[str, Any]) -> None:
        """Compare with the run whose episodes are here; write `run.json` into a folder without any."""
        file, episodes = self.path / RUN, self.path / FILE
        if not episodes.exists() or not episodes.stat().st_size:
            write_text(file, json.dumps(identity, indent=1))
            return
        if not file.exists():
            raise ConfigError(f"{self.path} has {FILE} but no {RUN}: another command wrote it; give another --out")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; give another --out") from error
        for key, there, here in differences(found, identity):
            raise ConfigError(
                f"{self.path} holds another run: {key} is {there!r} there and {here!r} here; give another --out"
            )

    def _read(self) -> None:
        """Read the finished episodes; drop failed ones, and a last line that was cut, from the file."""
        file, part = self.path / FILE, self.path / f".{FILE}.part"
        if not file.exists():
            return
        with open(part, "w", encoding="utf-8", errors="replace") as kept:
            for episode in read_episodes(file):
                if episode["stop"] != "failed":
                    self._add(episode)
                    kept.write(json.dumps(episode, ensure_ascii=False) + "\n")
        os.replace(part, file)
