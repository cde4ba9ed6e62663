"""A search tool over a local corpus, ranked by BM25.

The corpus is a JSONL file with one `{"title": ..., "text": ...}` per line; `id` is optional. In the YAML:
`tools: [{path: "envs.tools.search:Search", config: {corpus: wiki.jsonl, top_k: 3}}]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.tools.base import Tool, ToolEpisode
from envs.tools.corpus import CorpusIndex
from slime_verlog import Field, Settings, read_settings


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
        shown = (
            f"[{number}] {passage['title']}\n{passage['text'][: self.settings.passage_chars]}"
            for number, passage in enumerate(found, 1)
        )
        return "\n\n".join(shown), 0.0, {}
