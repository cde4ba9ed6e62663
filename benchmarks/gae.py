"""The advantages that training computes, plain loops for the same turns, and a memory copy, back to back.

    python benchmarks/gae.py [--turns 4000] [--tokens 1000000] [--json FILE]

Two parts, both on one thread; times are CPU time, the best of several rounds.

- `compute_advantages`, the function that training calls, on lists of tensors as slime's Megatron actor has them: one
  sample per turn with values, log-probs, reference log-probs and the KL that slime computed from both, int32 loss masks
  and the turn table. A bootstrap sample follows each episode part. The peer is a copy of as many bytes as the
  function writes: one float32 vector of twice the tokens (advantages and returns, 8 MB for a million tokens), from
  memory into memory that were both used before. Ratios are to this copy in a loop, which finds its bytes in the cache.
  The function does not, so the same copy is also timed right after each call of the function. A third line says what
  no scan can remove: joining the lists that the function reads (values, KL, masks, table) and splitting two vectors
  into the lists that it writes, without any arithmetic.
- The same turns packed, for the algorithms alone: the definition as a loop over tokens, a loop over the columns of a
  padded block, and a loop with one discount. With SLIME_PATH set to a checkout, slime's `chunked_gae` runs too; the
  last two pad and have one discount, so their results differ.

A check comes first: all methods with two discounts compute the same advantages.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import random
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.hook import compute_advantages
from advantage.settings import AdvantageSettings, Discounts
from advantage.turn_table import TABLE_KEY, TurnKind, TurnRow, TurnSpan, decode_row, encode_row

TURNS_PER_EPISODE = 16
KL_COEF = 0.05
COLD_COPY = "memory copy after compute_advantages"
PER_TOKEN = ("values", "log_probs", "ref_log_probs")
Work = dict[str, Tensor]


def make_work(turns: int, tokens: int, seed: int) -> Work:
    """A packed batch in which the end of the batch cuts every episode part; lengths are long-tailed, at most 2,048."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(turns).log_normal_(0.0, 0.6, generator=generator)
    lengths = (lengths * tokens / lengths.sum()).long().clamp(1, 2048)
    lengths[lengths.argmin()] += max(tokens - int(lengths.sum()), 0)
    following = torch.arange(1, turns + 1)
    following[TURNS_PER_EPISODE - 1 :: TURNS_PER_EPISODE] = -1
    following[-1] = -1
    tokens = int(lengths.sum())
    draw = lambda n: torch.randn(n, generator=generator)
    log_probs, reference = -draw(tokens).abs(), -draw(tokens).abs()
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
    """The batch as a rank has it when slime calls the hook: samples in random order, each with its own tensors."""
    lengths, following = work["turn_lengths"].tolist(), work["next_turn"].tolist()
    rewards = work["turn_rewards"].double().tolist()
    samples: list[tuple[TurnRow, dict[str, Tensor]]] = []
    columns = [work[name].split(lengths) for name in PER_TOKEN]
    for t, rows in enumerate(zip(*columns, strict=True)):
        place = t // TURNS_PER_EPISODE, t % TURNS_PER_EPISODE
        row = TurnRow(*place, turns=(TurnSpan(0, lengths[t], rewards[t]),))
        samples.append((row, dict(zip(PER_TOKEN, rows, strict=True))))
        if following[t] < 0:
            state = {name: torch.zeros(1) for name in PER_TOKEN} | {"values": work["bootstrap_values"][t : t + 1]}
            samples.append((TurnRow(place[0], place[1] + 1, TurnKind.BOOTSTRAP), state))
    random.Random(1).shuffle(samples)
    data: dict[str, Any] = {name: [row[name].clone() for _, row in samples] for name in PER_TOKEN}
    data["kl"] = [new - old for new, old in zip(data["log_probs"], data["ref_log_probs"], strict=True)]
    data["loss_masks"] = [torch.full((len(row["values"]),), len(table.turns)).int() for table, row in samples]
    data[TABLE_KEY] = [encode_row(table).numpy() for table, _ in samples]
    data["response_lengths"] = [len(mask) for mask in data["loss_masks"]]
    data["total_lengths"] = [1400 + n for n in data["response_lengths"]]
    return data


def run_hook(args: Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """One call of the hook on a fresh mapping, because it removes the turn table."""
    batch = dict(data)
    compute_advantages(args, batch)
    return batch


def hook_advantages(args: Namespace, data: dict[str, Any], turns: int) -> Tensor:
    """The hook's advantages in the order of the packed batch."""
    rows: list[Tensor] = [torch.zeros(0)] * turns
    for vector, advantages in zip(data[TABLE_KEY], run_hook(args, data)["advantages"], strict=True):
        row = decode_row(vector)
        if row.kind is TurnKind.TURN:
            rows[row.segment * TURNS_PER_EPISODE + row.first_turn] = advantages
    return torch.cat(rows)


def copy_of_outputs(data: dict[str, Any]) -> Callable[[], object]:
    """Copies as many bytes as advantages and returns have."""
    source = torch.cat([*data["values"], *data["values"]])
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def join_and_split(data: dict[str, Any]) -> object:
    """The lists that the hook reads as vectors, and two of the vectors as lists again; no check, no arithmetic."""
    np.concatenate(data[TABLE_KEY])
    values, kl, _ = (torch.cat(data[name]) for name in ("values", "kl", "loss_masks"))
    return [torch.unsafe_split_with_sizes(x, data["response_lengths"]) for x in (values, kl)]


def token_by_token(work: dict[str, Tensor], d: Discounts) -> Tensor:
    """The definition as two loops: over turns, and over the tokens of each turn."""
    values, rewards = work["values"].double(), work["token_rewards"].double()
    lengths, following = work["turn_lengths"].tolist(), work["next_turn"].tolist()
    starts = (work["turn_lengths"].cumsum(0) - work["turn_lengths"]).tolist()
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(lengths))):
        end = starts[t] + lengths[t] - 1
        after = following[t]
        v_next = values[starts[after]] if after >= 0 else work["bootstrap_values"][t].double()
        a_next = advantages[starts[after]] if after >= 0 else torch.zeros((), dtype=torch.float64)
        gamma, decay, extra = d.gamma_step, d.step_decay, work["turn_rewards"][t]
        for i in range(end, starts[t] - 1, -1):
            a_next = rewards[i] + extra + gamma * v_next - values[i] + decay * a_next
            advantages[i] = a_next
            v_next = values[i]
            gamma, decay, extra = d.gamma_token, d.token_decay, 0.0
    return advantages


def pad(work: dict[str, Tensor], key: str) -> Tensor:
    rows = work[key].split(work["turn_lengths"].tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def loop_over_columns(work: dict[str, Tensor], d: Discounts) -> Tensor:
    """Two loops over a padded [episode, turn, token] block, all episodes at once; returns padded advantages."""
    grid = lambda x: x.double().reshape(-1, TURNS_PER_EPISODE, *x.shape[1:])
    values, rewards = grid(work["padded_values"]), grid(work["padded_rewards"])
    lengths, paid, last = (grid(work[k]) for k in ("turn_lengths", "turn_rewards", "bootstrap_values"))
    episodes, turns, width = values.shape
    advantages = torch.zeros_like(values)
    v_next, a_next = last[:, -1], torch.zeros(episodes, dtype=torch.float64)
    for t in reversed(range(turns)):
        for j in reversed(range(width)):
            real, ends = j < lengths[:, t], j == lengths[:, t] - 1
            gamma = torch.where(ends, d.gamma_step, d.gamma_token)
            decay = torch.where(ends, d.step_decay, d.token_decay)
            delta = rewards[:, t, j] + ends * paid[:, t] + gamma * v_next - values[:, t, j]
            a_next = torch.where(real, delta + decay * a_next, a_next)
            v_next = torch.where(real, values[:, t, j], v_next)
            advantages[:, t, j] = a_next * real
    return advantages.reshape(-1, width)


def single_discount(work: dict[str, Tensor], d: Discounts) -> Tensor:
    """One discount, each turn by itself: a loop over the columns of the padded block."""
    values, rewards = work["padded_values"], work["padded_rewards"]
    after = F.pad(values[:, 1:], (0, 1))
    deltas = rewards + d.gamma_step * after - values
    columns, carry = [], torch.zeros(len(values))
    for delta in reversed(deltas.unbind(1)):
        carry = delta + d.step_decay * carry
        columns.append(carry)
    return torch.stack(columns[::-1], 1)


def slime_chunked_gae(path: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """slime's own scan, cut out of its source, because importing slime needs many more packages."""
    source = (Path(path) / "slime" / "utils" / "ppo_utils.py").read_text(encoding="utf-8")
    wanted = {"chunked_discounted_returns", "chunked_gae"}
    body = [node for node in ast.parse(source).body if getattr(node, "name", None) in wanted]
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module(body, type_ignores=[]), "ppo_utils.py", "exec"), scope)
    return scope["chunked_gae"]


def cpu_ms(run: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> float:
    best = float("inf")
    for _ in range(rounds):
        before()
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best * 1e3


def largest_difference(work: Work, d: Discounts, hook: Tensor) -> float:
    """Largest difference between the definition and the other methods with two discounts."""
    kept = torch.arange(work["padded_values"].shape[1]) < work["turn_lengths"][:, None]
    slow = token_by_token(work, d)
    others = (loop_over_columns(work, d)[kept], hook)
    return max(float((other.double() - slow).abs().max()) for other in others)


def methods(work: Work, data: dict[str, Any], args: Namespace, rounds: int) -> dict[str, tuple[Any, int]]:
    """What is timed, and how many rounds."""
    d = AdvantageSettings().discounts
    found: dict[str, tuple[Callable[[], object], int]] = {
        "memory copy": (copy_of_outputs(data), 5 * rounds),
        "its lists joined and split, no arithmetic": (lambda: join_and_split(data), rounds),
        "compute_advantages": (lambda: run_hook(args, data), rounds),
        "double loop, token by token": (lambda: token_by_token(work, d), 1),
        "double loop, all episodes at once": (lambda: loop_over_columns(work, d), 1),
        "single discount, loop over columns": (lambda: single_discount(work, d), rounds),
    }
    if path := os.environ.get("SLIME_PATH"):
        chunked = slime_chunked_gae(path)
        padded = work["padded_rewards"], work["padded_values"]
        found["slime's chunked_gae, single discount"] = (lambda: chunked(*padded, 0.99, 0.95), rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if options.turns % TURNS_PER_EPISODE:
        parser.error(f"--turns must be a multiple of {TURNS_PER_EPISODE}, got {options.turns}")
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    args = Namespace(kl_coef=KL_COEF)
    work = make_work(options.turns, options.tokens, seed=0)
    data = as_rollout_data(work)
    work |= {"padded_values": pad(work, "values"), "padded_rewards": pad(work, "token_rewards")}
    hook = hook_advantages(args, data, options.turns)
    difference = largest_difference(work, AdvantageSettings().discounts, hook)
    times = {name: cpu_ms(run, rounds) for name, (run, rounds) in methods(work, data, args, options.rounds).items()}
    times[COLD_COPY] = cpu_ms(copy_of_outputs(data), options.rounds, before=lambda: run_hook(args, data))
    result = {
        "benchmark": "gae",
        "turns": options.turns,
        "tokens": len(work["values"]),
        "samples": len(data["values"]),
        "copied_bytes": 8 * sum(data["response_lengths"]),
        "largest_difference": difference,
        "ms": times,
        "ratio_to_copy": {name: ms / times["memory copy"] for name, ms in times.items()},
    }
    print("{turns} turns, {tokens} tokens, one thread; largest difference {largest_difference:.1e}".format(**result))
    for name, ms in times.items():
        print(f"{name:41s} {ms:9.2f} ms  {result['ratio_to_copy'][name]:10.1f} x a copy")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
