"""Turns a recorded episode into a trajectory of Harbor's Agent Trajectory Interchange Format (ATIF), version 1.6.

Specification: `docs/rfcs/0001-trajectory-format.md` of Harbor. The first prompt becomes system and user steps, every
response an agent step, and what the environment shows next that step's observation. Images are files, named by path.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inspection.command import VERSION
from inspection.view.prompts import split_prompts
from slime_verlog import ConfigError

SCHEMA_VERSION = "ATIF-v1.6"
NOTES = "With a memory window, a prompt shows only some earlier steps; prompt_token_ids (if recorded) are what was sent"
_ROOT_KEYS = ("env_path", "task", "options", "max_turns", "task_name", "seed", "setting", "stop", "metrics")
_STEP_KEYS = ("reward", "executed_action", "valid", "terminated", "truncated", "finish_reason", "notes", "summary")
_RESULT_KEYS = ("return", "success", "progression", "valid_action_ratio")

SaveImage = Callable[[str, str], str]
"""Stores an image, given its key and data URI; returns its path."""


def trajectory_of(episode: Mapping[str, Any], save_image: SaveImage) -> dict[str, Any]:
    """Return the episode as an ATIF document; token ids and log-probs are included where they were recorded."""
    messages, turns = split_prompts(episode)
    images = episode.get("pictures") or {}

    def read(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
        """Return a message's content as ATIF holds it: text, or a list of text and image parts."""
        return content if isinstance(content, str) else [_part(part, images, save_image) for part in content]

    steps = [{"step_id": number, **step} for number, step in enumerate(_steps(messages, turns, read), 1)]
    measured = [step["metrics"] for step in steps if "metrics" in step]
    totals = {
        f"total_{key}": sum(metrics[key] for metrics in measured)
        for key in ("prompt_tokens", "completion_tokens")
        if len(measured) == len(turns) and all(key in metrics for metrics in measured)
    }
    identity = [episode.get(key) for key in ("setting", "player", "task_name", "seed", "options")]
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
            steps.append({"source": "system", "message": read(instruction)})
        # What the prompt shows for the first time: the messages after the last response.
        responses = [place for place, message in enumerate(prompt) if message["role"] == "assistant"]
        start = responses[-1] + 1 if responses and number else 0
        new = [read(message["content"]) for message in prompt[start:] if message["role"] != "system"]
        if number == 0:
            steps += [{"source": "user", "message": message} for message in new]
        elif new:
            last = next(step for step in reversed(steps) if step["source"] == "agent")
            last["observation"] = {"results": [{"content": message} for message in new]}
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


def image_file(uri: str) -> bytes:
    """Return the file in a data URI; raises ConfigError if it is not base64."""
    try:
        return base64.b64decode(uri.partition(",")[2])
    except ValueError as error:
        raise ConfigError(f"the record holds a picture that is not base64: {uri[:60]!r} ({error})") from error


def _given(source: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: source[key] for key in keys if source.get(key) is not None}
