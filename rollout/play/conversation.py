"""The messages of an episode's prompts: a memory chooses what they show of the past, or they grow
turn by turn."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import Observation, content_of, text_of
from envs.errors import describe
from rollout.errors import ConfigError
from rollout.play.memory import Compaction, Exchange, Memory, Message, NotesMemory, SummaryMemory
from rollout.play.notes import NOTES_REQUEST, SUMMARY_REQUEST, Notes, after_reasoning, write_facts
from rollout.spec import CHARS_PER_TOKEN
from rollout.turn import EnvReply, NotesEvent
from rollout.workers.reply import with_text


class Conversation:
    """Collects exchanges; call `show` with each reply of the environment, `answered` after each
    response.

    If `wants_notes`, call `show` with `notes=True` and `noted` with the response; the environment
    gets nothing.
    """

    def __init__(self, memory: Memory | Compaction | None) -> None:
        """With `memory` None, prompts show the whole episode."""
        self._window = None if isinstance(memory, Compaction) else memory
        self._compaction = memory if isinstance(memory, Compaction) else None
        self.past: deque[Exchange] = deque(maxlen=self._window.horizon if self._window else 0)
        self.messages: list[Message] = []
        self.request = ""
        """The end of the last prompt, which says how to answer."""
        self._index = 0
        self._growing = Growing(self._compaction.keep if self._compaction else 0)
        """What prompts show without a window."""
        writes = isinstance(memory, NotesMemory | SummaryMemory | Compaction)
        self._notes = Notes() if writes else None

    def show(self, reply: EnvReply, *, notes: bool = False) -> list[Message]:
        """Show the environment's reply, or ask for notes instead of an answer to it.

        Returns the messages that the prompt adds to the turn before it: all of them, unless
        `appends`.
        """
        self.request = SUMMARY_REQUEST.format(self.notes_tokens) if notes else reply.answer_format
        if reply.whole_prompts:
            self.messages = list(map(dict, reply.messages))
            self._notes = None
            return self.messages
        if self._notes is not None:
            self._notes.see(reply.facts)
        if self._window is None:
            new = self._growing.show(reply, self.request, self._told_notes())
            self.messages = self._growing.messages
            return new
        if isinstance(self._window, NotesMemory):
            inline = NOTES_REQUEST.format(self._window.notes_chars)
            self.request = f"{self.request}\n\n{inline}" if self.request else inline
        ask = "\n\n".join(part for part in (self._told_notes(), self.request) if part)
        system = reply.instruction_prompt
        past = list(self.past)
        self.messages = build_messages(
            self._window, system, past, reply.observation, self._index, ask
        )
        return self.messages

    @property
    def appends(self) -> bool:
        """Whether the next prompt appends to the turn before it."""
        return self._window is None and bool(self._growing.told)

    def answered(self, shown: Observation, answer: str, valid: bool, executed_action: str) -> None:
        """Add a response to the observation `shown`; a valid one may replace the notes."""
        self._index += 1
        if self._notes is not None:
            inline = self._window if isinstance(self._window, NotesMemory) else None
            written = answer if inline is not None and valid else None
            self._notes.answered(written, inline.notes_chars if inline is not None else 0)
        if self._window is not None:
            self.past.append(Exchange(shown, answer, valid, executed_action))
            return
        self._growing.answered(answer)
        self.messages = self._growing.messages

    # The rest is about notes.

    @property
    def notes(self) -> str | None:
        """The model's notes; None unless the memory asks for them."""
        return None if self._notes is None else self._notes.text

    @property
    def notes_events(self) -> tuple[NotesEvent, ...]:
        """What the last response did to the notes."""
        return () if self._notes is None else self._notes.events

    @property
    def notes_tokens(self) -> int | None:
        """Maximum tokens of notes that are written in a separate turn; None without such turns."""
        memory = self._compaction or self._window
        return memory.max_tokens if isinstance(memory, SummaryMemory | Compaction) else None

    @property
    def inline_notes(self) -> str | None:
        """The model's notes, if every response may change them."""
        return self.notes if isinstance(self._window, NotesMemory) else None

    def wants_notes(
        self, tokens: int | None = None, fits: bool = True, left: int | None = None
    ) -> bool:
        """Whether the model must write its notes before it answers the prompt `messages`.

        Args:
            tokens: the prompt's; None estimates them.
            fits: whether a later prompt could still ask for notes.
            left: tokens that the context has left; None if it is unknown or unlimited.
        """
        notes = self._notes
        if self.notes_tokens is None or notes is None or not notes.turns:
            return False
        if self._compaction is not None:
            is_short = left is not None and left < self._compaction.free
            can_shorten = (
                notes.written < self._compaction.times and notes.turns > self._compaction.keep
            )
            return can_shorten and (is_short or not fits)
        assert isinstance(self._window, SummaryMemory)
        if tokens is None:
            tokens = sum(len(text_of(message)) for message in self.messages) // CHARS_PER_TOKEN
        return notes.turns >= self._window.every or tokens > self._window.budget or not fits

    def noted(self, response: str) -> None:
        """Replace the notes by a response that was asked for them, unless it is empty, and forget
        older turns."""
        if self._notes is not None:
            self._notes.replace(response)
        self._growing.told = []
        while isinstance(self._window, SummaryMemory) and len(self.past) > self._window.keep:
            self.past.popleft()

    def facts_kept(self) -> dict[str, float]:
        """What `Notes.facts_kept` says; nothing without notes."""
        return {} if self._notes is None else self._notes.facts_kept()

    def with_notes(self, response: str, facts: Sequence[str]) -> str:
        """Return a scripted player's response, with a line of notes if inline notes lack a fact of
        the environment."""
        if self.inline_notes is None or self._notes is None or self._notes.name(facts):
            return response
        return f"NOTES: {write_facts(facts)}\n{response}"

    def cut_notes(self, response: str) -> str:
        """Return the notes of a player without a tokenizer, cut after about `memory.max_tokens`
        tokens."""
        return after_reasoning(response).strip()[: (self.notes_tokens or 0) * CHARS_PER_TOKEN]

    def _told_notes(self) -> str:
        return f"Your notes:\n{self.notes}" if self.notes else ""


class Growing:
    """A conversation that grows turn by turn; after notes it goes on from its task, the notes and
    the last turns."""

    def __init__(self, keep: int) -> None:
        """`keep`: turns that it still shows after notes."""
        self.messages: list[Message] = []
        self.told: list[Message] = []
        """What the next prompt continues, up to the last response; empty if it begins anew."""
        self._asked: list[Message] = []
        """The messages of the current turn."""
        self._task: list[Message] = []
        """The first observation."""
        self._exchanges: deque[tuple[list[Message], Message]] = deque(maxlen=keep)
        """Messages and response of the last turns."""

    def show(self, reply: EnvReply, request: str, notes: str) -> list[Message]:
        """Return the messages that the prompt adds to `told`."""
        new = self._asked = _with_text(reply.messages, request)
        if not self.told:
            self._task = self._task or list(map(dict, reply.messages))
            system = (
                [{"role": "system", "content": reply.instruction_prompt}]
                if reply.instruction_prompt
                else []
            )
            new = [*system, *self._after_notes(notes), *self._asked]
        self.messages = [*self.told, *new]
        return new

    def _after_notes(self, notes: str) -> list[Message]:
        """What a prompt that begins anew shows of the past: task, notes, and the last responses
        with their replies."""
        if not self._exchanges:
            return []
        responses = [[*asked, response] for asked, response in self._exchanges]
        kept = [message for exchange in responses for message in exchange][
            len(self._exchanges[0][0]) :
        ]
        return [*_with_text(self._task, notes), *kept]

    def answered(self, answer: str) -> None:
        """Add a response."""
        response = {"role": "assistant", "content": answer}
        self._exchanges.append((self._asked, response))
        self.messages = self.told = [*self.messages, response]


def _check_message(role: Any, content: Any) -> None:
    """Raise TypeError or ValueError for what no chat template can show."""
    if not isinstance(role, str):
        raise TypeError(f"role is {role!r}")
    if not isinstance(content, str | list):
        raise TypeError(f"content is {content!r}")
    for text in [content] if isinstance(content, str) else [part.get("text") for part in content]:
        if text is not None:
            text.encode()


def build_messages(
    memory: Memory,
    instruction_prompt: str,
    past: Sequence[Exchange],
    current: Observation,
    index: int,
    answer_format: str,
) -> list[Message]:
    """The messages of one prompt: system, past, and the current observation; raises ConfigError if
    the memory fails."""
    system = [{"role": "system", "content": instruction_prompt}] if instruction_prompt else []
    try:
        shown = list(memory.messages(past, index))
        for message in shown:
            _check_message(message["role"], message["content"])
    except Exception as error:  # of a factory's memory
        told = (
            f"{type(memory).__name__}.messages must return a list of messages with role and content"
        )
        raise ConfigError(f"{told}: {describe(error)}") from error
    return [*system, *shown, current_message(current, answer_format)]


def current_message(current: Observation, answer_format: str) -> Message:
    """The current observation: short-term part first, then the long-term part, then the request."""
    text = current["text"]
    parts = ["Current Observation:", text["short_term_context"], text["long_term_context"]]
    content = "\n".join(part for part in parts if part)
    content = f"{content}\n\n{answer_format}" if answer_format else content
    return {"role": "user", "content": content_of(current, content)}


def _with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[Message]:
    """Copy the messages, with a paragraph at the end of the last one."""
    *earlier, last = messages
    return [*map(dict, earlier), with_text(last, f"\n\n{text}") if text else dict(last)]
