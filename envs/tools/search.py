"""A search tool over a local corpus: BM25 in SQLite's full-text index, which is built once and then only read.

The corpus is a JSONL file, one `{"title": ..., "text": ...}` a line; `id` is optional. In the YAML:
`tools: [{path: "envs.tools.search:Search", config: {corpus: wiki.jsonl, top_k: 3}}]`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.options import read_options
from envs.tools.registry import Tool, ToolEpisode

_WORD = re.compile(r"\w+")
_MOST_WORDS = 32
_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(title, text, id UNINDEXED, tokenize='porter unicode61')"
_FIND = (
    "SELECT title, text, id, bm25(passages, 2.0, 1.0) AS rank FROM passages WHERE passages MATCH ? "
    "ORDER BY rank, rowid LIMIT ?"
)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """`index` is where the index file goes; beside the corpus unless given."""

    corpus: str
    index: str | None = None
    top_k: int = 3
    passage_chars: int = 1000

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.passage_chars < 1:
            raise ConfigError(f"top_k and passage_chars must be at least 1, got {self.top_k}, {self.passage_chars}")


class Search(Tool):
    """Finds passages by their words; counts its calls and those that found nothing."""

    name = "search"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.options = read_options(SearchOptions, config, "config.")
        corpus = Path(self.options.corpus).expanduser()
        self.index = Path(self.options.index).expanduser() if self.options.index else corpus.with_suffix(".fts5")
        self._corpus = corpus

    def create(self, episode: ToolEpisode) -> None:
        ensure_index(self._corpus, self.index)

    def execute(self, query: str) -> tuple[str, float, dict[str, float]]:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: Words to look for; names and rare words find more than whole sentences.
        """
        found = find(self.index, query, self.options.top_k)
        if not found:
            return "Nothing was found. Try other words.", 0.0, {"empty": 1.0}
        shown = (
            f"[{number}] {passage['title']}\n{passage['text'][: self.options.passage_chars]}"
            for number, passage in enumerate(found, 1)
        )
        return "\n\n".join(shown), 0.0, {}


def find(index: Path, query: str, count: int) -> list[dict[str, str]]:
    """The `count` passages that fit best, best first; words are looked for, operators of the query language not."""
    words = list(dict.fromkeys(_WORD.findall(query.lower())))[:_MOST_WORDS]
    if not words:
        return []
    match = " OR ".join(f'"{word}"' for word in words)
    with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro&immutable=1", uri=True)) as connection:
        rows = connection.execute(_FIND, (match, count)).fetchall()
    return [{"title": title, "text": text, "id": name} for title, text, name, _ in rows]


def ensure_index(corpus: Path, index: Path) -> None:
    """Build the index if it is missing or older than the corpus; whoever comes second waits.

    Raises:
        ConfigError: the corpus cannot be read or has a line of another form, or the index cannot be written.
    """
    try:
        edited = corpus.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"config.corpus: {corpus} cannot be read: {error.strerror}") from error
    if _is_fresh(index, edited):
        return
    try:
        with open(index.with_name(index.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_fresh(index, edited):
                _build(corpus, index)
    except OSError as error:
        raise ConfigError(f"config.index: {index} cannot be written: {error.strerror}; name another file") from error


def _is_fresh(index: Path, edited: int) -> bool:
    return index.exists() and index.stat().st_mtime_ns >= edited


def _build(corpus: Path, index: Path) -> None:
    part = index.with_name(f"{index.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(part)) as connection, connection:
        connection.execute(_TABLE)
        connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", _passages(corpus))
    os.replace(part, index)


def _passages(corpus: Path) -> Iterator[tuple[str, str, str]]:
    with open(corpus, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = row["text"] if "text" in row else row["contents"]
                yield str(row.get("title", "")), str(text), str(row.get("id", number))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f'config.corpus: {corpus}, line {number}: expected {{"title", "text"}}') from error
