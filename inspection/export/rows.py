"""Rows for supervised training, written one episode at a time.

A row is the longest run of turns whose prompts continue each other: the whole episode under
`history: full`, one turn under a memory window. `step_loss_mask` is slime's: 0 on responses that
are only shown, for example as memory.
"""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence

from envs.base import text_of
from inspection.records import Record, split_prompts, write_jsonl
from inspection.target import check_free
from inspection.view.sources import find_files, read_run
from slime_verlog import ConfigError

_MESSAGE_KEYS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")
"""Keys of a message that a row keeps; the last three come from an agent's program."""
_ABOUT_KEYS = ("seed", "setting", "player", "return", "progression", "success")
SCRIPTED = ("random", "expert")
"""Players of `slime-verlog evaluate` that name actions and give no reasons."""
MARKER = "ACTION:"
"""What announces the action in a response, where the prompt asks for it."""


def export(options: Namespace) -> None:
    """Write the rows and say how many; raises ConfigError if there is none, or the file may not be
    written."""
    if options.out.suffix != ".jsonl":
        raise ConfigError(
            f"--out must end in .jsonl, which tells slime the format; got {options.out}"
        )
    read = [path for run in options.runs for path in find_files(run)]
    check_free(options.out, options.overwrite, read)
    counts: Counter[str] = Counter()
    written = write_jsonl(_rows(options, counts), options.out)
    print(
        f"{written} rows from {counts['kept']} of {counts['read']} episodes written to "
        f"{options.out}"
    )


def _rows(options: Namespace, counts: Counter[str]) -> Iterator[Record]:
    """Yield the rows of the chosen episodes; counts episodes `read` and `kept`, and `rows`."""
    for run in options.runs:
        for episode in read_run(run, options.tokenizer, options.trust, needs_text=True):
            counts["read"] += 1
            if not _is_chosen(options, episode):
                continue
            counts["kept"] += 1
            for row in rows_of(episode, options.valid_only):
                counts["rows"] += 1
                yield row
    if not counts["rows"]:
        filters = "--successful, --min-return, --task, --setting or --valid-only"
        raise ConfigError(
            f"none of the {counts['read']} episodes is left to write; relax {filters}"
        )


def _is_chosen(options: Namespace, episode: Record) -> bool:
    """Whether the episode was played and fulfils every filter."""
    if episode.get("stop") == "failed" or not episode["story"]:
        return False
    if options.successful and episode.get("success") is not True:
        return False
    total = episode.get("return")
    if options.min_return is not None and (total is None or total < options.min_return):
        return False
    if options.task and episode.get("task_name") not in options.task:
        return False
    return not options.setting or episode.get("setting") in options.setting


def rows_of(episode: Record, valid_only: bool = False) -> Iterator[Record]:
    """Yield the episode's rows: `messages`, `tools` (JSON, for slime's `--tool-key`) and
    `metadata`.

    `metadata.notes` says whether the model wrote its notes in one of the row's turns. With
    `valid_only`, invalid responses are not trained on. Raises ConfigError if a message has images,
    or if a scripted player named bare actions where the prompt asks for more.
    """
    messages, turns = split_prompts(episode)
    about = {"task": episode.get("task_name"), **{key: episode.get(key) for key in _ABOUT_KEYS}}
    tools = json.dumps(episode.get("tools") or [])
    first = 0
    for chain in _chains(messages, turns):
        trained = [
            len(turn["prompt"])
            for turn in chain
            if not valid_only or turn.get("valid") is not False
        ]
        if trained:
            last = chain[-1]
            shown = [messages[index] for index in last["prompt"]]
            _check_text(episode, last, shown)
            place = {
                "turn": first,
                "turns": len(chain),
                "notes": any("summary" in t for t in chain),
            }
            conversation = [*shown, {"role": "assistant", "content": last["response"]}]
            yield {
                "messages": _masked(conversation, trained),
                "tools": tools,
                "metadata": {**about, **place},
            }
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
    """Raise ConfigError for images, and for a scripted player's bare action where the prompt asks
    for `MARKER`."""
    where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
    if turn.get("has_images") or any(
        isinstance(message.get("content"), list) for message in prompt
    ):
        raise ConfigError(
            f"{where} has pictures, and rows are text; leave it out with --task or --setting"
        )
    player = episode.get("player")
    response = turn["response"]
    is_bare = player in SCRIPTED and MARKER not in response and "summary" not in turn
    if is_bare and any(
        MARKER in text_of(message) for message in prompt if message["role"] != "assistant"
    ):
        bare = (
            f"the player {player} answered {response!r}, and the prompt asks for a line `{MARKER}`"
        )
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
