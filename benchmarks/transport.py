"""From the engine's answers to tensors on the training rank: time and bytes, stage by stage.

    python benchmarks/transport.py [--turns 16384] [--prompt 256] [--answer 256]

A fixed-turn batch goes through the functions that a run calls: `parse_generation` on the engine's JSON,
`build_samples`, `convert_samples_to_train_data`. Then it is pickled with protocol 5 as Ray does it, unpickled, and
converted to the rank's types. slime from v0.3.1 on makes a tensor per sample and key before it ships the data; the
last three lines time that. One process stands for all ranks. Times are CPU seconds of one thread. With slime installed,
its `Sample` is used, otherwise the project's own.

The stages that this project decides on are the first three, and the objects that the others get. Memory is what Python
allocates for 256 turns and their samples, the engine's JSON left out.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
import tracemalloc
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# This folder has a file with the name of the package `rollout`, so the repository must come before it.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from rollout.bridge.framework import FRAMEWORK, Sample  # noqa: E402
from rollout.bridge.sample import SampleWriter  # noqa: E402
from rollout.play.engine import parse_generation  # noqa: E402
from rollout.samples import build_samples, convert_samples_to_train_data  # noqa: E402
from rollout.tokens.token_prefix import TokenPrefix  # noqa: E402
from rollout.turn import Prompt, Segment, StopReason, Turn  # noqa: E402

ARGS = Namespace(rollout_top_p=1.0, use_rollout_routing_replay=False)
TURNS_PER_SEGMENT = 16
SLIMES_DTYPES = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


def answers(turns: int, prompt: int, answer: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompt ids and the engine's answer of every turn."""
    rng = np.random.default_rng(0)
    made: list[tuple[list[int], dict[str, Any]]] = []
    for _ in range(turns):
        ids = rng.integers(0, 150_000, prompt + answer).tolist()
        log_probs = (-rng.exponential(1.0, answer)).tolist()
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "completion_tokens": answer,
            "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, ids[prompt:], strict=True)],
        }
        made.append((ids[:prompt], {"text": "THINK: left. ACTION: turn left", "meta_info": meta}))
    return made


def as_turn(number: int, prompt: Prompt, answer: dict[str, Any]) -> Turn:
    return Turn(
        episode_id=number // TURNS_PER_SEGMENT,
        index=number % TURNS_PER_SEGMENT,
        prompt=prompt,
        generation=parse_generation(answer),
        action="turn left",
        valid=True,
        executed_action="turn left",
        reward=0.5,
        terminated=False,
        truncated=False,
        action_span=(3, 5),
    )


def as_samples(turns: Sequence[Turn]) -> list[list[Sample]]:
    """Samples of episode parts that the end of the batch cut."""
    parts = [turns[k : k + TURNS_PER_SEGMENT] for k in range(0, len(turns), TURNS_PER_SEGMENT)]
    segments = [Segment("benchmark", tuple(part), turns[0].prompt, StopReason.CUT) for part in parts]
    return build_samples(segments, list(range(len(turns))), SampleWriter(ARGS, 0))


def tensorized(data: dict[str, Any]) -> dict[str, Any]:
    """What slime ships: one contiguous CPU tensor per sample and key."""
    cpu = lambda x, dtype: torch.as_tensor(x, dtype=dtype).detach().cpu().contiguous()
    return {**data, **{key: [cpu(x, dtype) for x in data[key]] for key, dtype in SLIMES_DTYPES.items()}}


def on_rank(data: dict[str, Any]) -> dict[str, Any]:
    """What slime's rank does with the data: tensors of its types."""
    return {k: [torch.as_tensor(x).to(dtype=d) for x in data[k]] for k, d in SLIMES_DTYPES.items()}


def measure(options: argparse.Namespace) -> None:
    """Print the CPU seconds of each stage, and the size of what it makes."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = work()
        seconds[name] = time.thread_time() - start
        return result

    given = answers(options.turns, options.prompt, options.answer)
    prompts = [Prompt(TokenPrefix(ids)) for ids, _ in given]
    turns = timed("parse", lambda: [as_turn(i, prompts[i], a) for i, (_, a) in enumerate(given)])
    groups = timed("build", lambda: as_samples(turns))
    samples = [sample for group in groups for sample in group]
    data = timed("convert", lambda: convert_samples_to_train_data(ARGS, samples))
    own = timed("pickle as converted", lambda: pickle.dumps(data, protocol=5))
    again = timed("unpickle as converted", lambda: pickle.loads(own))
    timed("to the rank's tensors", lambda: on_rank(again))
    total = sum(seconds.values()) - seconds["parse"]
    shipped = timed("slime: tensors before shipping", lambda: tensorized(data))
    wire = timed("slime: pickle those", lambda: pickle.dumps(shipped, protocol=5))
    timed("slime: unpickle those", lambda: pickle.loads(wire))
    tokens = sum(len(x) for x in data["tokens"])
    sample = f"Sample of {FRAMEWORK}" if FRAMEWORK != "none" else "the project's own Sample"
    print(f"{len(turns)} turns, {tokens} tokens, {sample}, one thread")
    for name, spent in {**seconds, "build, convert, ship, tensors": total}.items():
        print(f"{name:34s} {spent:8.2f} s")
    print(f"{'turns and samples in memory':34s} {memory_per_token(given[:256]):8.1f} bytes per token")
    print(f"{'as converted':34s} {len(own) / tokens:8.1f} bytes per token")


def memory_per_token(given: Sequence[tuple[list[int], dict[str, Any]]]) -> float:
    """Bytes per token that turns and samples hold."""
    tracemalloc.start()
    # Encoded as the encoder does it.
    samples = as_samples([as_turn(i, Prompt(TokenPrefix(ids)), answer) for i, (ids, answer) in enumerate(given)])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / sum(len(sample.tokens) for group in samples for sample in group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each answer")
    torch.set_num_threads(1)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
