"""Reads and writes `episodes.jsonl`: one episode per line, as
`rollout.play.transcript.Transcript.facts` describes it.

Two keys are added to the facts: `setting` (the point of a sweep, `-` without one) and `player`. A
recorded prompt is read as messages with roles, and what each prompt shows for the first time.
"""

import json
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from embedded.run.folder import append_text
from envs.base import text_of
from rollout.spec import EnvSpec
from slime_verlog import ConfigError

Record = dict[str, Any]
"""An episode, a turn or a message, as JSON holds it."""
Ids = tuple[list[int], list[int]]
"""Token ids of a turn's prompt and response."""
FILE = "episodes.jsonl"
TABLE_KEYS = (
    "setting",
    "player",
    "task_name",
    "task",
    "env_path",
    "seed",
    "stop",
    "success",
    "return",
    "progression",
    "turns",
    "valid_action_ratio",
    "metrics",
)
_LARGE_KEYS = ("messages", "pictures", "story", "digests")
_OPENINGS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n?"),  # ChatML: Qwen and many others
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n*"),  # Llama 3
    re.compile(r"<start_of_turn>(?P<role>\w+)\n"),  # Gemma
    re.compile(r"<\|(?P<role>system|user|assistant|observation|tool)\|>\n?"),  # GLM, Phi
)
CLOSINGS = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>)\s*$"
)
_ROLES = {"model": "assistant", "observation": "tool"}


class _Message(BaseModel):
    """What readers rely on in a message."""

    role: str
    content: str | list[Record] | None = None


class _Turn(BaseModel):
    """What readers rely on in a turn; other keys may hold anything."""

    response: str
    prompt: str | list[int | _Message] | None = None
    executed_action: str | None = None
    reward: FiniteFloat = 0.0
    progression: FiniteFloat = 0.0
    tokens: dict[str, list[Any] | None] | None = None
    metrics: Record = {}


class _Record(BaseModel):
    """What readers rely on in a record; other keys may hold anything. A key with a default may be
    missing, and is null only where the type says so."""

    messages: list[_Message]
    story: list[_Turn]
    setting: str = "-"
    player: str = ""
    env_path: str = ""
    task_name: str = ""
    stop: str = ""
    options: Record = {}
    pictures: dict[str, str] = {}
    metrics: Record = {}
    turns: int = 0
    max_turns: int | None = None
    total: FiniteFloat = Field(0.0, alias="return")
    valid_action_ratio: FiniteFloat = 0.0
    progression: FiniteFloat = 0.0
    tools: list[Record] = []
    digests: list[str] = []
    branch: Record | None = None
    swept: Record | None = None


class _Episode(_Record):
    """A whole episode, of `episodes.jsonl`."""

    seed: int = 0
    success: bool = False


class _TrainedTurns(_Record):
    """Some turns of an episode, of a run's `training.jsonl`."""

    seed: str
    """Which turns of which episode."""
    success: bool | None
    """None if the episode goes on."""


def append_episode(path: Path, episode: Record, player: str, setting: str = "-") -> None:
    """Add one episode to the file as a single line, so that an interrupted run loses no finished
    episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(
        {"setting": setting, "player": player, **episode}, ensure_ascii=False, default=str
    )
    append_text(path, line + "\n")


def read_episodes(path: Path, quiet: bool = False) -> Iterator[Record]:
    """Yield the episodes of a file, or of `episodes.jsonl` in a folder.

    A cut last line is left out, with a note unless `quiet`. Raises ConfigError if the file cannot
    be read, or a line is not an episode.
    """
    path = path / FILE if path.is_dir() else path
    try:
        with open(path, "rb") as file:  # the last line may end within a character
            for number, line in enumerate(file, 1):
                try:
                    episode = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        reason = getattr(error, "msg", error)
                        hint = "delete this line, or copy the file again"
                        raise ConfigError(
                            f"{path}, line {number}, is not JSON ({reason}); {hint}"
                        ) from error
                    if not quiet:
                        print(
                            f"note: {path}: the last record is cut, and is left out.",
                            file=sys.stderr,
                        )
                    return
                _check_episode(episode, f"{path}, line {number},")
                yield episode
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _check_episode(episode: Any, where: str) -> None:
    is_trained = isinstance(episode, dict) and "update" in episode
    try:
        (_TrainedTurns if is_trained else _Episode).model_validate(episode)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:4]))
        raise ConfigError(
            f"{where} is not an episode: {place}: {first['msg']}".replace(": :", ":")
        ) from error


def check_table_keys(episode: Record, where: str) -> None:
    """Raise ConfigError if the record lacks a key that tables need, or is of a training."""
    if "update" in episode:
        raise ConfigError(f"{where} holds turns of a training, which are in no table")
    for key in TABLE_KEYS:
        if key not in episode:
            raise ConfigError(f"{where} has no key {key!r}, so it is in no table")


def without_large(episode: Record) -> Record:
    """Return the record without what tables do not need."""
    return {key: value for key, value in episode.items() if key not in _LARGE_KEYS}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a file or a folder, which replaces `path` if the block ends well.

    Raises ConfigError for an OSError; then nothing is left of what was written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        _remove(part)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # of a folder that cannot be read or written
            path.unlink(missing_ok=True)


def split_template(text: str) -> list[dict[str, str]]:
    """Return the messages of a rendered prompt; a single user message if no known template is
    recognised.

    The opening of the response, with which most prompts end, is left out.
    """
    for opening in _OPENINGS:
        found = list(opening.finditer(text))
        if found:
            break
    else:
        return [{"role": "user", "content": text}]
    ends = [match.start() for match in found[1:]] + [len(text)]
    messages = []
    for match, end in zip(found, ends, strict=True):
        content = CLOSINGS.sub("", text[match.end() : end])
        role = match["role"].lower()
        messages.append({"role": _ROLES.get(role, role), "content": content.strip("\n")})
    if messages[-1]["role"] == "assistant" and messages[-1]["content"].strip() in ("", "<think>"):
        messages.pop()
    return messages or [{"role": "user", "content": text}]


def split_prompts(episode: Record) -> tuple[list[Record], list[Record]]:
    """Return the episode's distinct messages, and its turns with `prompt` as indexes into them.

    A prompt may also be one string, or a list that contains messages themselves.
    """
    messages: list[Record] = [dict(message) for message in episode.get("messages") or ()]
    places: dict[str, int] = {}
    turns = []
    for turn in episode["story"]:
        prompt = turn.get("prompt")
        indexes = []
        for entry in split_template(prompt) if isinstance(prompt, str) else prompt or ():
            if isinstance(entry, int):
                indexes += [entry] if 0 <= entry < len(messages) else []
                continue
            key = repr(entry)
            if key not in places:
                places[key] = len(messages)
                messages.append(dict(entry))
            indexes.append(places[key])
        turns.append({**turn, "prompt": indexes})
    return messages, turns


def find_changes(messages: Sequence[Record], turns: Sequence[Record]) -> list[list[int]]:
    """For each turn, the indexes of the messages in its prompt that are news; the last message
    always is."""
    seen: set[int] = set()
    recent: deque[str] = deque(maxlen=3)
    changes = []
    for turn in turns:
        prompt = turn["prompt"]
        fresh = [
            i
            for i in prompt[:-1]
            if i not in seen and not (seen and _is_memory(messages[i], recent))
        ]
        fresh += prompt[-1:]
        seen.update(prompt)
        recent.append("\n".join(text_of(messages[i]) for i in fresh))
        changes.append(fresh)
    return changes


def _is_memory(message: Record, recent: deque[str]) -> bool:
    """Whether a message repeats an earlier response or observation."""
    if message.get("role") == "assistant":
        return True
    text = text_of(message)
    heading, _, rest = text.partition("\n")
    body = (rest if heading.rstrip().endswith(":") else text).strip()
    return any(body in earlier for earlier in recent)


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names of the runs: folders from the end of their paths."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({k})" for k, folder in enumerate(folders, 1)]


def env_spec_of(episode: Record) -> EnvSpec:
    """Return what builds a recorded episode's environment."""
    metadata = {"task": episode["task"], "seed": episode["seed"]}
    options = dict(episode.get("options") or {})
    return EnvSpec(episode["env_path"], metadata, options, max_turns=episode.get("max_turns"))


def token_ids_of(turns: Sequence[Record]) -> Iterator[Ids | None]:
    """Ids of each turn's prompt and response, as `Transcript` records them; None if they are not
    recorded."""
    known: list[int] = []
    for turn in turns:
        ids = turn.get("token_ids")
        if not ids:
            known = []
            yield None
            continue
        prompt = [*known[: ids["shared"]], *ids["prompt"]]
        known = [*prompt, *ids["response"]]
        yield prompt, list(ids["response"])


def rollout_of(path: Path) -> tuple[bool, int]:
    """Whether a dump is of an evaluation, and the rollout's id, which is the last number in its
    name."""
    digits = re.findall(r"\d+", path.stem)
    return "eval" in path.stem, int(digits[-1]) if digits else 0


def write_jsonl(rows: Iterable[Record], path: Path) -> int:
    """Write one row per line; returns their number. The file is replaced once all rows are
    written."""
    count = 0
    with replacing(path) as part, open(part, "w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count
