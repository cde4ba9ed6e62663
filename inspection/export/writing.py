"""Writes exported episodes, a few at a time: JSONL and Parquet rows, and ATIF documents in a folder or a file.

A row for supervised training is the longest run of turns whose prompts continue each other: the whole episode under
`history: full`, one turn under a memory window. `step_loss_mask` is slime's: 0 on responses that are only shown, for
example as memory.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.base import text_of
from inspection.export.atif import image_file, media_type, trajectory_of
from inspection.records import replacing
from inspection.view.prompts import split_prompts
from slime_verlog import ConfigError, MissingDependencyError


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write one row per line; returns their number. The file is replaced once all rows are written."""
    count = 0
    with replacing(path) as part, open(part, "w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def write_parquet(rows: Iterable[Mapping[str, Any]], path: Path, schema_of: Callable[[Any], Any] | None = None) -> int:
    """Write rows with pyarrow; returns their number. `schema_of(pyarrow)` is by default the schema of `rows_of`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError("parquet needs pyarrow: pip install pyarrow; or write jsonl") from error
    schema, count = (schema_of or _schema)(pyarrow), 0
    with replacing(path) as part, parquet.ParquetWriter(part, schema) as writer:
        rows = iter(rows)
        while group := list(itertools.islice(rows, 100)):  # the rows that are in memory at once
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
            **dict.fromkeys(("success", "notes"), pyarrow.bool_()),
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


def rows_of(episode: Mapping[str, Any], valid_only: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the episode's rows: `messages`, `tools` (JSON, for slime's `--tool-key`) and `metadata`.

    `metadata.notes` says whether the row is a turn in which the model wrote its notes. With `valid_only`, invalid
    responses are not trained on. Raises ConfigError if a message has images.
    """
    messages, turns = split_prompts(episode)
    first, seed, success = 0, episode.get("seed"), episode.get("success")
    about = {  # the same keys and types in every row
        "task": str(episode.get("task_name")),
        "seed": seed if isinstance(seed, int) else None,
        "setting": str(episode.get("setting") or "-"),
        "player": str(episode.get("player") or "-"),
        **{key: None if episode.get(key) is None else float(episode[key]) for key in ("return", "progression")},
        "success": None if success is None else bool(success),
    }
    for chain in _chains(messages, turns):
        trained = [len(turn["prompt"]) for turn in chain if turn.get("valid") is not False or not valid_only]
        if trained:
            shown = [messages[index] for index in chain[-1]["prompt"]]
            if any(not isinstance(message["content"], str) for message in shown):
                where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
                raise ConfigError(f"{where} has pictures, and jsonl and parquet are for text; use --format atif")
            row = []
            for place, message in enumerate([*shown, {"role": "assistant", "content": chain[-1]["response"]}]):
                mask = int(message["role"] != "assistant" or place in trained)
                kept = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
                row.append({**kept, "step_loss_mask": mask})
            yield {
                "messages": row,
                "tools": json.dumps(episode.get("tools") or []),
                "metadata": {**about, "turn": first, "turns": len(chain), "notes": "summary" in chain[0]},
            }
        first += len(chain)


def _chains(messages: Sequence[Mapping[str, Any]], turns: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chain: list[dict[str, Any]] = []
    for turn in turns:
        if chain and not _continues(messages, chain[-1], turn):
            yield chain
            chain = []
        chain.append(turn)
    yield chain


def _continues(messages: Sequence[Mapping[str, Any]], last: Mapping[str, Any], turn: Mapping[str, Any]) -> bool:
    """Whether the turn's prompt is the last one's, its response, and something new."""
    length = len(last["prompt"])
    if turn["prompt"][:length] != last["prompt"] or len(turn["prompt"]) == length:
        return False
    response = messages[turn["prompt"][length]]
    return response["role"] == "assistant" and text_of(response).strip() == last["response"].strip()
