"""A tool with state, what it learns about its episode, and the record of a tool that is offered to the model."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from envs.tools.schema import ArgumentCheck, Schema


@dataclass(frozen=True)
class ToolEpisode:
    """What a stateful tool learns at the start of an episode."""

    task: str
    seed: int
    question: str = ""
    answer: Any = None
    """The reference answer; the model never sees it."""
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """One dict for all tools of the episode."""


class Tool(abc.ABC):
    """A tool with state: one instance per episode, made with the `config` mapping of its YAML entry.

    The schema is inferred from the type hints and docstring of `execute`, unless `schema` is set. `create`, `execute`,
    `calc_reward` and `release` may be `async`.
    """

    name: ClassVar[str] = ""
    """The name that the model uses; by default the class's name in snake_case."""
    schema: ClassVar[Mapping[str, Any] | None] = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def create(self, episode: ToolEpisode) -> Any:
        """Begin the episode. A result other than None is shown with the question."""
        return None

    @abc.abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call; subclasses name their arguments. May return whatever `results.read_result` accepts."""

    def calc_reward(self) -> Any:
        """This tool's reward for the episode, a number; added to the reward of the last turn."""
        return 0.0

    def release(self) -> Any:  # noqa: B027 - optional hook
        """Free what `create` took; called once per episode, also after a failure."""


@dataclass(frozen=True)
class ToolSpec:
    """One tool that is offered to the model."""

    name: str
    schema: Schema
    check: ArgumentCheck
    target: Any
    """A function, or a subclass of `Tool`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    create_timeout_s: float | None = None
    """Seconds that `create` may take; `timeout_s` by default."""
    deterministic: bool = True
    """Whether the same calls always give the same results."""
    source: str = ""

    @property
    def stateful(self) -> bool:
        return inspect.isclass(self.target)

    @property
    def origin(self) -> str:
        """Where the tool comes from, for error messages: `source`, or the name of `target`."""
        return self.source or f"{self.target.__module__}.{self.target.__qualname__}"
