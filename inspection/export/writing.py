"""Writes exported episodes, a few at a time: JSONL and Parquet rows, and ATIF documents in a folder or a file.

A row for supervised training is the longest run of turns whose prompts continue each other: the whole episode under
`history: full`, one turn under a memory window. `step_loss_mask` is slime's: 0 on responses that are only shown, for
example as memory.

ATIF is Harbor's Agent Trajectory Interchange Format, version 1.6 (`docs/rfcs/0001-trajectory-format.md` of Harbor). The
first prompt becomes system and user steps, every response an agent step, and what the environment shows next that
step's observation. Images are files, named by path.
"""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedded.run.folder import write_bytes
from envs.base import text_of
from inspection.command import VERSION
from inspection.records import replacing, split_prompts
from slime_verlog import ConfigError, MissingDependencyError

SCHEMA_VERSION = "ATIF-v1.6"
NOTES = "With a memory window, a prompt shows only some earlier steps; prompt_token_ids (if recorded) are what was sent"
_ROOT_KEYS = ("env_path", "task", "options", "max_turns", "task_name", "seed", "repeat", "setting", "stop", "metrics")
_STEP_KEYS = ("reward", "executed_action", "valid", "terminated", "truncated", "finish_reason", "notes", "summary")
_AGENT_KEYS = ("name", "reasoning_content", "tool_calls")
"""Keys of an agent program's messages; calls have arguments of any type, so no columns of parquet."""
SCRIPTED = ("random", "expert")
"""Players of `slime-verlog evaluate` that name actions and give no reasons."""
MARKER = "ACTION:"
"""What announces the action in a response, where the prompt asks for it."""
_RESULT_KEYS = ("return", "success", "progression", "valid_action_ratio")

SaveImage = Callable[[str, str], str]
"""Stores an image, given its key and data URI; returns its path."""


def trajectory_of(episode: Mapping[str, Any], save_image: SaveImage) -> dict[str, Any]:
    """Return the episode as an ATIF document; token ids and log-probs are included where they were recorded."""
    messages, turns = split_prompts(episode)
    images = episode.get("pictures") or {}

    def read(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return a message's content as ATIF holds it: text, or a list of text and image parts."""
        content = message.get("content") or ""
        return content if isinstance(content, str) else [_part(part, images, save_image) for part in content]

    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(messages, turns, read), 1)]
    measured = [step["metrics"] for step in steps if "metrics" in step]
    totals = {
        f"total_{key}": sum(metrics[key] for metrics in measured)
        for key in ("prompt_tokens", "completion_tokens")
        if len(measured) == len(turns) and all(key in metrics for metrics in measured)
    }
    identity = [episode.get(key) for key in ("setting", "player", "task_name", "seed", "repeat", "options")]
    text = json.dumps([identity, [turn["response"] for turn in episode["story"]]], default=str)
    agent: dict[str, Any] = {"name": "slime-verlog", "version": VERSION}
    if episode.get("player"):
        agent["model_name"] = str(episode["player"])
    if episode.get("tools"):
        agent["tool_definitions"] = list(episode["tools"])
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(),
        "agent": agent,
        "steps": steps,
        "notes": NOTES,
        "final_metrics": {**totals, "total_steps": len(steps), "extra": _given(episode, _RESULT_KEYS)},
        "extra": _given(episode, _ROOT_KEYS),
    }


def _steps(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]], read: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    instruction: Any = None
    ids = _token_ids(turns)
    for number, turn in enumerate(turns):
        prompt = [messages[index] for index in turn["prompt"]]
        if prompt and prompt[0]["role"] == "system" and prompt[0]["content"] != instruction:
            instruction = prompt[0]["content"]
            steps.append({"source": "system", "message": read(prompt[0])})
        # What the prompt shows for the first time: the messages after the last response.
        responses = [place for place, message in enumerate(prompt) if message["role"] == "assistant"]
        start = responses[-1] + 1 if responses and number else 0
        new = [message for message in prompt[start:] if message["role"] != "system"]
        if number == 0:
            source = lambda message: "agent" if message["role"] == "assistant" else "user"
            steps += [{"source": source(message), "message": read(message)} for message in new]
        elif new:
            last = next(step for step in reversed(steps) if step["source"] == "agent")
            last["observation"] = {"results": [{"content": read(message)} for message in new]}
        step = {"source": "agent", "message": turn["response"], "extra": _given(turn, _STEP_KEYS)}
        metrics = _metrics(turn, next(ids))
        steps.append(step | ({"metrics": metrics} if metrics else {}))
    return steps


def _token_ids(turns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], list[int]] | None]:
    """Ids of each turn's prompt and response, as `Transcript` records them; None if they are not recorded."""
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


def _metrics(turn: Mapping[str, Any], ids: tuple[list[int], list[int]] | None) -> dict[str, Any]:
    tokens = turn.get("tokens") or {}
    log_probs = tokens.get("rollout_log_probs") or tokens.get("log_probs")
    count = len(ids[1]) if ids else len(tokens.get("text") or ())
    metrics: dict[str, Any] = {}
    if ids:
        metrics |= {"prompt_tokens": len(ids[0]), "prompt_token_ids": ids[0], "completion_token_ids": ids[1]}
    if count:
        metrics["completion_tokens"] = count
    if log_probs and len(log_probs) == count:
        metrics["logprobs"] = list(log_probs)
    return metrics


def _part(part: Mapping[str, Any], images: Mapping[str, str], save: SaveImage) -> dict[str, Any]:
    if part.get("type") != "image":
        return {"type": "text", "text": part.get("text") or ""}
    uri = images.get(part.get("image") or "")
    if uri is None:
        return {"type": "text", "text": "[a picture that was not recorded]"}
    return {"type": "image", "source": {"media_type": media_type(uri), "path": save(part["image"], uri)}}


def media_type(uri: str) -> str:
    """Return the type that a data URI names, such as `image/png`."""
    return uri.removeprefix("data:").partition(";")[0]


def _given(source: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: source[key] for key in keys if source.get(key) is not None}


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
            for row in group:
                if any(key in message for message in row.get("messages", ()) for key in _AGENT_KEYS):
                    where = f"task {row['metadata']['task']}, seed {row['metadata']['seed']}"
                    raise ConfigError(f"{where} has an agent's calls or reasoning in a prompt; use --format jsonl")
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _schema(pyarrow: Any) -> Any:
    text, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    message = pyarrow.struct({"role": text, "content": text, "tool_call_id": text, "step_loss_mask": integer})
    metadata = dict.fromkeys(("task", "setting", "player"), text) | dict.fromkeys(("seed", "turn", "turns"), integer)
    metadata |= dict.fromkeys(("return", "progression"), number) | dict.fromkeys(("success", "notes"), pyarrow.bool_())
    columns = {"messages": pyarrow.list_(message), "tools": text, "metadata": pyarrow.struct(metadata)}
    return pyarrow.schema(columns)


def write_atif(episodes: Iterable[Mapping[str, Any]], out: Path) -> int:
    """Write one document per episode; returns their number.

    If `out` ends in `.jsonl`, it gets one document per line. Otherwise it is an empty or new folder with one file per
    document (else ConfigError). The folder `images` beside the documents holds their images.
    """
    if out.suffix == ".jsonl":
        return write_jsonl((trajectory_of(episode, _image_saver(out.parent)) for episode in episodes), out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} holds something already; give a new folder, or a file that ends in .jsonl")
    count = 0
    with replacing(out) as part:
        part.mkdir()
        save = _image_saver(part)
        for count, episode in enumerate(episodes, 1):
            name = re.sub(r"[^\w.-]+", "_", f"{count:05}-{episode.get('task_name')}-{episode.get('seed')}")
            text = json.dumps(trajectory_of(episode, save), ensure_ascii=False, default=str)
            (part / f"{name}.trajectory.json").write_text(text, encoding="utf-8", errors="replace")
    return count


def _image_saver(folder: Path) -> Callable[[str, str], str]:
    """Return a function that saves an image under `images`, each key once, and returns the path from the documents."""

    def save(key: str, uri: str) -> str:
        name = f"{key}.{media_type(uri).rpartition('/')[2]}"
        path = Path("images") / re.sub(r"[^\w.-]", "_", name)  # a record may hold any key
        if not (folder / path).exists():
            try:
                image = base64.b64decode(uri.partition(",")[2])
            except ValueError as error:
                raise ConfigError(f"the record holds a picture that is not base64: {uri[:60]!r} ({error})") from error
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / path, image)
        return path.as_posix()

    return save


def rows_of(episode: Mapping[str, Any], valid_only: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the episode's rows: `messages`, `tools` (JSON, for slime's `--tool-key`) and `metadata`.

    `metadata.notes` says whether the row is a turn in which the model wrote its notes. With `valid_only`, invalid
    responses are not trained on. Raises ConfigError if a message has images, or if a scripted player named bare actions
    where the prompt asks for more.
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
            if chain[-1].get("has_images") or any(isinstance(message.get("content"), list) for message in shown):
                where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
                raise ConfigError(f"{where} has pictures, and jsonl and parquet are for text; use --format atif")
            if episode.get("player") in SCRIPTED and _is_bare(chain[-1], shown):
                where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
                bare = f"the player {episode['player']} answered {chain[-1]['response']!r}"
                advice = "python -m inspection.demonstrations writes an expert's answers in full"
                raise ConfigError(f"{where}: {bare}, and the prompt asks for a line `{MARKER}`; {advice}")
            row = []
            for place, message in enumerate([*shown, {"role": "assistant", "content": chain[-1]["response"]}]):
                mask = int(message["role"] != "assistant" or place in trained)
                kept = {k: message[k] for k in ("role", "content", "tool_call_id", *_AGENT_KEYS) if k in message}
                row.append({**kept, "step_loss_mask": mask})
            yield {
                "messages": row,
                "tools": json.dumps(episode.get("tools") or []),
                "metadata": {**about, "turn": first, "turns": len(chain), "notes": "summary" in chain[0]},
            }
        first += len(chain)


def _is_bare(turn: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the response names an action alone, although the prompt asks for it behind `MARKER`."""
    asks = any(MARKER in text_of(message) for message in prompt if message["role"] != "assistant")
    return asks and MARKER not in turn["response"] and "summary" not in turn


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
