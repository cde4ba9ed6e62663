"""Writes exported episodes one at a time: rows as JSON lines, and ATIF documents in a folder.

A row for supervised training is the longest run of turns whose prompts continue each other: the whole episode under
`history: full`, one turn under a memory window. `step_loss_mask` is slime's: 0 on responses that are only shown, for
example as memory.

ATIF is Harbor's Agent Trajectory Interchange Format, version 1.6 (`docs/rfcs/0001-trajectory-format.md` of Harbor). The
first prompt becomes system and user steps, every response an agent step, and what the environment shows next that
step's observation. Images are files, named by path.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedded.run.folder import write_bytes
from envs.base import text_of
from inspection.command import VERSION
from inspection.records import Ids, Record, replacing, split_prompts, token_ids_of
from slime_verlog import ConfigError

SCHEMA_VERSION = "ATIF-v1.6"
NOTES = "With a memory window, a prompt shows only some earlier steps; prompt_token_ids (if recorded) are what was sent"
_ROOT_KEYS = ("env_path", "task", "options", "max_turns", "task_name", "seed", "repeat", "setting", "stop", "metrics")
_STEP_KEYS = ("reward", "executed_action", "valid", "terminated", "truncated", "finish_reason", "notes", "summary")
_MESSAGE_KEYS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")
"""Keys of a message that a row keeps; the last three come from an agent's program."""
_ABOUT_KEYS = ("seed", "setting", "player", "return", "progression", "success")
SCRIPTED = ("random", "expert")
"""Players of `slime-verlog evaluate` that name actions and give no reasons."""
MARKER = "ACTION:"
"""What announces the action in a response, where the prompt asks for it."""
_RESULT_KEYS = ("return", "success", "progression", "valid_action_ratio")

"""Token ids of a prompt and of its response."""
SaveImage = Callable[[str, str], str]
"""Stores an image, given its key and data URI; returns its path."""


def trajectory_of(episode: Record, save_image: SaveImage) -> Record:
    """Return the episode as an ATIF document; token ids and log-probs are included where they were recorded."""
    messages, turns = split_prompts(episode)
    images = episode.get("pictures") or {}

    def read(message: Record) -> str | list[Record]:
        """Return a message's content as ATIF holds it: text, or a list of text and image parts."""
        content = message.get("content") or ""
        return content if isinstance(content, str) else [_part(part, images, save_image) for part in content]

    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(messages, turns, read), 1)]
    identity = [episode.get(key) for key in ("setting", "player", "task_name", "seed", "repeat", "options")]
    text = json.dumps([identity, [turn["response"] for turn in turns]], default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    agent: Record = {"name": "slime-verlog", "version": VERSION}
    if episode.get("player"):
        agent["model_name"] = str(episode["player"])
    if episode.get("tools"):
        agent["tool_definitions"] = list(episode["tools"])
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": digest.hexdigest(),
        "agent": agent,
        "steps": steps,
        "notes": NOTES,
        "final_metrics": {**_totals(steps), "total_steps": len(steps), "extra": _given(episode, _RESULT_KEYS)},
        "extra": _given(episode, _ROOT_KEYS),
    }


def _totals(steps: Sequence[Record]) -> dict[str, int]:
    """The sums of the token counts that every agent step has."""
    measured = [step.get("metrics", {}) for step in steps if step["source"] == "agent"]
    totals = {}
    for key in ("prompt_tokens", "completion_tokens"):
        if all(key in metrics for metrics in measured):
            totals[f"total_{key}"] = sum(metrics[key] for metrics in measured)
    return totals


def _steps(messages: Sequence[Record], turns: Sequence[Record], read: Callable[[Any], Any]) -> list[Record]:
    steps: list[Record] = []
    last: Record = {}
    instruction: Any = None
    ids = token_ids_of(turns)
    for number, turn in enumerate(turns):
        prompt = [messages[index] for index in turn["prompt"]]
        if prompt and prompt[0]["role"] == "system" and prompt[0]["content"] != instruction:
            instruction = prompt[0]["content"]
            steps.append({"source": "system", "message": read(prompt[0])})
        new = [message for message in prompt if message["role"] != "system"]
        if number == 0:
            for message in new:
                source = "agent" if message["role"] == "assistant" else "user"
                steps.append({"source": source, "message": read(message)})
        else:
            # What the prompt shows for the first time: the messages after the last response.
            responses = [place for place, message in enumerate(new) if message["role"] == "assistant"]
            shown = [{"content": read(message)} for message in new[max(responses, default=-1) + 1 :]]
            if shown:
                last["observation"] = {"results": shown}
        last = {"source": "agent", "message": turn["response"], "extra": _given(turn, _STEP_KEYS)}
        if metrics := _metrics(turn, next(ids)):
            last["metrics"] = metrics
        steps.append(last)
    return steps


def _metrics(turn: Record, ids: Ids | None) -> Record:
    tokens = turn.get("tokens") or {}
    log_probs = tokens.get("rollout_log_probs") or tokens.get("log_probs")
    count = len(ids[1]) if ids else len(tokens.get("text") or ())
    metrics: Record = {}
    if ids:
        metrics |= {"prompt_tokens": len(ids[0]), "prompt_token_ids": ids[0], "completion_token_ids": ids[1]}
    if count:
        metrics["completion_tokens"] = count
    if log_probs and len(log_probs) == count:
        metrics["logprobs"] = list(log_probs)
    return metrics


def _part(part: Record, images: Mapping[str, str], save: SaveImage) -> Record:
    if part.get("type") != "image":
        return {"type": "text", "text": part.get("text") or ""}
    uri = images.get(part.get("image") or "")
    if uri is None:
        return {"type": "text", "text": "[a picture that was not recorded]"}
    return {"type": "image", "source": {"media_type": media_type(uri), "path": save(part["image"], uri)}}


def media_type(uri: str) -> str:
    """Return the type that a data URI names, such as `image/png`."""
    return uri.removeprefix("data:").partition(";")[0]


def _given(source: Record, keys: Sequence[str]) -> Record:
    return {key: source[key] for key in keys if source.get(key) is not None}


def write_atif(episodes: Iterable[Record], out: Path) -> int:
    """Write one document per episode into a new or empty folder, and their images into its folder `images`.

    Returns the number of documents. Raises ConfigError if the folder holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} holds something already; give a new folder")
    count = 0
    with replacing(out) as part:
        part.mkdir()
        save = _image_saver(part)
        for count, episode in enumerate(episodes, 1):
            title = f"{count:05}-{episode.get('task_name')}-{episode.get('seed')}"
            name = re.sub(r"[^\w.-]+", "_", title)
            text = json.dumps(trajectory_of(episode, save), ensure_ascii=False, default=str)
            file = part / f"{name}.trajectory.json"
            file.write_text(text, encoding="utf-8", errors="replace")
    return count


def _image_saver(folder: Path) -> SaveImage:
    """Return a function that saves an image under `images` and returns its path, as the documents name it."""

    def save(key: str, uri: str) -> str:
        suffix = media_type(uri).rpartition("/")[2]
        name = re.sub(r"[^\w.-]", "_", f"{key}.{suffix}")  # a record may hold any key
        path = Path("images") / name
        try:
            image = base64.b64decode(uri.partition(",")[2])
        except ValueError as error:
            raise ConfigError(f"the record holds a picture that is not base64: {uri[:60]!r} ({error})") from error
        (folder / "images").mkdir(exist_ok=True)
        write_bytes(folder / path, image)
        return path.as_posix()

    return save


def rows_of(episode: Record, valid_only: bool = False) -> Iterator[Record]:
    """Yield the episode's rows: `messages`, `tools` (JSON, for slime's `--tool-key`) and `metadata`.

    `metadata.notes` says whether the row is a turn in which the model wrote its notes. With `valid_only`, invalid
    responses are not trained on. Raises ConfigError if a message has images, or if a scripted player named bare actions
    where the prompt asks for more.
    """
    messages, turns = split_prompts(episode)
    about = {"task": episode.get("task_name"), **{key: episode.get(key) for key in _ABOUT_KEYS}}
    tools = json.dumps(episode.get("tools") or [])
    first = 0
    for chain in _chains(messages, turns):
        trained = [len(turn["prompt"]) for turn in chain if not valid_only or turn.get("valid") is not False]
        if trained:
            last = chain[-1]
            shown = [messages[index] for index in last["prompt"]]
            _check_text(episode, last, shown)
            place = {"turn": first, "turns": len(chain), "notes": "summary" in chain[0]}
            conversation = [*shown, {"role": "assistant", "content": last["response"]}]
            yield {"messages": _masked(conversation, trained), "tools": tools, "metadata": {**about, **place}}
        first += len(chain)


def _masked(conversation: Sequence[Record], trained: Sequence[int]) -> list[Record]:
    """The messages with `step_loss_mask`; `trained` are the places of the responses to train on."""
    row = []
    for place, message in enumerate(conversation):
        kept = {key: message[key] for key in _MESSAGE_KEYS if key in message}
        is_hidden = message["role"] == "assistant" and place not in trained
        row.append({**kept, "step_loss_mask": int(not is_hidden)})
    return row


def _check_text(episode: Record, turn: Record, prompt: Sequence[Record]) -> None:
    """Raise ConfigError for images, and for a scripted player's bare action where the prompt asks for `MARKER`."""
    where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
    if turn.get("has_images") or any(isinstance(message.get("content"), list) for message in prompt):
        raise ConfigError(f"{where} has pictures, and jsonl is for text; use --format atif")
    player = episode.get("player")
    response = turn["response"]
    is_bare = player in SCRIPTED and MARKER not in response and "summary" not in turn
    if is_bare and any(MARKER in text_of(message) for message in prompt if message["role"] != "assistant"):
        bare = f"the player {player} answered {response!r}, and the prompt asks for a line `{MARKER}`"
        advice = "python -m inspection.demonstrations writes an expert's answers in full"
        raise ConfigError(f"{where}: {bare}; {advice}")


def _chains(messages: Sequence[Record], turns: Sequence[Record]) -> Iterator[list[Record]]:
    chain: list[Record] = []
    for turn in turns:
        if chain and not _continues(messages, chain[-1], turn):
            yield chain
            chain = []
        chain.append(turn)
    yield chain


def _continues(messages: Sequence[Record], last: Record, turn: Record) -> bool:
    """Whether the turn's prompt is the last one's, its response, and something new."""
    length = len(last["prompt"])
    if turn["prompt"][:length] != last["prompt"] or len(turn["prompt"]) == length:
        return False
    response = messages[turn["prompt"][length]]
    return response["role"] == "assistant" and text_of(response).strip() == last["response"].strip()
