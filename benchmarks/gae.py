"""What the advantages of a batch cost, on lists of tensors as slime's Megatron actor has them.

    python -m benchmarks.gae [--turns 4000] [--tokens 1000000]

One thread; times are CPU time, the best of several rounds.

- `compute_advantages`, the function that training calls: one sample per turn with values, KL, int32
  loss masks and the turn table. A bootstrap sample follows each episode part.
- What no scan can remove: joining the lists that the function reads (values, KL, masks) and
  splitting two vectors into the lists that it writes, without any arithmetic.
"""

import argparse
import logging
import random
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

from advantage.hook import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from tests.advantage.batches import FakeSample, make_args, rollout_data

TURNS_PER_EPISODE = 16
PROMPT = 1400


def make_samples(turns: int, tokens: int) -> list[FakeSample]:
    """Turns in random order, whose episode parts are cut by the batch; lengths are long-tailed, at
    most 2,048."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=generator)
    lengths = torch.empty(turns).log_normal_(0.0, 0.6, generator=generator)
    lengths = (lengths * tokens / lengths.sum()).long().clamp(1, 2048)
    samples = []
    for turn, length in enumerate(lengths.tolist()):
        segment, index = divmod(turn, TURNS_PER_EPISODE)
        row = TurnRow(segment, index, turns=(TurnSpan(0, length, float(draw(1))),))
        samples.append(FakeSample(row, PROMPT, [1] * length, draw(length), draw(length)))
        if index == TURNS_PER_EPISODE - 1 or turn == turns - 1:
            following = TurnRow(segment, index + 1, TurnKind.BOOTSTRAP)
            samples.append(FakeSample(following, PROMPT, [0], draw(1), torch.zeros(1)))
    random.Random(1).shuffle(samples)
    return samples


def join_and_split(data: dict[str, Any]) -> object:
    """Join the lists that the hook reads, and split two of the vectors again; no check, no
    arithmetic."""
    values, kl, _ = (torch.cat(data[name]) for name in ("values", "kl", "loss_masks"))
    return [torch.unsafe_split_with_sizes(x, data["response_lengths"]) for x in (values, kl)]


def cpu_ms(run: Callable[[], object]) -> float:
    """Time the best of several rounds."""
    return 1e3 * min(timeit.repeat(run, timer=time.thread_time, number=1, repeat=20))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    args = make_args()
    data = rollout_data(make_samples(options.turns, options.tokens))
    print(f"{options.turns} turns, {sum(data['response_lengths'])} tokens, one thread")
    # The hook removes the turn table, so each call gets a fresh mapping.
    print(
        "compute_advantages                      "
        f"{cpu_ms(lambda: compute_advantages(args, dict(data))):9.2f} ms"
    )
    print(
        f"its lists joined and split, no arithmetic {cpu_ms(lambda: join_and_split(data)):7.2f} ms"
    )


if __name__ == "__main__":
    main()
