"""Counts what four rules train of recorded conversations, and prints a row for each recording and
rule.

    python -m benchmarks.record_conversations FOLDER [PROGRAM ...]
    PYTHONPATH=SLIME python -m benchmarks.conversations FOLDER/*.jsonl > counts.csv

Each line of a recording is a turn: `prompt` and `response` are token ids, `messages` what the
program sent, and `answer` the response as a message. `chains` and `turns` are the values of
`samples`. `skyrl` is the rule of SkyRL's `merge_stepwise_output`: a turn joins the one just before
it if it continues it. `slime` is slime's own `TrajectoryManager`, from the checkout that PYTHONPATH
names.

`distinct` counts the nodes of a prefix tree of all prompts and responses; `trained` the tokens of
all samples, which are what the trainer computes; `own` is the share of the model's tokens that have
a loss.
"""

import json
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollout.bridge.chains import find_chains

Conversation = Sequence[dict[str, Any]]
"""The turns of a recording."""


def distinct_tokens(conversation: Conversation) -> int:
    """Return the number of nodes of a prefix tree of the turns' prompts with their responses."""
    total = 0
    previous = []
    for tokens in sorted(turn["prompt"] + turn["response"] for turn in conversation):
        same = (a == b for a, b in zip(previous, tokens, strict=False))
        shared = sum(takewhile(bool, same))
        total += len(tokens) - shared
        previous = tokens
    return total


def _lengths(turns: Conversation) -> list[int]:
    return [len(turn["prompt"]) + len(turn["response"]) for turn in turns]


def as_chains(conversation: Conversation) -> tuple[list[int], int]:
    """Return the lengths of the samples of `samples: chains`, and how many of the model's tokens
    they train."""
    turns: list[Any] = []
    for turn in conversation:
        prompt = SimpleNamespace(token_ids=turn["prompt"], train_inputs=None)
        turns.append(
            SimpleNamespace(prompt=prompt, generation=SimpleNamespace(token_ids=turn["response"]))
        )
    return _lengths([conversation[chain[-1]] for chain in find_chains(turns)]), _own(conversation)


def as_turns(conversation: Conversation) -> tuple[list[int], int]:
    """The same for a sample per turn."""
    return _lengths(conversation), _own(conversation)


def as_skyrl(conversation: Conversation) -> tuple[list[int], int]:
    """The same for SkyRL's rule."""
    lengths: list[int] = []
    merged: list[int] = []
    for turn in conversation:
        if lengths and turn["prompt"][: len(merged)] == merged:
            lengths.pop()
        merged = turn["prompt"] + turn["response"]
        lengths.append(len(merged))
    return lengths, _own(conversation)


def as_slime(conversation: Conversation) -> tuple[list[int], int]:
    """The same for slime's adapters, with these prompts and responses."""
    from slime.agent.trajectory import TrajectoryManager, TurnRecord
    from slime.utils.types import Sample

    manager = TrajectoryManager()
    for turn in conversation:
        record = TurnRecord(turn["prompt"], turn["response"], "stop")
        manager.record_turn(
            "one", turn=record, prompt_messages=turn["messages"], response_message=turn["answer"]
        )
    samples = manager.get_trajectory("one", base_sample=Sample())
    trained = sum(sum(sample.loss_mask or ()) for sample in samples)
    return [len(sample.tokens) for sample in samples], trained


RULES = {"chains": as_chains, "turns": as_turns, "skyrl": as_skyrl, "slime": as_slime}


def _own(conversation: Conversation) -> int:
    return sum(len(turn["response"]) for turn in conversation)


def main() -> None:
    """Print the table of the recordings that the command line names."""
    print("recording,rule,requests,distinct,samples,trained,trained_per_distinct,own")
    for path in map(Path, sys.argv[1:]):
        conversation = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        distinct = distinct_tokens(conversation)
        generated = _own(conversation)
        for rule, count in RULES.items():
            lengths, own = count(conversation)
            trained = sum(lengths)
            sizes = f"{len(conversation)},{distinct},{len(lengths)},{trained}"
            print(f"{path.stem},{rule},{sizes},{trained / distinct:.3f},{own / generated:.3f}")


if __name__ == "__main__":
    main()
