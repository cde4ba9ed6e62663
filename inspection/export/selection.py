"""Chooses the recorded episodes that are exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspection.view.sources import read_run
from slime_verlog import ConfigError


@dataclass
class Selection:
    """What an episode must be to be exported, and how many were. Episodes whose environment was lost never are."""

    successful: bool = False
    min_return: float | None = None
    tasks: Sequence[str] = ()
    """Names of tasks; empty for all."""
    settings: Sequence[str] = ()
    """Points of a sweep, or evaluations such as `update 40`; empty for all."""
    read: int = 0
    kept: int = 0

    def episodes(self, runs: Sequence[Path], tokenizer: str | None, trusted: bool) -> Iterator[dict[str, Any]]:
        """The chosen episodes, one at a time.

        Raises:
            ConfigError: a run cannot be read.
        """
        for run in runs:
            for episode in read_run(run, tokenizer, trusted, with_ids=True):
                self.read += 1
                if self._takes(episode):
                    self.kept += 1
                    yield episode

    def _takes(self, episode: Mapping[str, Any]) -> bool:
        total = episode.get("return")
        return (
            episode.get("stop") != "failed"
            and bool(episode["story"])
            and (not self.successful or episode.get("success") is True)
            and (self.min_return is None or (total is not None and total >= self.min_return))
            and (not self.tasks or episode.get("task_name") in self.tasks)
            and (not self.settings or episode.get("setting") in self.settings)
        )

    def nothing_left(self) -> ConfigError:
        """The error if no episode is left."""
        return ConfigError(
            f"none of the {self.read} episodes is left to write; relax --successful, --min-return, --task, --setting "
            "or --valid-only"
        )
