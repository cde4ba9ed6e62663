"""Notes that the model writes for itself: the requests for them, what a response wrote, and what it
kept."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from envs.base import text_of
from envs.calls import reasoning_end
from rollout.turn import FinishReason, Generation, NotesEvent, Prompt

NOTES_REQUEST = (
    "Before your action you may write one line of notes. Later prompts show your last notes:\n"
    "NOTES: what you want to remember, at most {} characters"
)
_SUMMARY_START = "Write your notes now, and nothing else"
SUMMARY_REQUEST = (
    f"{_SUMMARY_START}: what you need to remember from the text above. They replace your old "
    "notes. Later prompts show the task, these notes and what happens from now on. Notes are cut "
    "after {} tokens."
)
_NOTES = re.compile(r"^[ \t]*NOTES:(.*)", re.MULTILINE)
_AGES = ((1, "1"), (4, "2_to_4"), (math.inf, "5_and_more"))
"""Groups of facts by the number of times that the notes have been rewritten since the fact
appeared."""


class Notes:
    """The model's notes in one episode; `text` is what later prompts show."""

    def __init__(self) -> None:
        self.text = ""
        self.events: tuple[NotesEvent, ...] = ()
        """What the last response did to them."""
        self.turns = 0
        """Turns since they were written in a turn of their own."""
        self.written = 0
        """How often that was."""
        self._rewrites: dict[str, int] = {}
        """By fact: how often the notes were rewritten since the environment first named it."""

    def see(self, facts: Sequence[str]) -> None:
        """Take the facts that the environment names now."""
        self._rewrites = {fact: self._rewrites.get(fact, 0) for fact in facts}

    def answered(self, response: str | None, most: int) -> None:
        """Count a turn, whose `response` may have a line of notes; they are cut after `most`
        characters."""
        self.turns += 1
        self.events = ()
        if response is not None:
            self.text, self.events = read_notes(response, self.text, most)

    def replace(self, response: str) -> None:
        """Take a response that was asked for notes alone, unless it is empty."""
        self.text = after_reasoning(response).strip() or self.text
        self.events = ()
        self.turns = 0
        self.written += 1
        self._rewrites = {fact: count + 1 for fact, count in self._rewrites.items()}

    def name(self, facts: Sequence[str]) -> bool:
        """Whether the notes name all of these facts."""
        return all(fact.lower() in self.text.lower() for fact in facts)

    def facts_kept(self) -> dict[str, float]:
        """Share of the environment's facts that they name, in all and by the age of the fact in
        rewrites."""
        groups: dict[str, list[bool]] = {}
        for fact, count in self._rewrites.items():
            age = next(name for limit, name in _AGES if count <= limit)
            for group in ("facts_kept", f"facts_kept_{age}"):
                groups.setdefault(group, []).append(self.name([fact]))
        return {name: sum(kept) / len(kept) for name, kept in groups.items()}


def asks_for_notes(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt asks for notes in place of an answer to the environment."""
    return _SUMMARY_START in text_of(messages[-1])


def write_facts(facts: Sequence[str]) -> str:
    """The notes of a scripted player, which knows the environment's facts."""
    return "; ".join(facts)


def after_reasoning(response: str) -> str:
    """Return what follows a response's reasoning; nothing if the reasoning never ends."""
    start = reasoning_end(response)
    return "" if start is None else response[start:]


def read_notes(answer: str, before: str, most: int) -> tuple[str, tuple[NotesEvent, ...]]:
    """Return the notes after a valid response and what it did to them; its last line of notes
    counts.

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


def measure_notes(
    generation: Generation,
    text: str,
    prompt: Prompt,
    ends: Collection[int],
    control: Collection[int],
) -> dict[str, float]:
    """Return what can be wrong with notes; `copied` is left out if they have fewer than four
    tokens.

    `ends` are the tokens that end a response, `control` all control tokens.
    """
    ids = list(generation.token_ids)
    while ids and ids[-1] in ends:
        ids.pop()
    found = {
        "tokens": float(len(generation.token_ids)),
        "empty": float(not text.strip()),
        "cut": float(generation.finish_reason is FinishReason.LENGTH),
        "control_tokens": float(any(token in control for token in ids)),
        "action_lines": float("ACTION:" in text),
    }
    shown = _four_grams(list(prompt.token_ids))
    written = _four_grams(ids)
    return {**found, "copied": len(written & shown) / len(written)} if written else found


def _four_grams(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
