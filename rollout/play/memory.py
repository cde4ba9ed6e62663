"""The messages of an episode's prompts: a memory chooses which past turns they show, or `history: full` shows all.

With a memory, only the current observation shows its short-term part, and the executed action replaces a rejected
response.
"""

import math
import re
import reprlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.base import Observation, content_of, text_of
from envs.errors import describe
from envs.loading import load_attribute
from rollout.bridge.settings import MemorySettings, RolloutSettings
from rollout.errors import ConfigError
from rollout.spec import CHARS_PER_TOKEN
from rollout.turn import EnvReply, NotesEvent
from rollout.workers.reply import with_text

Message = dict[str, Any]

NOTES_REQUEST = (
    "Before your action you may write one line of notes. Later prompts show your last notes:\n"
    "NOTES: what you want to remember, at most {} characters"
)
_SUMMARY_START = "Write your notes now, and nothing else"
SUMMARY_REQUEST = (
    f"{_SUMMARY_START}: what you need to remember from the text above. They replace your old notes. "
    "Later prompts show the task, these notes and what happens from now on. Notes are cut after {} tokens."
)
_NOTES = re.compile(r"^[ \t]*NOTES:(.*)", re.MULTILINE)
_AGES = ((1, "1"), (4, "2_to_4"), (math.inf, "5_and_more"))
"""Groups of facts by the number of times that the notes have been rewritten since the fact appeared."""


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
class SummaryMemory:
    """The turns since the model last wrote its notes, and the `keep` turns before; it writes in a separate turn."""

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
    """The whole conversation; where it would outgrow the context, it goes on from notes and the `keep` last turns."""

    free: int
    keep: int
    times: int
    max_tokens: int


@dataclass(frozen=True)
class PeriodicClearMemory:
    """Grows turn by turn and is emptied every `horizon` turns; in between, prompts share prefixes."""

    horizon: int

    def messages(self, past: Sequence[Exchange], index: int) -> list[Message]:
        return _show(_last(past, index % self.horizon))


def memory_of(settings: RolloutSettings) -> Memory | Compaction | None:
    """Make the memory of prompts as the YAML describes them; None: each shows the whole conversation."""
    config = settings.memory
    if settings.history == "window":
        return build_memory(config)
    if config.kind == "notes":
        return Compaction(config.free, config.keep, config.times, config.max_tokens)
    return None


def build_memory(config: MemorySettings) -> Memory:
    """Make the memory that `memory.kind` names; raises ConfigError for an unknown kind, or a factory that fails."""
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
            f"memory.kind '{config.kind}' is unknown; use window, actions_only, periodic_clear, full, "
            "inline_notes, notes or the import path of a factory (module.function, or file.py:function)"
        )
    factory = load_attribute(config.kind, "memory.kind")
    try:
        memory = factory(config)
    except Exception as error:
        raise ConfigError(f"memory.kind: {config.kind} failed with the memory's settings: {describe(error)}") from error
    horizon = getattr(memory, "horizon", "")
    if isinstance(horizon, int | None) and (horizon or 0) >= 0 and callable(getattr(memory, "messages", None)):
        return memory
    raise ConfigError(
        f"memory.kind: {config.kind} returned {reprlib.repr(memory)}; return an object with `horizon` (past turns that "
        "it may need, None for all) and `messages(past, index)`"
    )


def build_messages(
    memory: Memory,
    instruction_prompt: str,
    past: Sequence[Exchange],
    current: Observation,
    index: int,
    answer_format: str,
) -> list[Message]:
    """The messages of one prompt: system, past, and the current observation; raises ConfigError if the memory fails."""
    system = [{"role": "system", "content": instruction_prompt}] if instruction_prompt else []
    try:
        shown = list(memory.messages(past, index))
        _ = [message["role"] + message["content"] for message in shown if isinstance(message["content"], str)]
    except Exception as error:  # of a factory's memory
        told = f"{type(memory).__name__}.messages must return a list of messages with role and content"
        raise ConfigError(f"{told}: {describe(error)}") from error
    return [*system, *shown, current_message(current, answer_format)]


def current_message(current: Observation, answer_format: str) -> Message:
    """The current observation: short-term part first, then the long-term part, then the request."""
    text = current["text"]
    parts = ["Current Observation:", text["short_term_context"], text["long_term_context"]]
    content = "\n".join(part for part in parts if part)
    content = f"{content}\n\n{answer_format}" if answer_format else content
    return {"role": "user", "content": content_of(current, content)}


def asks_for_notes(messages: Sequence[Message]) -> bool:
    """Whether a prompt asks for notes in place of an answer to the environment."""
    return _SUMMARY_START in text_of(messages[-1])


def write_facts(facts: Sequence[str]) -> str:
    """The notes of a scripted player, which knows the environment's facts."""
    return "; ".join(facts)


class Conversation:
    """Collects exchanges; call `show` with each reply of the environment, `answered` after each response.

    If `wants_notes`, call `show` with `notes=True` and `noted` with the response; the environment gets nothing.
    """

    def __init__(self, memory: Memory | Compaction | None) -> None:
        """With `memory` None, prompts show the whole episode."""
        self._window = None if isinstance(memory, Compaction) else memory
        self._compaction = memory if isinstance(memory, Compaction) else None
        self.past: deque[Exchange] = deque(maxlen=self._window.horizon if self._window else 0)
        self.messages: list[Message] = []
        self._told: list[Message] = []
        """Without a window: what the next prompt continues, up to the last response; empty if it begins anew."""
        self._asked: list[Message] = []
        """Without a window: the messages of the current turn."""
        self._task: list[Message] = []
        """Without a window: the first observation."""
        self._exchanges: deque[tuple[list[Message], Message]] = deque(maxlen=getattr(self._compaction, "keep", 0))
        """With compaction: messages and response of the last turns."""
        writes = isinstance(memory, NotesMemory | SummaryMemory | Compaction)
        self.notes: str | None = "" if writes else None
        """The model's notes; None unless the memory asks for them."""
        self.notes_events: tuple[NotesEvent, ...] = ()
        """What the last response did to the notes."""
        self.request = ""
        """The end of the last prompt, which says how to answer."""
        self._index = 0
        self._since_notes = 0
        """Turns since the last notes."""
        self._written = 0
        """How often the model has written notes in a turn of its own."""
        self._rewrites: dict[str, int] = {}
        """By fact: how often the notes were rewritten since the environment first named it."""

    @property
    def notes_tokens(self) -> int | None:
        """Maximum tokens of notes that are written in a separate turn; None without such turns."""
        memory = self._compaction or self._window
        return memory.max_tokens if isinstance(memory, SummaryMemory | Compaction) else None

    @property
    def inline_notes(self) -> str | None:
        """The model's notes, if every response may change them."""
        return self.notes if isinstance(self._window, NotesMemory) else None

    def wants_notes(self, tokens: int | None = None, fits: bool = True, left: int | None = None) -> bool:
        """Whether the model must write its notes before it answers the prompt `messages`.

        Args:
            tokens: the prompt's; None estimates them.
            fits: whether a later prompt could still ask for notes.
            left: tokens that the context has left; None if it is unknown or unlimited.
        """
        if self.notes_tokens is None or self.notes is None or not self._since_notes:
            return False
        if self._compaction is not None:
            is_short = left is not None and left < self._compaction.free
            can_shorten = self._written < self._compaction.times and self._since_notes > self._compaction.keep
            return can_shorten and (is_short or not fits)
        assert isinstance(self._window, SummaryMemory)
        if tokens is None:
            tokens = sum(len(text_of(message)) for message in self.messages) // CHARS_PER_TOKEN
        return self._since_notes >= self._window.every or tokens > self._window.budget or not fits

    def show(self, reply: EnvReply, *, notes: bool = False) -> list[Message]:
        """Show the environment's reply, or ask for notes instead of an answer to it.

        Returns the messages that the prompt adds to the turn before it: all of them, unless `appends`.
        """
        self.request = SUMMARY_REQUEST.format(self.notes_tokens) if notes else reply.answer_format
        self._rewrites = {fact: self._rewrites.get(fact, 0) for fact in reply.facts}
        if reply.whole_prompts:
            self.messages, self.notes = list(map(dict, reply.messages)), None
            return self.messages
        if self._window is not None:
            system, ask, past = reply.instruction_prompt, self._ask_for_notes(), list(self.past)
            self.messages = build_messages(self._window, system, past, reply.observation, self._index, ask)
            return self.messages
        new = self._asked = _with_text(reply.messages, self.request)
        if not self._told:
            self._task = self._task or list(map(dict, reply.messages))
            system = [{"role": "system", "content": reply.instruction_prompt}] if reply.instruction_prompt else []
            new = [*system, *self._after_notes(), *self._asked]
        self.messages = [*self._told, *new]
        return new

    def _after_notes(self) -> list[Message]:
        """What a compacted conversation shows of the past: task, notes, and the last responses with their replies."""
        if not self._exchanges:
            return []
        responses = [[*asked, response] for asked, response in self._exchanges]
        kept = [message for exchange in responses for message in exchange][len(self._exchanges[0][0]) :]
        return [*_with_text(self._task, self._told_notes()), *kept]

    @property
    def appends(self) -> bool:
        """Whether the next prompt appends to the turn before it."""
        return bool(self._told)

    def answered(self, shown: Observation, answer: str, valid: bool, executed_action: str) -> None:
        """Add a response to the observation `shown`; a valid one may replace the notes."""
        self._index += 1
        self._since_notes += 1
        self.notes_events = ()
        if isinstance(self._window, NotesMemory) and self.notes is not None and valid:
            self.notes, self.notes_events = read_notes(answer, self.notes, self._window.notes_chars)
        if self._window is not None:
            self.past.append(Exchange(shown, answer, valid, executed_action))
            return
        response = {"role": "assistant", "content": answer}
        self._exchanges.append((self._asked, response))
        self.messages = self._told = [*self.messages, response]

    def with_notes(self, response: str, facts: Sequence[str]) -> str:
        """Return a scripted player's response, with a line of notes if inline notes lack a fact of the environment."""
        if self.inline_notes is None or all(fact.lower() in self.inline_notes.lower() for fact in facts):
            return response
        return f"NOTES: {write_facts(facts)}\n{response}"

    def cut_notes(self, response: str) -> str:
        """Return the notes of a player without a tokenizer, cut after about `memory.max_tokens` tokens."""
        return after_reasoning(response).strip()[: (self.notes_tokens or 0) * CHARS_PER_TOKEN]

    def noted(self, response: str) -> None:
        """Replace the notes by a response that was asked for them, unless it is empty, and forget older turns."""
        self.notes, self.notes_events = after_reasoning(response).strip() or self.notes, ()
        self._since_notes = 0
        self._written += 1
        self._told = []
        while isinstance(self._window, SummaryMemory) and len(self.past) > self._window.keep:
            self.past.popleft()
        self._rewrites = {fact: count + 1 for fact, count in self._rewrites.items()}

    def facts_kept(self) -> dict[str, float]:
        """Share of the environment's facts that the notes name, in all and by the age of the fact in rewrites."""
        groups: dict[str, list[bool]] = {}
        for fact, count in self._rewrites.items():
            kept = fact.lower() in (self.notes or "").lower()
            age = next(name for limit, name in _AGES if count <= limit)
            for name in ("facts_kept", f"facts_kept_{age}"):
                groups.setdefault(name, []).append(kept)
        return {name: sum(kept) / len(kept) for name, kept in groups.items()}

    def _ask_for_notes(self) -> str:
        """Add the request for inline notes to the environment's request; return it with the notes before it."""
        if isinstance(self._window, NotesMemory):
            request = NOTES_REQUEST.format(self._window.notes_chars)
            self.request = f"{self.request}\n\n{request}" if self.request else request
        return "\n\n".join(part for part in (self._told_notes(), self.request) if part)

    def _told_notes(self) -> str:
        return f"Your notes:\n{self.notes}" if self.notes else ""


def _with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[Message]:
    """Copy the messages, with a paragraph at the end of the last one."""
    *earlier, last = messages
    return [*map(dict, earlier), with_text(last, f"\n\n{text}") if text else dict(last)]


def after_reasoning(response: str) -> str:
    """Return what follows a response's reasoning; nothing if the reasoning never ends."""
    from envs.calls import reasoning_end  # not at the top: only memories with notes need it

    start = reasoning_end(response)
    return "" if start is None else response[start:]


def read_notes(answer: str, before: str, most: int) -> tuple[str, tuple[NotesEvent, ...]]:
    """Return the notes after a valid response and what it did to them; its last line of notes counts.

    Args:
        before: the notes so far, which stay if the response has none.
        most: characters after which notes are cut.
    """
    lines = _NOTES.findall(after_reasoning(answer))
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


def _last(past: Sequence[Exchange], n: int | None) -> Sequence[Exchange]:
    return past if n is None else past[max(0, len(past) - n) :]


def _show(past: Sequence[Exchange], actions_only: bool = False) -> list[Message]:
    shown: list[Message] = []
    for exchange in past:
        content = "Observation:\n" + exchange.observation["text"]["long_term_context"]
        response = exchange.executed_action if actions_only else "Previous plan:\n" + exchange.reasoning()
        content = content_of(exchange.observation, content, current=False)
        shown += [{"role": "user", "content": content}, {"role": "assistant", "content": response}]
    return shown
