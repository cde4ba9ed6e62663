"""Questions with answers and images, read from slime's data set, from a file or from the YAML.

Invariants: task and seed decide the question; one pass over the data shows every row once; an image
keeps its place between the texts. `grading.py` grades a response to one.
"""

import bisect
import copy
import functools
import itertools
import json
import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.images import open_image
from envs.json_text import short
from envs.loading import import_extra
from slime_verlog import Settings

PLACEHOLDER = "<image>"
"""Marks an image's place in the texts of data sets."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}://")
_TEMPLATE_MARKS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>")
"""Strings that show that a prompt has already been through a chat template."""


@dataclass(frozen=True)
class Question:
    """One question. `images` are PIL images in the order in which the text refers to them."""

    text: str
    answer: Any = None
    images: tuple[Any, ...] = ()
    system: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None
    """The question's own list of tools, as `registry.select_tools` takes it; None offers all
    tools."""
    pieces: tuple[str, ...] = ()
    """The texts before, between and after the images; empty if all images come first. See
    `lay_out`."""


class QuestionSettings(Settings):
    """Where the questions come from."""

    data: str | tuple[Any, ...] | Mapping[str, Any] | None = None
    """A `.parquet`, `.jsonl` or `.json` file, a list of rows, or a mapping from task names to
    either. Without it, the question is the sample's prompt, as slime's own data set provides it."""
    question_key: str = "question"
    """Column with the question: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer."""
    image_key: str = "images"
    """Column with the question's images."""
    tool_key: str = "tools"
    """Column with the row's own tools, by name or schema; metadata, such as from slime's
    `--tool-key`, goes first."""


def read_question(sample: Any, settings: QuestionSettings) -> tuple[Question, str, int]:
    """Return the question of a sample, its task and its seed.

    Raises:
        ConfigError: no data, an unknown task, a missing file or key, a prompt of an unknown form, a
            content part that cannot be shown, or a text that refers to more or fewer images than
            there are.
        EnvironmentFault: an image cannot be read.
    """
    metadata = getattr(sample, "metadata", None) or {}
    task = str(metadata.get("task", "sample"))
    seed = metadata.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"sample.metadata['seed'] must be an integer, not negative, got {seed!r}")
    if settings.data is None:
        return replace(_from_sample(sample), tools=metadata.get("tools")), task, seed
    rows = _rows(settings.data, task)
    if not rows:
        raise ConfigError(f"env.data holds no rows for task {task!r}")
    epoch, place = divmod(seed, len(rows))
    row = rows[_order(len(rows), epoch)[place]]
    if settings.question_key not in row:
        raise ConfigError(
            f"env.data: a row has no {settings.question_key!r}, it has {', '.join(map(str, row))}; "
            "set env.question_key, env.answer_key and env.image_key"
        )
    found = row.get(settings.image_key)
    if not isinstance(found, list | tuple):
        found = [] if found is None else [found]
    images = open_images(found)
    # Tools and graders may change what they get.
    answer = copy.deepcopy(row.get(settings.answer_key))
    more = copy.deepcopy(row["metadata"]) if isinstance(row.get("metadata"), Mapping) else {}
    question = _question(row[settings.question_key], answer, images, more)
    choices = (metadata.get("tools"), row.get(settings.tool_key), more.get("tools"))
    tools = next((choice for choice in choices if choice is not None), None)
    return replace(question, tools=tools), task, seed


@functools.lru_cache(maxsize=8)
def _order(count: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{count}/{epoch}").shuffle(order)
    return order


def _from_sample(sample: Any) -> Question:
    prompt = getattr(sample, "prompt", None)
    label = getattr(sample, "label", None)
    if not prompt:
        raise ConfigError(
            "there is no question: set env.data to a file, or provide questions with "
            "--prompt-data and slime's own data source"
        )
    inputs = getattr(sample, "multimodal_inputs", None) or {}
    unknown = [
        str(kind) for kind, values in inputs.items() if kind != "images" and values is not None
    ]
    if unknown:
        raise ConfigError(
            f"the sample comes with {', '.join(unknown)}; a question takes images only"
        )
    images = open_images(inputs.get("images") or ())
    metadata = dict(getattr(sample, "metadata", None) or {})
    if isinstance(prompt, str) and any(mark in prompt for mark in _TEMPLATE_MARKS):
        raise ConfigError(
            "the sample's prompt has already been through a chat template; leave out "
            "--apply-chat-template, because the rollout applies the template"
        )
    return _question(prompt, label, images, metadata)


def _question(
    content: Any, answer: Any, images: tuple[Any, ...], metadata: Mapping[str, Any]
) -> Question:
    """Return a question from a text or from chat messages; `images`, if any, replace the images
    inside the messages."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    system, texts, inside = read_messages(messages)
    images = images or open_images(inside)
    text, pieces = lay_out(texts, len(images))
    return Question(text, answer, images, system, metadata, pieces=pieces)


def read_messages(messages: Any) -> tuple[str, list[str | None], list[Any]]:
    """Return system text, user texts with None for each image, and images; raises ConfigError for
    other forms."""
    if not isinstance(messages, list | tuple):
        raise ConfigError(
            f"a question must be a text or a list of messages, got {type(messages).__name__}"
        )
    system = ""
    texts: list[str | None] = []
    images: list[Any] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else message
        if role not in ("system", "user"):
            raise ConfigError(
                f"a question's messages may have the roles system and user, got {role!r:.60}"
            )
        content = message.get("content") or ""
        if role == "user" and texts:
            texts.append("\n\n")
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            match role, part:
                case "system", {"type": "text", "text": str(text)}:
                    system += text
                case "user", {"type": "text", "text": str(text)}:
                    texts.append(text)
                case "user", {"type": "image"}:
                    texts.append(None)
                    images.append(part.get("image", part))
                case _:
                    takes = "a user message takes 'text' and 'image', a system message 'text'"
                    raise ConfigError(
                        f"a question's {role} message has the content part {short(part)}; {takes}"
                    )
    return system, texts, images


def lay_out(texts: Sequence[str | None], count: int) -> tuple[str, tuple[str, ...]]:
    """Lay out the texts of a question with `count` images: (whole text, its pieces).

    The whole text has `<image>` in place of each image that has text before it. The pieces are the
    texts before, between and after the images, one more than images; there are none if all images
    come first.

    A None in `texts` is the place of an image. Without any, the `<image>` marks inside the texts
    are; without those, the images come first. Without images, `<image>` is text. Raises ConfigError
    if there are more or fewer places than images.
    """
    if None not in texts and count:
        divided = re.split(f"({PLACEHOLDER})", "".join(text or "" for text in texts))
        texts = [None if part == PLACEHOLDER else part for part in divided]
    places = texts.count(None)
    if places and places != count:
        raise ConfigError(
            f"the question's text has places for {places} pictures, but {count} were given; check "
            "the data, env.image_key, or slime's --multimodal-keys"
        )
    pieces = [""]
    for text in texts:
        if text is None:
            pieces.append("")
        else:
            pieces[-1] += text
    if places and any(piece.strip() for piece in pieces[:-1]):
        pieces = [pieces[0].lstrip(), *pieces[1:-1], pieces[-1].rstrip()]
        return PLACEHOLDER.join(pieces), tuple(pieces)
    return "".join(pieces).strip(), ()


def open_images(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a question's images as RGB PIL images; raises as `open_image`, and ConfigError for
    URLs."""
    for value in values:
        row = value if isinstance(value, Mapping) else {"path": value}
        for address in () if row.get("bytes") else map(row.get, ("path", "image", "url")):
            if isinstance(address, str) and _URL.match(address):
                raise ConfigError(
                    f"a question's picture is the URL {address[:100]}; URLs are not fetched, so "
                    "download the file and give its path, its bytes or a data URI"
                )
    return tuple(map(open_image, values))


def _rows(data: Any, task: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(data, Mapping):
        if task not in data:
            raise ConfigError(
                f"env.data names {', '.join(map(str, data))}, but the task is {task!r}"
            )
        data = data[task]
    if not isinstance(data, str):
        _check_rows(data, "env.data")
        return data
    path = Path(data).expanduser()
    try:
        return _read_rows(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"env.data: {path} cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=8)
def _read_rows(path: Path, edited: int) -> Sequence[Mapping[str, Any]]:
    rows = read_rows(path, "env.data")
    if not isinstance(rows, ParquetRows):
        _check_rows(rows, f"env.data: {path}")
    return rows


def _check_rows(rows: Any, where: str) -> None:
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{where} must hold a list of objects, got {short(rows)}")


def read_rows(path: Path, key: str) -> Any:
    """Read the rows of a .parquet file or of JSON lines, or what a .json file holds; ConfigErrors
    name the `key`, and the line of a damaged file."""
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix not in (".json", ".jsonl"):
        raise ConfigError(f"{key}: {path} must be a .parquet, .jsonl or .json file")
    where = f"{key}: {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not a text file in UTF-8: {error.reason}") from error
    if path.suffix == ".json":
        return _read_json(text, where)
    lines = enumerate(text.split("\n"), 1)
    return [_read_json(line, f"{where}, line {number},") for number, line in lines if line.strip()]


def _read_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is damaged, not valid JSON: {getattr(error, 'msg', error)}"
        ) from error


class ParquetRows(Sequence[Mapping[str, Any]]):
    """Rows of a parquet file, read one row group at a time; the last few groups are kept in memory.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        ConfigError: the file is not a parquet file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = import_extra("pyarrow.parquet", str(path), "questions").ParquetFile(path)
        except ValueError as error:  # pyarrow's errors are
            raise ConfigError(f"{path} is not a parquet file: {error}") from error
        metadata = self._file.metadata
        sizes = (metadata.row_group(k).num_rows for k in range(metadata.num_row_groups))
        self._ends = list(itertools.accumulate(sizes))
        self._group = functools.lru_cache(maxsize=4)(self._file.read_row_group)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect.bisect_right(self._ends, index)
        with self._lock:
            table = self._group(group)
        return table.slice(index - self._ends[group] + len(table), 1).to_pylist()[0]
