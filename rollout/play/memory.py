"""Chooses which past turns a prompt shows, and how.

With a memory, only the current observation shows its short-term part, and the executed action
replaces a rejected response.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.base import Observation, content_of
from envs.errors import describe
from envs.loading import load_attribute
from rollout.bridge.settings import MemorySettings, RolloutSettings
from rollout.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One past turn: the observation, the response, and the executed action."""

    observation: Observation
    answer: str
    valid: bool
    executed_action: str

    def reasoning(self) -> str:
        """The response with its reasoning; for a rejected response, only the executed action."""
        return self.answer if self.valid else f"ACTION: {self.executed_action}"


class Memory(Protocol):
    """Chooses how past exchanges appear; `past` is in order and holds at most `horizon`
    exchanges."""

    @property
    def horizon(self) -> int | None:
        """Number of past exchanges that `messages` may need; None for all."""
        ...

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        """Messages for the past exchanges; `index` is the current turn's index in the episode."""
        ...


@dataclass(frozen=True)
class WindowMemory:
    """The last n turns with their reasoning, as in Verlog, or with the executed action in place of
    the response."""

    horizon: int | None
    actions_only: bool = False

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(_last(past, self.horizon), self.actions_only)


@dataclass(frozen=True)
class NotesMemory(WindowMemory):
    """The last n turns; prompts also show the notes that the model wrote last, up to `notes_chars`
    characters."""

    notes_chars: int = 400


@dataclass(frozen=True)
class SummaryMemory:
    """The turns since the model last wrote its notes, and the `keep` turns before; it writes in a
    separate turn."""

    every: int
    budget: int
    keep: int
    max_tokens: int

    @property
    def horizon(self) -> int:
        return self.every + self.keep

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(past)


@dataclass(frozen=True)
class Compaction:
    """The whole conversation; where it would outgrow the context, it goes on from notes and the
    `keep` last turns."""

    free: int
    keep: int
    times: int
    max_tokens: int


@dataclass(frozen=True)
class PeriodicClearMemory:
    """Grows turn by turn and is emptied every `horizon` turns; in between, prompts share
    prefixes."""

    horizon: int

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(_last(past, index % self.horizon))


def memory_of(settings: RolloutSettings) -> Memory | Compaction | None:
    """Make the memory of prompts as the YAML describes them; None: each shows the whole
    conversation."""
    config = settings.memory
    if settings.history == "window":
        return build_memory(config)
    if config.kind == "notes":
        return Compaction(config.free, config.keep, config.times, config.max_tokens)
    return None


def build_memory(config: MemorySettings) -> Memory:
    """Make the memory that `memory.kind` names; raises ConfigError for an unknown kind, or a
    factory that fails."""
    match config.kind:
        case "window":
            return WindowMemory(config.n)
        case "actions_only":
            return WindowMemory(config.n, actions_only=True)
        case "periodic_clear":
            return PeriodicClearMemory(config.period)
        case "full":
            return WindowMemory(None)
        case "inline_notes":
            return NotesMemory(config.n, notes_chars=config.notes_chars)
        case "notes":
            return SummaryMemory(config.every, config.budget, config.keep, config.max_tokens)
    if not {".", ":"} & set(config.kind):
        raise ConfigError(
            f"memory.kind '{config.kind}' is unknown; use window, actions_only, periodic_clear, "
            "full, inline_notes, notes or the import path of a factory (module.function, or "
            "file.py:function)"
        )
    factory = load_attribute(config.kind, "memory.kind")
    try:
        memory = factory(config)
    except Exception as error:
        raise ConfigError(
            f"memory.kind: {config.kind} failed with the memory's settings: {describe(error)}"
        ) from error
    horizon = getattr(memory, "horizon", "")
    if (
        isinstance(horizon, int | None)
        and (horizon or 0) >= 0
        and callable(getattr(memory, "messages", None))
    ):
        return memory
    raise ConfigError(
        f"memory.kind: {config.kind} returned {reprlib.repr(memory)}; return an object with "
        "`horizon` (past turns that it may need, None for all) and `messages(past, index)`"
    )


def _last(past: Sequence[Exchange], n: int | None) -> Sequence[Exchange]:
    return past if n is None else past[max(0, len(past) - n) :]


def _show(past: Sequence[Exchange], actions_only: bool = False) -> list[Message]:
    shown: list[Message] = []
    for exchange in past:
        content = "Observation:\n" + exchange.observation["text"]["long_term_context"]
        response = (
            exchange.executed_action if actions_only else "Previous plan:\n" + exchange.reasoning()
        )
        content = content_of(exchange.observation, content, current=False)
        shown += [{"role": "user", "content": content}, {"role": "assistant", "content": response}]
    return shown
