"""A search tool over a local corpus, ranked by BM25.

The corpus is a JSONL file, one `{"title": ..., "text": ...}` a line; `id` is optional. In the YAML:
`tools: [{path: "envs.tools.search:Search", config: {corpus: wiki.jsonl, top_k: 3}}]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.options import read_options
from envs.tools.corpus import CorpusIndex
from envs.tools.registry import Tool, ToolEpisode


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """`index` is where the index file goes; beside the corpus unless given. Give each corpus its own."""

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
        path = Path(self.options.index).expanduser() if self.options.index else None
        self.index = CorpusIndex(Path(self.options.corpus).expanduser(), path)

    def create(self, episode: ToolEpisode) -> None:
        self.index.ensure()

    def execute(self, query: str) -> tuple[str, float, dict[str, float]]:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: Words to look for; names and rare words find more than whole sentences.
        """
        found = self.index.find(query, self.options.top_k)
        if not found:
            return "Nothing was found. Try other words.", 0.0, {"empty": 1.0}
        shown = (
            f"[{number}] {passage['title']}\n{passage['text'][: self.options.passage_chars]}"
            for number, passage in enumerate(found, 1)
        )
        return "\n\n".join(shown), 0.0, {}
