"""Questions with answers and pictures: from slime's data set, from a file of one's own, or from the YAML.

Invariant: task and seed decide the question; one pass over the data shows every row once.
"""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs.content import lay_out, open_pictures, read_messages
from envs.errors import ConfigError, MissingDependencyError
from envs.pictures import MOST_PIXELS

_TEMPLATED = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>")
"""What a prompt holds that went through a chat template."""


@dataclass(frozen=True)
class Question:
    """One question. `images` are PIL images in the order in which the text refers to them.

    `pieces` are the texts before, between and after the images where they do not all come first; see `Layout`.
    """

    text: str
    answer: Any = None
    images: tuple[Any, ...] = ()
    system: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None
    """What this question's own list of tools holds (`registry.select_tools` reads it); None for all that there are."""
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Where the questions come from; without `data`, from the sample that slime's own data set hands out."""

    data: str | tuple[Any, ...] | Mapping[str, Any] | None = None
    """A `.parquet`, `.jsonl` or `.json` file, a list of rows, or a mapping from a task's name to either."""
    question_key: str = "question"
    answer_key: str = "answer"
    image_key: str = "images"
    tool_key: str = "tools"
    """Column with a row's own list of tools; a sample brings it in its metadata, as slime's `--tool-key` leaves it."""
    max_image_pixels: int = MOST_PIXELS


def read_question(sample: Any, options: QuestionOptions) -> tuple[Question, str, int]:
    """The question of a sample, its task and its seed.

    Raises:
        ConfigError: no data, an unknown task, a file or key that is not there, a prompt of an unknown form, a content
            part that cannot be shown, or not as many pictures as the text refers to.
        EnvironmentFault: a picture cannot be read.
    """
    metadata = getattr(sample, "metadata", None) or {}
    task, seed = str(metadata.get("task", "sample")), metadata.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"sample.metadata['seed'] must be an int, not negative, got {seed!r}")
    if options.data is None:
        return replace(_from_sample(sample, options), tools=metadata.get("tools")), task, seed
    rows = _rows(options.data, task)
    if not rows:
        raise ConfigError(f"env.data holds no rows for task {task!r}")
    row = rows[_place(len(rows), seed)]
    question = _from_row(row, options)
    tools = _first(metadata.get("tools"), row.get(options.tool_key), question.metadata.get("tools"))
    return replace(question, tools=tools), task, seed


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _place(count: int, seed: int) -> int:
    """Each run of `count` seeds visits every row once, in an order of its own."""
    return _order(count, seed // count)[seed % count]


@functools.lru_cache(maxsize=8)
def _order(count: int, epoch: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(f"{count}/{epoch}").shuffle(order)
    return order


def _from_row(row: Mapping[str, Any], options: QuestionOptions) -> Question:
    if options.question_key not in row:
        raise ConfigError(
            f"env.data: a row has no {options.question_key!r}, it has {', '.join(map(str, row))}; "
            "set env.question_key, env.answer_key and env.image_key"
        )
    found = row.get(options.image_key)
    found = [] if found is None else found if isinstance(found, list | tuple) else [found]
    images = open_pictures(found, options.max_image_pixels)
    metadata = row.get("metadata") if isinstance(row.get("metadata"), Mapping) else {}
    content = row[options.question_key]
    return _question(content, row.get(options.answer_key), images, options, metadata)


def _from_sample(sample: Any, options: QuestionOptions) -> Question:
    prompt, label = getattr(sample, "prompt", None), getattr(sample, "label", None)
    if not prompt:
        raise ConfigError(
            "there is no question: set env.data to a file, or hand questions over with --prompt-data and slime's own "
            "data source"
        )
    inputs = getattr(sample, "multimodal_inputs", None) or {}
    unknown = [str(kind) for kind, values in inputs.items() if kind != "images" and values is not None]
    if unknown:
        raise ConfigError(f"the sample comes with {', '.join(unknown)}; a question takes images only")
    images = open_pictures(inputs.get("images") or (), options.max_image_pixels)
    metadata = dict(getattr(sample, "metadata", None) or {})
    if isinstance(prompt, str) and any(mark in prompt for mark in _TEMPLATED):
        raise ConfigError(
            "the sample's prompt went through a chat template already; leave out --apply-chat-template, the "
            "rollout applies it"
        )
    return _question(prompt, label, images, options, metadata)


def _question(
    content: Any, answer: Any, images: tuple[Any, ...], options: QuestionOptions, metadata: Mapping[str, Any]
) -> Question:
    """A question given as a text or as chat messages; pictures that came beside them stand in for those inside."""
    system, texts, inside = ("", [content], []) if isinstance(content, str) else read_messages(content)
    images = images or open_pictures(inside, options.max_image_pixels)
    layout = lay_out(texts, len(images))
    return Question(layout.text, answer, images, system, metadata, pieces=layout.pieces)


def _rows(data: Any, task: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(data, Mapping):
        if task not in data:
            raise ConfigError(f"env.data names {', '.join(map(str, data))}, but the task is {task!r}")
        data = data[task]
    if not isinstance(data, str):
        return data
    path = Path(data).expanduser()
    try:
        return _read_rows(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"env.data: {path} cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=8)
def _read_rows(path: Path, edited: int) -> Sequence[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        return ParquetRows(path)
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(s) for s in text.splitlines() if s.strip()]
    except ValueError as error:
        raise ConfigError(f"env.data: {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"env.data: {path} must hold a list of objects")
    return rows


class ParquetRows(Sequence[Mapping[str, Any]]):
    """Rows of a parquet file, read a row group at a time; the last few groups are kept.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        ConfigError: the file is no parquet file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"{path} needs pyarrow; install it with: pip install pyarrow") from error
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"env.data: {path} is not a parquet file: {error}") from error
        metadata = self._file.metadata
        self._sizes = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
        self._group = functools.lru_cache(maxsize=4)(self._file.read_row_group)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(self._sizes)

    def __getitem__(self, index: int) -> Mapping[str, Any]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        for group, size in enumerate(self._sizes):
            if index < size:
                with self._lock:
                    table = self._group(group)
                return table.slice(index, 1).to_pylist()[0]
            index -= size
        raise AssertionError("unreachable")
