"""A search tool over a local corpus, ranked by BM25 in an index (SQLite's FTS5) that is built once.

The corpus is a JSONL file with one `{"title": ..., "text": ...}` per line. In the YAML:
`tools: [{path: "envs.tools.search:Search", config: {corpus: wiki.jsonl, top_k: 3}}]`.
"""

import contextlib
import fcntl
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.tools.results import Tool, ToolEpisode
from slime_verlog import Field, Settings, read_settings

_WORD = re.compile(r"\w+")
_MAX_WORDS = 32
_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='porter unicode61')"
_FIND = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, 2.0, 1.0), rowid LIMIT ?"


class SearchSettings(Settings):
    """The `config:` mapping of the tool's entry."""

    corpus: str
    """JSONL file with the passages."""
    index: str | None = None
    """File for the index; beside the corpus by default. Every corpus needs its own."""
    top_k: int = Field(default=3, ge=1)
    """Passages per result."""
    passage_chars: int = Field(default=1000, ge=1)
    """Characters shown of each passage."""


class Search(Tool):
    """Finds passages by their words. The metric `empty` counts calls that found nothing."""

    name = "search"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.settings = read_settings(SearchSettings, config, "config.")
        path = Path(self.settings.index).expanduser() if self.settings.index else None
        self.index = CorpusIndex(Path(self.settings.corpus).expanduser(), path)

    def create(self, episode: ToolEpisode) -> None:
        self.index.ensure()

    def execute(self, query: str) -> tuple[str, float, dict[str, float]]:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: Words to look for; names and rare words find more than whole sentences.
        """
        found = self.index.find(query, self.settings.top_k)
        if not found:
            return "Nothing was found. Try other words.", 0.0, {"empty": 1.0}
        shown = []
        for number, passage in enumerate(found, 1):
            text = passage["text"][: self.settings.passage_chars]
            shown.append(f"[{number}] {passage['title']}\n{text}")
        return "\n\n".join(shown), 0.0, {}


class CorpusIndex:
    """The index of a JSONL file, at `path` or beside it; built again when damaged, or when the
    corpus differs."""

    def __init__(self, corpus: Path, path: Path | None = None) -> None:
        self.corpus = corpus
        self.path = path if path is not None else corpus.with_name(corpus.name + ".fts5")

    def ensure(self) -> None:
        """Build the index unless it is up to date; raises ConfigError if corpus or index cannot be
        used."""
        self.find("any", 1)

    def find(self, query: str, count: int) -> list[dict[str, str]]:
        """Find the `count` passages that fit best, best first; the query is words only. Raises as
        `ensure`."""
        words = list(dict.fromkeys(_WORD.findall(query.lower())))[:_MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        stamp = self._stamp()
        found = self._rows(stamp, match, count)
        if found is not None:
            return found
        try:
            with open(self.path.with_name(self.path.name + ".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._rows(stamp, match, count) is None:
                    # No other process has built it meanwhile.
                    self._build(stamp)
        except (OSError, sqlite3.DatabaseError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"config.index: {self.path} cannot be written: {reason}; name another file"
            ) from error
        return self._rows(stamp, match, count) or []

    def _rows(self, stamp: int, match: str, count: int) -> list[dict[str, str]] | None:
        """Ask the index; None if there is none of this corpus that can be read."""
        # `as_uri` escapes `#`, `?` and `%`.
        address = self.path.absolute().as_uri() + "?mode=ro&immutable=1"
        try:
            with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
                if connection.execute("PRAGMA user_version").fetchone() != (stamp,):
                    return None
                rows = connection.execute(_FIND, (match, count)).fetchall()
        except sqlite3.DatabaseError:
            return None
        return [{"title": title, "text": text} for title, text in rows]

    def _stamp(self) -> int:
        """Return a number, not 0, that stands for the corpus's name, size and modification time."""
        try:
            found = self.corpus.stat()
        except OSError as error:
            raise ConfigError(
                f"config.corpus: {self.corpus} cannot be read: {error.strerror}"
            ) from error
        identity = f"{self.corpus.name}/{found.st_size}/{found.st_mtime_ns}"
        return zlib.crc32(identity.encode()) >> 1 | 1

    def _build(self, stamp: int) -> None:
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(part)) as connection, connection:
                connection.execute(_TABLE)
                connection.executemany("INSERT INTO passages VALUES (?, ?)", self._passages())
                connection.execute(f"PRAGMA user_version = {stamp}")
            os.replace(part, self.path)
        finally:
            part.unlink(missing_ok=True)

    def _passages(self) -> Iterator[tuple[str, str]]:
        """Yield title and text of each line."""
        with open(self.corpus, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8"))
                    text = row["text"] if "text" in row else row["contents"]
                    passage = str(row.get("title", "")), str(text)
                    "".join(passage).encode()
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    where = f"config.corpus: {self.corpus}, line {number}"
                    wrong = f"{type(error).__name__}: {error}"
                    raise ConfigError(
                        f'{where}: {wrong}; write {{"title": ..., "text": ...}} in UTF-8'
                    ) from error
                yield passage
