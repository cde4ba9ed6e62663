"""Turns a recorded episode into rows for supervised training: prompts as in the rollout, and the model's responses.

A row is the longest run of turns whose prompts continue each other: the whole episode under `history: full`, one turn
under a memory window. `step_loss_mask` is slime's: 0 on responses that are only shown, for example as memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inspection.text import text_of
from inspection.view.prompts import split_prompts
from slime_verlog import ConfigError


def rows_of(episode: Mapping[str, Any], valid_only: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the episode's rows: `messages`, `tools` (JSON, for slime's `--tool-key`) and `metadata`.

    With `valid_only`, invalid responses are not trained on. Raises ConfigError if a message has images.
    """
    messages, turns = split_prompts(episode)
    first = 0
    for chain in _chains(messages, turns):
        trained = [len(turn["prompt"]) for turn in chain if turn.get("valid") is not False or not valid_only]
        if trained:
            shown = [messages[index] for index in chain[-1]["prompt"]]
            yield {
                "messages": _conversation(episode, shown, chain[-1]["response"], trained),
                "tools": json.dumps(episode.get("tools") or []),
                "metadata": _metadata(episode, first, len(chain)),
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


def _conversation(
    episode: Mapping[str, Any], shown: Sequence[Mapping[str, Any]], response: str, trained: Sequence[int]
) -> list[dict[str, Any]]:
    """A chain's last prompt and its response; `trained` are the places of the responses to train on."""
    if any(not isinstance(message["content"], str) for message in shown):
        where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
        raise ConfigError(f"{where} has pictures, and jsonl and parquet are for text; use --format atif")
    shown = [*shown, {"role": "assistant", "content": response}]
    kept = ("role", "content", "tool_call_id")
    return [
        {key: message[key] for key in kept if key in message}
        | {"step_loss_mask": int(message["role"] != "assistant" or place in trained)}
        for place, message in enumerate(shown)
    ]


def _metadata(episode: Mapping[str, Any], first: int, turns: int) -> dict[str, Any]:
    """Where a row comes from; the same keys and types in every row."""
    seed, success = episode.get("seed"), episode.get("success")
    return {
        "task": str(episode.get("task_name")),
        "seed": seed if isinstance(seed, int) else None,
        "setting": str(episode.get("setting") or "-"),
        "player": str(episode.get("player") or "-"),
        "turn": first,
        "turns": turns,
        **{key: None if episode.get(key) is None else float(episode[key]) for key in ("return", "progression")},
        "success": None if success is None else bool(success),
    }
