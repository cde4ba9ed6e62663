"""Random batches as slime's rollout data, and their advantages by definition."""

import random
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from advantage.turn_table import TurnKind, TurnRow, TurnSpan, encode_row
from tests.advantage.reference import brute_force

ARGS = dict(
    gamma_step=0.99, lambda_step=0.95, gamma_token=1.0, lambda_token=1.0, kl_coef=0.1, value_first_token_weight=1.0
)


@dataclass(frozen=True)
class FakeSample:
    """One sample, its numbers full length (not sliced over context parallelism)."""

    row: TurnRow
    prompt: int
    mask: list[int]
    values: torch.Tensor
    kl: torch.Tensor


def make_args(**changes: Any) -> Namespace:
    return Namespace(**{**ARGS, **changes})


def make_samples(rng: random.Random, episodes: int, *, longest: int = 12, most_turns: int = 6) -> list[FakeSample]:
    """Episode parts that start anywhere, end in every way there is, in window and in full history, shuffled."""
    samples: list[FakeSample] = []
    for segment in rng.sample(range(10 * episodes + 10), episodes):
        first, left = rng.randrange(5), rng.randint(1, most_turns)
        ending = rng.choice(["terminated", "time limit", "time limit, bootstrapped", "cut", "both"])
        while left:
            here = rng.choice([1, 1, left])
            left -= here
            spans, mask = _response(rng, here, longest)
            flags = {}
            if not left:
                flags = {
                    "terminated": ending in ("terminated", "both"),
                    "truncated": ending.startswith("time limit") or ending == "both",
                }
            samples.append(_sample(rng, TurnRow(segment, first, turns=spans, **flags), mask))
            first += here
        if ending in ("time limit, bootstrapped", "cut"):
            samples.append(_sample(rng, TurnRow(segment, first, TurnKind.BOOTSTRAP), [0] * rng.randint(1, 3)))
    rng.shuffle(samples)
    return samples


def _response(rng: random.Random, turns: int, longest: int) -> tuple[tuple[TurnSpan, ...], list[int]]:
    spans, mask = [], [0] * rng.choice([0, 0, 3])
    for _ in range(turns):
        size = rng.choice([1, rng.randint(1, longest), rng.randint(1, longest), 0 if turns > 1 else 1])
        kind = rng.choice(["trained", "trained", "trained", "masked", "holes", "tail"])
        inside = [1] * size
        if kind == "masked":
            inside = [0] * size
        elif kind == "holes":
            inside = [rng.randint(0, 1) for _ in range(size)]
        elif kind == "tail" and size > 1:
            inside[-1] = 0
        action = len(mask) + rng.randrange(size) if size and rng.random() < 0.7 else -1
        spans.append(TurnSpan(len(mask), len(mask) + size, rng.gauss(0, 1), action, moves=rng.random() < 0.7))
        mask += inside + [0] * rng.choice([0, 1, 4])
    return tuple(spans), mask


def _sample(rng: random.Random, row: TurnRow, mask: list[int]) -> FakeSample:
    draw = lambda: torch.tensor([rng.gauss(0, 1) for _ in mask], dtype=torch.float32)
    return FakeSample(row, rng.randint(1, 9), mask, draw(), draw())


def rollout_data(samples: list[FakeSample]) -> dict[str, Any]:
    """The batch of one rank that holds these samples whole."""
    return {
        "prompt": [encode_row(s.row) for s in samples],
        "values": [s.values.clone() for s in samples],
        "kl": [s.kl.clone() for s in samples],
        "loss_masks": [torch.tensor(s.mask, dtype=torch.int) for s in samples],
        "response_lengths": [len(s.mask) for s in samples],
        "total_lengths": [s.prompt + len(s.mask) for s in samples],
    }


def expected(samples: list[FakeSample], args: Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(advantages, returns) of every sample, from the definition, over all samples of all ranks."""
    turns, places = [], {}
    for i, sample in enumerate(samples):
        for k, span in enumerate(sample.row.turns or (None,)):
            places[(sample.row.segment, sample.row.first_turn + k)] = len(turns)
            turns.append((i, k, span))
    packed = {"values": [], "token_rewards": [], "turn_lengths": [], "turn_rewards": []}
    packed |= {"next_turn": [], "bootstrap_values": [], "moves": []}
    where: list[tuple[int, int]] = []
    for i, k, span in turns:
        sample = samples[i]
        tokens = _tokens(sample, span)
        where += [(i, j) for j in tokens]
        packed["values"] += [float(sample.values[j]) for j in tokens]
        packed["token_rewards"] += [-args.kl_coef * float(sample.kl[j]) * sample.mask[j] for j in tokens]
        packed["turn_lengths"].append(len(tokens))
        packed["turn_rewards"].append(span.reward if span else 0.0)
        packed["moves"].append(span.moves if span else True)
        after = places.get((sample.row.segment, sample.row.first_turn + k + 1), -1)
        ended = sample.row.terminated and k == len(sample.row.turns) - 1
        lends = after >= 0 and samples[turns[after][0]].row.kind is TurnKind.BOOTSTRAP
        value = float(samples[turns[after][0]].values[0]) if lends and not ended else 0.0
        packed["next_turn"].append(-1 if lends or ended else after)
        packed["bootstrap_values"].append(value)
    discounts = {k: getattr(args, k) for k in ("gamma_step", "lambda_step", "gamma_token", "lambda_token")}
    result = [(torch.zeros(len(s.mask)).double(), torch.zeros(len(s.mask)).double()) for s in samples]
    for (i, j), a in zip(where, brute_force(**packed, **discounts), strict=True):
        if samples[i].mask[j]:
            result[i][0][j], result[i][1][j] = a, a + float(samples[i].values[j])
    return result


def _tokens(sample: FakeSample, span: TurnSpan | None) -> list[int]:
    inside = list(range(span.start, span.end)) if span else []
    return [j for j in inside if sample.mask[j]] or inside
