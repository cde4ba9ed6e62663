"""Dual-discount GAE and plain loops for it, back to back: `python benchmarks/gae.py [--turns 2048]`.

The work: turns of 1 to 512 tokens, 16 turns per episode part, as in Verlog's Crafter runs. Times are CPU time of one
thread, the best of several rounds. A check comes first: every method computes the same advantages. With SLIME_PATH
set to a checkout, slime's `chunked_gae` runs too; it pads and has one discount, so its result differs.
"""

from __future__ import annotations

import argparse
import ast
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from advantage.maths.dual_gae import Discounts, dual_discount_gae
from advantage.settings import AdvantageSettings

TURNS_PER_EPISODE = 16


def make_work(turns: int, longest: int, seed: int) -> dict[str, Tensor]:
    """A packed batch in which the end of the batch cuts every episode part."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (turns,), generator=generator)
    following = torch.arange(1, turns + 1)
    following[TURNS_PER_EPISODE - 1 :: TURNS_PER_EPISODE] = -1
    following[-1] = -1
    draw = lambda n: torch.randn(n, generator=generator)
    tokens = int(lengths.sum())
    return {
        "values": draw(tokens),
        "token_rewards": draw(tokens) * 0.01,
        "turn_lengths": lengths,
        "turn_rewards": draw(turns),
        "next_turn": following,
        "bootstrap_values": draw(turns),
    }


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


def cpu_ms(run: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best * 1e3


def check(work: dict[str, Tensor], d: Discounts) -> float:
    """Largest difference between the three methods."""
    kept = torch.arange(work["padded_values"].shape[1]) < work["turn_lengths"][:, None]
    ours = dual(work, d).double()
    slow = token_by_token(work, d)
    return max(float((ours - slow).abs().max()), float((ours - loop_over_columns(work, d)[kept]).abs().max()))


def dual(work: dict[str, Tensor], d: Discounts) -> Tensor:
    inputs = {k: v for k, v in work.items() if not k.startswith("padded")}
    return dual_discount_gae(**inputs, **vars(d))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.turns % TURNS_PER_EPISODE:
        parser.error(f"--turns must be a multiple of {TURNS_PER_EPISODE}, got {options.turns}")
    torch.set_num_threads(1)
    d = AdvantageSettings().discounts
    work = make_work(options.turns, options.longest, seed=0)
    work |= {"padded_values": pad(work, "values"), "padded_rewards": pad(work, "token_rewards")}
    tokens = work["values"].numel()
    print(f"{options.turns} turns, {tokens} tokens, one thread; largest difference {check(work, d):.1e}")

    methods: dict[str, tuple[Callable[[], object], int]] = {
        "dual_discount_gae": (lambda: dual(work, d), options.rounds),
        "double loop, token by token": (lambda: token_by_token(work, d), 1),
        "double loop, all episodes at once": (lambda: loop_over_columns(work, d), 1),
        "single discount, loop over columns": (lambda: single_discount(work, d), options.rounds),
    }
    if path := os.environ.get("SLIME_PATH"):
        chunked = slime_chunked_gae(path)
        padded = work["padded_rewards"], work["padded_values"]
        methods["slime's chunked_gae, single discount"] = (lambda: chunked(*padded, 0.99, 0.95), options.rounds)
    times = {name: cpu_ms(run, rounds) for name, (run, rounds) in methods.items()}
    ours = times["dual_discount_gae"]
    for name, ms in times.items():
        print(f"{name:40s} {ms:10.1f} ms  {ms / ours:8.1f} x")


if __name__ == "__main__":
    main()
