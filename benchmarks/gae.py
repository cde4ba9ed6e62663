"""The advantages that training computes, and the definition in plain Python, back to back.

    python -m benchmarks.gae [--turns 4000] [--tokens 1000000]

One thread; times are CPU time, the best of several rounds.

- `compute_advantages`, the function that training calls, on lists of tensors as slime's Megatron actor has them: one
  sample per turn with values, log-probs, reference log-probs and the KL that slime computed from both, int32 loss masks
  and the turn table. A bootstrap sample follows each episode part.
- What no scan can remove: joining the lists that the function reads (values, KL, masks) and splitting two
  vectors into the lists that it writes, without any arithmetic.
- The definition as a loop over tokens, in plain Python, which must compute the same advantages.
"""

import argparse
import logging
import random
import time
import timeit
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from advantage.gae import discounts_of
from advantage.hook import compute_advantages
from advantage.settings import AdvantageSettings
from advantage.turn_table import TABLE_KEY, TurnKind, TurnRow, TurnSpan, decode_row, encode_row
from tests.advantage.reference import brute_force

TURNS_PER_EPISODE = 16
KL_COEF = 0.05
PER_TOKEN = ("values", "log_probs", "ref_log_probs")
DEFINED_BY = ("values", "token_rewards", "turn_lengths", "turn_rewards", "next_turn", "bootstrap_values")
Work = dict[str, Tensor]


def make_work(turns: int, tokens: int, seed: int) -> Work:
    """Make a packed batch whose end cuts every episode part; lengths are long-tailed, at most 2,048."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(turns).log_normal_(0.0, 0.6, generator=generator)
    lengths = (lengths * tokens / lengths.sum()).long().clamp(1, 2048)
    lengths[lengths.argmin()] += max(tokens - int(lengths.sum()), 0)
    following = torch.arange(1, turns + 1)
    following[TURNS_PER_EPISODE - 1 :: TURNS_PER_EPISODE] = -1
    following[-1] = -1
    tokens = int(lengths.sum())
    draw = lambda n: torch.randn(n, generator=generator)
    log_probs = -draw(tokens).abs()
    reference = -draw(tokens).abs()
    return {
        "values": draw(tokens),
        "log_probs": log_probs,
        "ref_log_probs": reference,
        "token_rewards": -KL_COEF * (log_probs - reference),
        "turn_lengths": lengths,
        "turn_rewards": draw(turns),
        "next_turn": following,
        "bootstrap_values": draw(turns) * (following < 0),
    }


def as_rollout_data(work: Work) -> dict[str, Any]:
    """Arrange the batch as slime passes it to the hook: samples in random order, each with its own tensors."""
    lengths = work["turn_lengths"].tolist()
    rewards = work["turn_rewards"].double().tolist()
    samples: list[tuple[TurnRow, dict[str, Tensor]]] = []
    by_turn = {name: work[name].split(lengths) for name in PER_TOKEN}
    for t, length in enumerate(lengths):
        segment, turn = divmod(t, TURNS_PER_EPISODE)
        row = TurnRow(segment, turn, turns=(TurnSpan(0, length, rewards[t]),))
        samples.append((row, {name: parts[t] for name, parts in by_turn.items()}))
        if work["next_turn"][t] < 0:
            state = {name: torch.zeros(1) for name in PER_TOKEN}
            state["values"] = work["bootstrap_values"][t : t + 1]
            samples.append((TurnRow(segment, turn + 1, TurnKind.BOOTSTRAP), state))
    random.Random(1).shuffle(samples)
    data: dict[str, Any] = {name: [row[name].clone() for _, row in samples] for name in PER_TOKEN}
    data["kl"] = [new - old for new, old in zip(data["log_probs"], data["ref_log_probs"], strict=True)]
    data["loss_masks"] = [torch.full_like(row["values"], len(table.turns)).int() for table, row in samples]
    data[TABLE_KEY] = [encode_row(table) for table, _ in samples]
    data["response_lengths"] = [len(mask) for mask in data["loss_masks"]]
    data["total_lengths"] = [1400 + n for n in data["response_lengths"]]
    return data


def join_and_split(data: dict[str, Any]) -> object:
    """Join the lists that the hook reads, and split two of the vectors again; no check, no arithmetic."""
    values, kl, _ = (torch.cat(data[name]) for name in ("values", "kl", "loss_masks"))
    return [torch.unsafe_split_with_sizes(x, data["response_lengths"]) for x in (values, kl)]


def hook_advantages(args: Namespace, data: dict[str, Any]) -> Tensor:
    """Return the hook's advantages in the order of the packed batch."""
    batch, found = dict(data), {}
    compute_advantages(args, batch)
    for vector, advantages in zip(data[TABLE_KEY], batch["advantages"], strict=True):
        row = decode_row(vector)
        if row.kind is TurnKind.TURN:
            found[row.segment, row.first_turn] = advantages
    return torch.cat([found[place] for place in sorted(found)])


def cpu_ms(run: Callable[[], object], rounds: int = 20) -> float:
    """Time the best of several rounds."""
    return 1e3 * min(timeit.repeat(run, timer=time.thread_time, number=1, repeat=rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    args = Namespace(kl_coef=KL_COEF)
    work = make_work(options.turns, options.tokens, seed=0)
    data = as_rollout_data(work)
    lists = {name: work[name].tolist() for name in DEFINED_BY}
    discounts = asdict(discounts_of(AdvantageSettings(), "actor"))
    definition = lambda: brute_force(**lists, **discounts)
    difference = (hook_advantages(args, data) - torch.tensor(definition())).abs().max()
    # The hook removes the turn table, so each call gets a fresh mapping.
    times = {
        "compute_advantages": cpu_ms(lambda: compute_advantages(args, dict(data))),
        "its lists joined and split, no arithmetic": cpu_ms(lambda: join_and_split(data)),
        "the definition, token by token": cpu_ms(definition, rounds=3),
    }
    print(f"{options.turns} turns, {len(work['values'])} tokens, one thread; largest difference {difference:.1e}")
    for name, ms in times.items():
        print(f"{name:41s} {ms:9.2f} ms  {ms / times['compute_advantages']:8.2f} x compute_advantages")


if __name__ == "__main__":
    main()
