"""Reads `episodes.jsonl` as checked episodes and turns, splits each response, and counts what several numbers need.

A response is split into reasoning and action. A column has the episodes of a run, a setting and a player.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envs.text_game import find_action
from inspection.records import FILE, read_episodes
from inspection.report.invalid import Place, Rejected, find_match
from slime_verlog import ConfigError

_LABEL = re.compile(r"\s*(?:THINK|THOUGHT|REASONING|<think>)\s*:?", re.IGNORECASE)
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_MAX_TOKEN_CHARS, _MAX_END_TOKENS = 40, 16
_HEADING, _COMMANDS = "Current Observation:\n", "Commands that work now: "
EXCERPT = 160
"""Characters of an action or of an example."""
_MAX_TEXT = 2000
"""Characters of an observation, or of a part of a response, that are kept."""
MAX_BARE_ACTION_WORDS = 6
"""A response without a marker and with more words than this counts as reasoning without an action."""
SAMPLED_TURNS = 4000
"""Turns that the measures that compare texts look at."""
LOOP = 3
"""Turns in a row with the same action, and an observation that stays the same, that count as a loop."""
_REPEATS = 2
"""Earlier occurrences of an attempt after which it counts as repeated."""
_MAX_CANDIDATES = 20_000
"""Kinds of invalid responses that are told apart; further ones count as one."""


class Parts(NamedTuple):
    """The parts of one response."""

    reasoning: str
    """The text before the action, without the labels `THINK:` and `<think>`."""
    action: str
    """The text that is read as the action, on one line; empty if the response has none."""
    after: str
    """The lines after the action, or after the last tool call."""
    has_marker: bool
    """Whether the response says where its action begins (`ACTION:`, `</think>` or `<tool_call>`)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; long texts are cut, because all turns of a run are held at once."""

    number: int
    """Its place in the episode, from 1; turns of notes count, as in the viewer."""
    observation: str
    """Text of the current observation, with the request for a response."""
    state: int | None
    """Hash of the observation's text and images, equal if the agent sees the same; None if images are missing."""
    parts: Parts
    words: int
    """Words of the whole reasoning."""
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
    env_path: str
    task: str
    seed: Any
    stop: str
    fault: str | None
    episode_return: float
    success: bool
    progression: float
    turns: Sequence[Turn]

    @property
    def valid(self) -> int:
        """Turns with a valid response."""
        return sum(turn.valid for turn in self.turns)


class Played:
    """The episodes of one column in the order in which they were played."""

    def __init__(self, player: str, episodes: Sequence[Episode]) -> None:
        self.player, self.episodes = player, episodes
        self.turns = [turn for episode in episodes for turn in episode.turns]
        self.valid = [turn for turn in self.turns if turn.valid]
        self.reasoned = [turn for turn in self.turns if turn.words]
        self.by_task: dict[str, list[Episode]] = {}
        for episode in episodes:
            self.by_task.setdefault(episode.task, []).append(episode)
        self.env_paths = list(dict.fromkeys(episode.env_path for episode in episodes))
        """Environments of the episodes; several if tasks are mixed."""
        self.actions = Counter(turn.executed for turn in self.valid)
        """Executed actions of valid responses."""
        self.is_scripted = player in ("random", "expert") and not self.reasoned
        """Whether a scripted player gave the responses, without reasoning."""
        self.looped = self.stuck = 0
        """Turns in loops, and turns that repeat an earlier attempt, of episodes that were not won."""
        self.loops: list[tuple[int, Place]] = []
        for episode in episodes:
            if not episode.success:
                self._count_repeats(episode)

    def _count_repeats(self, episode: Episode) -> None:
        """Count turns in loops, and turns that repeat an earlier attempt: an action in an observation.

        A stretch of equal attempts that ends in another observation had an effect, such as a walk through an empty
        room, and counts as one attempt.
        """
        seen: Counter[tuple[int, str]] = Counter()
        groups = itertools.groupby(episode.turns, lambda turn: (turn.state, turn.executed))
        stretches = [(attempt, len(list(group))) for attempt, group in groups]
        start = 0
        for number, ((state, executed), length) in enumerate(stretches, 1):
            changed = number < len(stretches) and stretches[number][0][0] != state
            if state is not None:
                repeats = 1 if changed else length
                self.stuck += sum(seen[state, executed] + k >= _REPEATS for k in range(repeats))
                seen[state, executed] += repeats
                if length >= LOOP and not changed:
                    self.looped += length
                    at = episode.turns[start].number, f"{executed[:EXCERPT]} x {length}"
                    self.loops.append((length, Place(episode.task, episode.seed, *at)))
            start += length

    def sample(self) -> list[Turn]:
        """Return up to `SAMPLED_TURNS` turns in the order in which they were played."""
        if len(self.turns) <= SAMPLED_TURNS:
            return self.turns
        return [self.turns[k] for k in sorted(random.Random(0).sample(range(len(self.turns)), SAMPLED_TURNS))]

    def by_words(self) -> list[tuple[int, Place]]:
        """Return the number of words of each reasoning and its place, the shortest first."""
        found = [(turn.words, place) for turn, place in self._places() if turn.words]
        return sorted(found, key=lambda item: item[0])

    def rejected(self) -> list[Rejected]:
        """Return the invalid responses, those with the same text in place of the action together."""
        found: dict[tuple[Any, ...], Rejected] = {}
        for turn, place in self._places():
            if turn.valid:
                continue
            parts, cut = turn.parts, bool(turn.cut)
            commands = turn.commands if find_match(parts.action, turn.commands) else ()
            candidate = f"{parts.action}\n{parts.after}".strip()[:EXCERPT]
            key = (candidate.lower(), parts.has_marker, cut, commands)
            if key not in found and len(found) >= _MAX_CANDIDATES:
                key = ("", True, cut, ())
            new = Rejected(candidate, parts.has_marker, turn.asked_for_marker, cut, commands, place)
            found.setdefault(key, new).count += 1
        return list(found.values())

    def _places(self) -> list[tuple[Turn, Place]]:
        return [(turn, Place(e.task, e.seed, turn.number, turn.ending)) for e in self.episodes for turn in e.turns]


def read_run(path: Path) -> Iterator[Episode]:
    """Read the episodes of a folder or file, in order; raises ConfigError, with line and key, if it is broken."""
    where = path / FILE if path.is_dir() else path
    if not where.exists():
        advice = "run slime-verlog evaluate with --out, or give the file itself"
        raise ConfigError(f"{where} does not exist; {advice}")
    number = 0
    for number, record in enumerate(read_episodes(path), 1):
        yield read_record(record, f"{where}, episode {number},")
    if not number:
        raise ConfigError(f"{where} holds no episodes")


def read_record(record: Mapping[str, Any], where: str) -> Episode:
    """Read one record; raises ConfigError, which begins with `where`, if it is damaged."""
    try:
        return _episode(record)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        kind = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where} is not a record of an episode: {kind}") from error


def _episode(record: Mapping[str, Any]) -> Episode:
    messages = [_read_message(message) for message in record["messages"]]
    return Episode(
        group=(str(record.get("setting", "-")), str(record.get("player", "-"))),
        env_path=str(record.get("env_path") or ""),
        task=str(record.get("task_name") or record.get("task") or "-"),
        seed=record.get("seed"),
        stop=str(record.get("stop", "-")),
        fault=None if record.get("fault") is None else str(record["fault"]),
        episode_return=_number(record, "return"),
        success=bool(record.get("success")),
        progression=_number(record, "progression"),
        turns=[_turn(turn, messages, k) for k, turn in enumerate(record["story"], 1) if "summary" not in turn],
    )


def _turn(turn: Mapping[str, Any], messages: Sequence[tuple[str, str | None]], number: int) -> Turn:
    text, images = messages[turn["prompt"][-1]] if turn["prompt"] else ("", "")
    response, executed, valid = _text(turn, "response"), _text(turn, "executed_action"), bool(turn["valid"])
    observation = text.removeprefix(_HEADING)
    finish, tokens = turn.get("finish_reason"), (turn.get("tokens") or {}).get("text")
    _, found, tail = observation.partition(_COMMANDS)  # the line that `envs.text_game.list_commands` writes
    parts = split_answer(response, executed if valid else None)
    cut_parts = Parts(parts.reasoning[:_MAX_TEXT], parts.action[:_MAX_TEXT], parts.after[:EXCERPT], parts.has_marker)
    return Turn(
        number=number,
        observation=observation[:_MAX_TEXT],
        state=None if images is None else hash((observation, images)),
        parts=cut_parts,
        words=len(parts.reasoning.split()),
        ending=response[-EXCERPT:].strip(),
        executed=executed,
        valid=valid,
        cut=None if finish is None else finish == "length",
        tokens=len(tokens) if tokens is not None else None,
        asked_for_marker="ACTION:" in text,
        commands=tuple(tail.partition("\n")[0].rstrip(".").split(", ")) if found else (),
    )


def _read_message(message: Mapping[str, Any]) -> tuple[str, str | None]:
    """The text and the keys of the images; None if the record left images out."""
    content = message["content"]
    if isinstance(content, str):
        return content, ""
    parts = list(content or ())
    text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")
    keys = [part.get("image") for part in parts if part.get("type") == "image"]
    return text, None if None in keys else " ".join(map(str, keys))


def _text(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := record[key], str):
        raise ValueError(f"{key} must be text, got {str(value)[:60]!r}")
    return value


def _number(record: Mapping[str, Any], key: str) -> float:
    value = float(record.get(key) or 0.0)
    if not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value}")
    return value


def split_answer(response: str, executed: str | None) -> Parts:
    """Split at the tool calls, else as the games do (`envs.text_game.find_action`), else at `</think>`.

    Without any marker, a short response, or one that was executed as it stands, is a bare action. A longer one is
    reasoning, which contains the action if the response is valid; `executed` is None if it is invalid.
    """
    response = _drop_end_tokens(response)
    calls = response.find(_CALL)
    if calls >= 0:
        end = response.rfind(_CALL_END)
        end = end + len(_CALL_END) if end > calls else len(response)
        return Parts(_drop_labels(response[:calls]), _one_line(response[calls:end]), response[end:].strip(), True)
    candidate, (start, _) = find_action(response)
    before = response[:start].rstrip()
    if start and not before.endswith("</think>"):
        for word in ("ACTION:", "action:", "Action"):
            before = before.removesuffix(word)
        action, _, after = candidate.partition("\n")
        return Parts(_drop_labels(before), action.strip(), after.strip(), True)
    thought, closed, rest = response.rpartition("</think>")
    if closed:
        return Parts(_drop_labels(thought), _one_line(rest), "", True)
    is_short = len(response.split(maxsplit=MAX_BARE_ACTION_WORDS)) <= MAX_BARE_ACTION_WORDS
    if (is_short and not _LABEL.match(response)) or _one_line(response) == _one_line(executed or ""):
        return Parts("", _one_line(response), "", False)
    return Parts(_drop_labels(response), _one_line(executed or ""), "", False)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _drop_labels(text: str) -> str:
    text = text[match.end() :] if (match := _LABEL.match(text)) else text
    return text.replace("<think>", "").replace("</think>", "").strip()


def _drop_end_tokens(text: str) -> str:
    """Without tokens such as `<|im_end|>` at the end."""
    for _ in range(_MAX_END_TOKENS):
        text = text.rstrip()
        start = text.rfind("<|" if text.endswith("|>") else "</s>", max(len(text) - _MAX_TOKEN_CHARS, 0))
        if start < 0 or not text.endswith(("|>", "</s>")):
            break
        text = text[:start]
    return text
