"""Writes exported episodes, a few at a time: JSONL and Parquet rows, and ATIF documents in a folder or a file."""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inspection.export.atif import image_file, media_type, trajectory_of
from slime_verlog import ConfigError, MissingDependencyError

ROW_GROUP = 100
"""Rows of a Parquet row group, which are in memory at once."""


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write one row per line; returns their number. The file is replaced once all rows are written."""
    count = 0
    with _replacing(path) as part, open(part, "w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def write_parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write the rows of `inspection.export.conversations` with pyarrow; returns their number."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError("parquet needs pyarrow: pip install pyarrow; or use --format jsonl") from error
    schema, count = _schema(pyarrow), 0
    with _replacing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        rows = iter(rows)
        while group := list(itertools.islice(rows, ROW_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _schema(pyarrow: Any) -> Any:
    text, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    message = pyarrow.struct({"role": text, "content": text, "tool_call_id": text, "step_loss_mask": integer})
    metadata = pyarrow.struct(
        {
            **dict.fromkeys(("task", "setting", "player"), text),
            **dict.fromkeys(("seed", "turn", "turns"), integer),
            **dict.fromkeys(("return", "progression"), number),
            "success": pyarrow.bool_(),
        }
    )
    return pyarrow.schema({"messages": pyarrow.list_(message), "tools": text, "metadata": metadata})


def write_atif(episodes: Iterable[Mapping[str, Any]], out: Path) -> int:
    """Write one document per episode; returns their number.

    If `out` ends in `.jsonl`, it gets one document per line. Otherwise it is an empty or new folder with one file per
    document (else ConfigError). The folder `images` beside the documents holds their images.
    """
    if out.suffix == ".jsonl":
        return write_jsonl((trajectory_of(episode, _image_saver(out.parent)) for episode in episodes), out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} holds something already; give a new folder, or a file that ends in .jsonl")
    save, count = _image_saver(out), 0
    for count, episode in enumerate(episodes, 1):
        name = re.sub(r"[^\w.-]+", "_", f"{count:05}-{episode.get('task_name')}-{episode.get('seed')}")
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(trajectory_of(episode, save), ensure_ascii=False, default=str)
        (out / f"{name}.trajectory.json").write_text(text, encoding="utf-8", errors="replace")
    return count


def _image_saver(folder: Path) -> Callable[[str, str], str]:
    """Return a function that saves an image under `images`, each key once, and returns the path from the documents."""

    def save(key: str, uri: str) -> str:
        name = f"{key}.{media_type(uri).rpartition('/')[2]}"
        path = Path("images") / re.sub(r"[^\w.-]", "_", name)  # a record may hold any key
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(image_file(uri))
        return path.as_posix()

    return save


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` if the block ends without an error."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
