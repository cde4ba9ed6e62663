"""The messages of an episode's prompts: a memory chooses which past turns they show, or `history: full` shows all.

With a memory, only the current observation shows its short-term part, and the executed action replaces a rejected
response.
"""

import importlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.base import PICTURE_PLACE, Observation, interleave
from rollout.bridge.settings import MemorySettings
from rollout.errors import ConfigError
from rollout.turn import NotesEvent
from rollout.workers.reply import EnvReply

Message = dict[str, Any]

NOTES_REQUEST = (
    "Before your action you may write one line of notes. Later prompts show your last notes:\n"
    "NOTES: what you want to remember, at most {} characters"
)
_NOTES = re.compile(r"^[ \t]*NOTES:(.*)", re.MULTILINE)


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
    """Chooses how past exchanges appear; `past` is in order and holds at most `horizon` exchanges."""

    @property
    def horizon(self) -> int | None:
        """Number of past exchanges that `messages` may need; None for all."""
        ...

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        """Messages for the past exchanges; `index` is the current turn's index in the episode."""
        ...


@dataclass(frozen=True)
class WindowMemory:
    """The last n turns with their reasoning, as in Verlog, or with the executed action in place of the response."""

    horizon: int | None
    actions_only: bool = False

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(_last(past, self.horizon), self.actions_only)


@dataclass(frozen=True)
class NotesMemory(WindowMemory):
    """The last n turns; prompts also show the notes that the model wrote last, up to `notes_chars` characters."""

    notes_chars: int = 400


@dataclass(frozen=True)
class PeriodicClearMemory:
    """Grows turn by turn and is emptied every `period` turns; in between, prompts share prefixes."""

    period: int

    @property
    def horizon(self) -> int | None:
        return self.period

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(_last(past, index % self.period))


def build_memory(config: MemorySettings) -> Memory:
    """Make the memory that `memory.kind` names; raises ConfigError for an unknown kind or import path."""
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
    module, _, name = config.kind.rpartition(".")
    if not module:
        raise ConfigError(
            f"memory.kind '{config.kind}' is unknown; use window, actions_only, periodic_clear, full, "
            "inline_notes or the import path of a factory (module.function)"
        )
    try:
        return getattr(importlib.import_module(module), name)(config)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"memory.kind '{config.kind}' cannot be imported: {error}") from error


def build_messages(
    memory: Memory,
    instruction_prompt: str,
    past: Sequence[Exchange],
    current: Observation,
    index: int,
    answer_format: str,
) -> list[Message]:
    """The messages of one prompt: system, past, and the current observation with the request for a response."""
    system = [{"role": "system", "content": instruction_prompt}] if instruction_prompt else []
    return [*system, *memory.messages(past, index), current_message(current, answer_format)]


def current_message(current: Observation, answer_format: str) -> Message:
    """The current observation: short-term part first, then the long-term part, then the request."""
    text = current["text"]
    parts = ["Current Observation:", text["short_term_context"], text["long_term_context"]]
    content = "\n".join(part for part in parts if part)
    content = f"{content}\n\n{answer_format}" if answer_format else content
    only_now = (current.get("multi_modal_data") or {}).get("current_image") or []
    if not only_now or text["short_term_context"].count(PICTURE_PLACE) != len(only_now):
        return _user(content, current, only_now)
    # The short-term text comes first, so the first marks in the content belong to it.
    pieces = content.split(PICTURE_PLACE, len(only_now))
    own = (current.get("multi_modal_data") or {}).get("image") or []
    return {"role": "user", "content": [*interleave([""] * len(own), own), *interleave(pieces, only_now)]}


class Conversation:
    """Collects exchanges; call `show` with each reply of the environment, `answered` after each response."""

    def __init__(self, memory: Memory | None) -> None:
        """With `memory` None, prompts show the whole episode."""
        self._memory = memory
        self.past: deque[Exchange] = deque(maxlen=memory.horizon if memory else 0)
        self.messages: list[Message] = []
        self.notes: str | None = "" if isinstance(memory, NotesMemory) else None
        """The model's notes; None unless the memory asks for them."""
        self.notes_events: tuple[NotesEvent, ...] = ()
        """What the last response did to the notes."""
        self.request = ""
        """The end of the last prompt, which says how to answer."""
        self._index = 0

    def show(self, reply: EnvReply) -> list[Message]:
        """Add the environment's reply. Returns the new messages: the whole prompt, unless `history` is full."""
        self.request = reply.answer_format
        if reply.whole_prompts:
            self.messages, self.notes = list(map(dict, reply.messages)), None
            return self.messages
        if self._memory is not None:
            system, ask, past = reply.instruction_prompt, self._ask_for_notes(), list(self.past)
            self.messages = build_messages(self._memory, system, past, reply.observation, self._index, ask)
            return self.messages
        *earlier, last = reply.messages
        new = [*map(dict, earlier), _ask(last, reply.answer_format)]
        if not self.messages and reply.instruction_prompt:
            new = [{"role": "system", "content": reply.instruction_prompt}, *new]
        self.messages += new
        return new

    def answered(self, shown: Observation, answer: str, valid: bool, executed_action: str) -> None:
        """Add a response to the observation `shown`; a valid one may replace the notes."""
        self._index += 1
        self.notes_events = ()
        if isinstance(self._memory, NotesMemory) and self.notes is not None and valid:
            self.notes, self.notes_events = read_notes(answer, self.notes, self._memory.notes_chars)
        if self._memory is None:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.past.append(Exchange(shown, answer, valid, executed_action))

    def _ask_for_notes(self) -> str:
        """Add the request for notes to the environment's request; return it with the notes before it."""
        if not isinstance(self._memory, NotesMemory):
            return self.request
        notes = f"Your notes:\n{self.notes}" if self.notes else ""
        request = NOTES_REQUEST.format(self._memory.notes_chars)
        self.request = f"{self.request}\n\n{request}" if self.request else request
        return f"{notes}\n\n{self.request}" if notes else self.request


def read_notes(answer: str, before: str, most: int) -> tuple[str, tuple[NotesEvent, ...]]:
    """Return the notes after a valid response and what it did to them; its last line of notes counts.

    Args:
        before: the notes so far, which stay if the response has none.
        most: characters after which notes are cut.
    """
    lines = _NOTES.findall(answer)
    written = lines[-1].strip() if lines else ""
    if not written:
        return before, (NotesEvent.EMPTY,) if lines else ()
    notes = written[:most].rstrip()
    found = {
        NotesEvent.WRITTEN: True,
        NotesEvent.CUT: len(written) > most,
        NotesEvent.COPIED: notes == before,
        NotesEvent.ACTION: "ACTION:" in notes,
    }
    return notes, tuple(event for event, happened in found.items() if happened)


def _ask(message: Mapping[str, Any], answer_format: str) -> Message:
    if not answer_format:
        return dict(message)
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{answer_format}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{answer_format}"}]}


def _last(past: Sequence[Exchange], n: int | None) -> Sequence[Exchange]:
    return past if n is None else past[max(0, len(past) - n) :]


def _show(past: Sequence[Exchange], actions_only: bool = False) -> list[Message]:
    shown: list[Message] = []
    for exchange in past:
        content = "Observation:\n" + exchange.observation["text"]["long_term_context"]
        response = exchange.executed_action if actions_only else "Previous plan:\n" + exchange.reasoning()
        shown += [_user(content, exchange.observation), {"role": "assistant", "content": response}]
    return shown


def _user(content: str, observation: Observation, only_now: Sequence[Any] = ()) -> Message:
    images = [*only_now, *((observation.get("multi_modal_data") or {}).get("image") or [])]
    if not images:
        return {"role": "user", "content": content}
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": content}]}
