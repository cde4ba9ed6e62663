"""Reads `episodes.jsonl` as checked episodes and turns, and splits each response into reasoning and
action."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envs.base import text_of
from envs.text_game import find_action
from inspection.records import FILE, Record, read_episodes, split_prompts
from slime_verlog import ConfigError

_LABEL = re.compile(r"\s*(?:THINK|THOUGHT|REASONING|<think>)\s*:?", re.IGNORECASE)
_CALL = "<tool_call>"
_END_TOKEN = re.compile(r"(?:<\|[^<>|]{1,40}\|>|</s>)\Z")
_HEADING = "Current Observation:\n"
_COMMANDS = "Commands that work now: "
EXCERPT = 160
"""Characters of an action or of an example."""
_MAX_TEXT = 2000
"""Characters of an observation, or of a reasoning, that are kept."""
MAX_BARE_ACTION_WORDS = 6
"""A response without a marker and with more words than this counts as reasoning without an
action."""


class Answer(NamedTuple):
    """The parts of one response."""

    reasoning: str
    """The text before the action, without the labels `THINK:` and `<think>`."""
    action: str
    """The text from the action on; empty if the response has none."""
    has_marker: bool
    """Whether the response says where its action begins (`ACTION:`, `</think>` or
    `<tool_call>`)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; long texts are cut, because all turns of a run are held at once."""

    number: int
    """Its place in the episode, from 1; turns of notes count, as in the viewer."""
    observation: str
    """Text of the current observation, with the request for a response."""
    state: int | None
    """Hash of the observation's text and images, equal if the agent sees the same; None if images
    are missing."""
    reasoning: str
    words: int
    """Words of the whole reasoning."""
    action: str
    has_marker: bool
    ending: str
    """The last characters of the response."""
    executed: str
    valid: bool
    cut: bool | None
    """Whether the response reached its length limit; None if the record does not say."""
    tokens: int | None
    asked_for_marker: bool
    """Whether the prompt asks for a line `ACTION:`."""
    commands: tuple[str, ...]
    """The commands that the observation lists, if it does."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode; `group` is the setting and the player."""

    group: tuple[str, str]
    task: str
    seed: Any
    stop: str
    fault: str | None
    episode_return: float
    success: bool
    progression: float
    turns: Sequence[Turn]


class Place(NamedTuple):
    """Where an example is; `turn` counts from 1, as the viewer does, and is 0 without a turn."""

    task: str
    seed: Any
    turn: int
    text: str


def place_of(episode: Episode, turn: Turn) -> Place:
    """Return the place of a turn, with its action, or the end of a response without one."""
    return Place(episode.task, episode.seed, turn.number, turn.action or turn.ending)


def read_run(path: Path) -> Iterator[Episode]:
    """Read the episodes of a folder or file, in order; raises ConfigError, with line and key, if it
    is broken."""
    where = path / FILE if path.is_dir() else path
    if not where.exists():
        advice = "run slime-verlog evaluate with --out, or give the file itself"
        raise ConfigError(f"{where} does not exist; {advice}")
    number = 0
    for number, record in enumerate(read_episodes(path), 1):
        try:
            yield _episode(record)
        except KeyError as error:
            raise ConfigError(
                f"{where}, episode {number}, has a turn without {error}; report cannot judge it"
            ) from error
    if not number:
        raise ConfigError(f"{where} holds no episodes")


def _episode(record: Record) -> Episode:
    messages, turns = split_prompts(record)
    return Episode(
        group=(str(record.get("setting", "-")), str(record.get("player", "-"))),
        task=str(record.get("task_name") or record.get("task") or "-"),
        seed=record.get("seed"),
        stop=str(record.get("stop", "-")),
        fault=None if record.get("fault") is None else str(record["fault"]),
        episode_return=float(record.get("return") or 0.0),
        success=bool(record.get("success")),
        progression=float(record.get("progression") or 0.0),
        turns=[
            _turn(turn, messages, k) for k, turn in enumerate(turns, 1) if "summary" not in turn
        ],
    )


def _turn(turn: Record, messages: Sequence[Record], number: int) -> Turn:
    shown = messages[turn["prompt"][-1]] if turn["prompt"] else {}
    text = text_of(shown)
    observation = text.removeprefix(_HEADING)
    # `envs.text_game.list_commands` writes this line.
    _, has_commands, tail = observation.partition(_COMMANDS)
    commands = tail.partition("\n")[0].rstrip(".").split(", ") if has_commands else ()
    response = turn["response"]
    executed = turn["executed_action"]
    valid = bool(turn["valid"])
    answer = split_answer(response, executed if valid else None)
    finish = turn.get("finish_reason")
    tokens = (turn.get("tokens") or {}).get("text")
    return Turn(
        number=number,
        observation=observation[:_MAX_TEXT],
        state=_state(observation, shown.get("content")),
        reasoning=answer.reasoning[:_MAX_TEXT],
        words=len(answer.reasoning.split()),
        action=answer.action[:EXCERPT],
        has_marker=answer.has_marker,
        ending=response[-EXCERPT:].strip(),
        executed=executed,
        valid=valid,
        cut=None if finish is None else finish == "length",
        tokens=None if tokens is None else len(tokens),
        asked_for_marker="ACTION:" in text,
        commands=tuple(commands),
    )


def _state(observation: str, content: Any) -> int | None:
    """A hash of the text and the keys of the images; None if the record left images out."""
    parts = content if isinstance(content, list) else ()
    keys = [part.get("image") for part in parts if part.get("type") == "image"]
    return None if None in keys else hash((observation, *keys))


def split_answer(response: str, executed: str | None) -> Answer:
    """Split at the tool calls, else as the games do (`envs.text_game.find_action`), else at
    `</think>`.

    Without any marker, a short response, or one that was executed as it stands, is a bare action. A
    longer one is reasoning, which contains the action if the response is valid; `executed` is None
    if it is invalid.
    """
    response = response.rstrip()
    while match := _END_TOKEN.search(response, max(len(response) - EXCERPT, 0)):
        response = response[: match.start()].rstrip()
    reasoning, call, rest = response.partition(_CALL)
    if call:
        return Answer(_drop_labels(reasoning), call + rest, True)
    candidate, (start, _) = find_action(response)
    before = response[:start].rstrip()
    if start and not before.endswith("</think>"):
        reasoning = re.sub(r"(?:ACTION:|action:|Action)\Z", "", before)
        return Answer(_drop_labels(reasoning), candidate, True)
    thought, closed, rest = response.rpartition("</think>")
    if closed:
        return Answer(_drop_labels(thought), rest.strip(), True)
    is_short = len(response.split(maxsplit=MAX_BARE_ACTION_WORDS)) <= MAX_BARE_ACTION_WORDS
    was_executed = executed is not None and response.split() == executed.split()
    if was_executed or (is_short and not _LABEL.match(response)):
        return Answer("", response, False)
    return Answer(_drop_labels(response), executed or "", False)


def _drop_labels(text: str) -> str:
    if label := _LABEL.match(text):
        text = text[label.end() :]
    return text.replace("<think>", "").replace("</think>", "").strip()
