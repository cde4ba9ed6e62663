"""Keeps verdicts in a SQLite file that workers and runs share; a damaged file is renamed and replaced by a new one."""

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from envs.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT)"
_BESIDE = ("", "-journal", "-wal", "-shm")


class VerdictCache:
    """Opens one connection per use, so threads and processes can share the file.

    If the file is locked for too long or the disk is full, a warning is logged and the judge is asked.

    Raises:
        ConfigError: the file can be neither opened nor created.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._with_repair(lambda connection: connection.execute("SELECT key, text FROM verdicts LIMIT 1"))
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"env.judge.cache: {path} cannot be used: {error}") from error

    def get(self, key: str) -> str | None:
        """Return the judge's answer under this key, or None."""
        row = self._attempt(lambda cache: cache.execute("SELECT text FROM verdicts WHERE key = ?", (key,)).fetchone())
        return row[0] if row and isinstance(row[0], str) else None

    def put(self, key: str, text: str) -> None:
        """Store an answer, in place of any earlier one."""
        self._attempt(lambda cache: cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, text)))

    def _attempt(self, use: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            return self._with_repair(use)
        except (OSError, sqlite3.Error) as error:
            logger.warning("the judge's cache %s cannot be used: %s", self._path, error)
            return None

    def _with_repair(self, use: Callable[[sqlite3.Connection], T]) -> T:
        seen = self._identity()
        try:
            return self._using(use)
        except sqlite3.OperationalError:  # locked, full or not writable, but not damaged
            raise
        except sqlite3.DatabaseError as error:
            with open(f"{self._path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._identity() == seen:  # else another process has just renamed it
                    logger.warning("the judge's cache %s is damaged (%s): renamed to .damaged", self._path, error)
                    for ending in _BESIDE:
                        with contextlib.suppress(FileNotFoundError):
                            os.replace(f"{self._path}{ending}", f"{self._path}.damaged{ending}")
        return self._using(use)

    def _using(self, use: Callable[[sqlite3.Connection], T]) -> T:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
            connection.execute(_TABLE)
            return use(connection)

    def _identity(self) -> int | None:
        return self._path.stat().st_ino if self._path.exists() else None
