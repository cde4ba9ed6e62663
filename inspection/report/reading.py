"""Reads `episodes.jsonl` as checked episodes and turns, one episode at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspection.records import FILE, read_episodes
from inspection.report.answers import Answer, split_answer
from slime_verlog import ConfigError

_HEADING = "Current Observation:\n"
_COMMANDS = "Commands that work now: "


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn."""

    observation: str
    """Text of the current observation, with the request for an answer."""
    state: int | None
    """Hash of the observation's text and pictures, equal if the agent sees the same; None if pictures are missing."""
    answer: Answer
    response: str
    executed: str
    valid: bool
    cut: bool | None
    """Whether the answer reached its length limit; None if the record does not say."""
    tokens: int | None
    asked_for_marker: bool
    """Whether the prompt asks for a line `ACTION:`."""
    commands: tuple[str, ...]
    """The commands that the observation lists, if it does."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode; `group` is the setting and the player."""

    group: tuple[str, str]
    env_path: str
    task: str
    seed: Any
    stop: str
    fault: str | None
    episode_return: float
    success: bool
    progression: float
    turns: list[TurnRecord]


def read_run(path: Path) -> Iterator[EpisodeRecord]:
    """The episodes of a folder or file, in order.

    Raises:
        ConfigError: the file is missing, empty or broken; the text names the line and the key.
    """
    where = path / FILE if path.is_dir() else path
    if not where.exists():
        advice = "run slime-verlog evaluate with --out, or give the file itself"
        raise ConfigError(f"{where} does not exist; {advice}")
    number = 0
    for number, record in enumerate(read_episodes(path), 1):
        try:
            yield _episode(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            kind = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{where}, episode {number}, is not a record of an episode: {kind}") from error
    if not number:
        raise ConfigError(f"{where} holds no episodes")


def _episode(record: Mapping[str, Any]) -> EpisodeRecord:
    messages = [_read_message(message) for message in record["messages"]]
    return EpisodeRecord(
        group=(str(record.get("setting", "-")), str(record.get("player", "-"))),
        env_path=str(record.get("env_path") or ""),
        task=str(record.get("task_name") or record.get("task") or "-"),
        seed=record.get("seed"),
        stop=str(record.get("stop", "-")),
        fault=None if record.get("fault") is None else str(record["fault"]),
        episode_return=_number(record, "return"),
        success=bool(record.get("success")),
        progression=_number(record, "progression"),
        turns=[_turn(turn, messages) for turn in record["story"]],
    )


def _turn(turn: Mapping[str, Any], messages: Sequence[tuple[str, str | None]]) -> TurnRecord:
    text, pictures = messages[turn["prompt"][-1]] if turn["prompt"] else ("", "")
    response, executed, valid = _text(turn, "response"), _text(turn, "executed_action"), bool(turn["valid"])
    observation = text.removeprefix(_HEADING)
    finish, tokens = turn.get("finish_reason"), (turn.get("tokens") or {}).get("text")
    return TurnRecord(
        observation=observation,
        state=None if pictures is None else hash((observation, pictures)),
        answer=split_answer(response, executed if valid else None),
        response=response,
        executed=executed,
        valid=valid,
        cut=None if finish is None else finish == "length",
        tokens=len(tokens) if tokens is not None else None,
        asked_for_marker="ACTION:" in text,
        commands=_listed_commands(observation),
    )


def _read_message(message: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text and the keys of the pictures; None if the record left pictures out."""
    content = message["content"]
    if isinstance(content, str):
        return content, ""
    parts = list(content or ())
    text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")
    keys = [part.get("image") for part in parts if part.get("type") == "image"]
    return text, None if None in keys else " ".join(map(str, keys))


def _listed_commands(observation: str) -> tuple[str, ...]:
    """The commands of the line that `envs.command_game.list_commands` writes."""
    _, found, tail = observation.partition(_COMMANDS)
    return tuple(tail.partition("\n")[0].rstrip(".").split(", ")) if found else ()


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {str(value)[:60]!r}")
    return value


def _number(record: Mapping[str, Any], key: str) -> float:
    value = float(record.get(key) or 0.0)
    if not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value}")
    return value
