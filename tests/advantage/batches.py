"""Random batches as slime's rollout data, and their advantages by definition."""

import random
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from advantage.hook import compute_advantages
from advantage.turn_table import TurnKind, TurnRow, TurnSpan, encode_row
from tests.advantage.reference import Turn, brute_force

ARGS = dict(
    gamma_step=0.99,
    lambda_step=0.95,
    gamma_token=1.0,
    lambda_token=1.0,
    kl_coef=0.1,
    value_first_token_weight=1.0,
)


ENDINGS = (
    *("terminated", "time limit", "terminated at the time limit", "cut"),
    *("time limit, bootstrapped", "terminated at the time limit, bootstrapped"),
)
"""How an episode part may end. A terminated one has no use for its bootstrap sample."""


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


def sample_of(
    row: TurnRow, mask: Sequence[int] = (1,), values: Sequence[float] | None = None
) -> FakeSample:
    """A sample without KL, whose values are 0 unless they are given."""
    kl = torch.zeros(len(mask))
    return FakeSample(row, 2, list(mask), kl if values is None else torch.tensor(values), kl)


def turn(
    segment: int,
    index: int,
    values: Sequence[float] = (0.5, 0.5),
    reward: float = 0.0,
    *,
    moves: bool = True,
    **ends: bool,
) -> FakeSample:
    """A trained turn, alone in its sample, with a token per value."""
    span = TurnSpan(0, len(values), reward, moves=moves)
    return sample_of(TurnRow(segment, index, turns=(span,), **ends), [1] * len(values), values)


def state(segment: int, index: int, value: float = 2.0) -> FakeSample:
    """A bootstrap sample."""
    return sample_of(TurnRow(segment, index, TurnKind.BOOTSTRAP), [0], [value])


def make_samples(
    rng: random.Random, episodes: int, *, longest: int = 12, most_turns: int = 6
) -> list[FakeSample]:
    """Episode parts that start anywhere, end in every way there is, in window and in full history,
    shuffled."""
    samples: list[FakeSample] = []
    for segment in rng.sample(range(10 * episodes + 10), episodes):
        first, left = rng.randrange(5), rng.randint(1, most_turns)
        ending = rng.choice(ENDINGS)
        while left:
            here = rng.choice([1, 1, left])
            left -= here
            spans, mask = _response(rng, here, longest)
            flags = {}
            if not left:
                flags = {"terminated": "terminated" in ending, "truncated": "time limit" in ending}
            samples.append(_sample(rng, TurnRow(segment, first, turns=spans, **flags), mask))
            first += here
        if ending == "cut" or "bootstrapped" in ending:
            row, mask = TurnRow(segment, first, TurnKind.BOOTSTRAP), [0] * rng.randint(1, 3)
            samples.append(_sample(rng, row, mask))
    rng.shuffle(samples)
    return samples


def _response(
    rng: random.Random, turns: int, longest: int
) -> tuple[tuple[TurnSpan, ...], list[int]]:
    spans, mask = [], [0] * rng.choice([0, 0, 3])
    for _ in range(turns):
        shortest = 0 if turns > 1 else 1
        size = rng.choice([1, rng.randint(1, longest), rng.randint(1, longest), shortest])
        kind = rng.choice(["trained", "trained", "trained", "masked", "holes", "tail"])
        inside = [1] * size
        if kind == "masked":
            inside = [0] * size
        elif kind == "holes":
            inside = [rng.randint(0, 1) for _ in range(size)]
        elif kind == "tail" and size > 1:
            inside[-1] = 0
        start, action = len(mask), -1
        if size and rng.random() < 0.7:
            action = start + rng.randrange(size)
        reward, moves = rng.gauss(0, 1), rng.random() < 0.7
        spans.append(TurnSpan(start, start + size, reward, action, moves=moves))
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


def run(samples: Sequence[FakeSample], **changes: Any) -> dict[str, Any]:
    """The batch of one rank after the hook."""
    data = rollout_data(samples)
    compute_advantages(make_args(**changes), data)
    return data


def in_float64(samples: Iterable[FakeSample]) -> list[FakeSample]:
    return [
        replace(sample, values=sample.values.double(), kl=sample.kl.double()) for sample in samples
    ]


def check_rows(
    rows: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], atol: float = 1e-5
) -> None:
    for row, want in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row.double(), want, atol=atol, rtol=0)


def check(
    data: dict[str, Any], samples: Sequence[FakeSample], args: Namespace, atol: float = 1e-5
) -> None:
    """Compare advantages and returns with the definition."""
    advantages, returns = zip(*expected(samples, args), strict=True)
    check_rows(data["advantages"], advantages, atol)
    check_rows(data["returns"], returns, atol)


Place = tuple[int, int]
"""A segment, and the index of a turn in it."""
Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Advantages and returns of every sample."""


def expected(samples: Sequence[FakeSample], args: Namespace) -> Rows:
    """By the definition, over all samples of all ranks."""
    turns = turns_of(samples, args.kl_coef)
    found = brute_force(turns, **{name: getattr(args, name) for name in DISCOUNTS})
    with_returns = {}
    for place, row in found.items():
        with_returns[place] = row, [a + v for a, v in zip(row, turns[place].values, strict=True)]
    return on_tokens(samples, with_returns)


def turns_of(samples: Sequence[FakeSample], kl_coef: float) -> dict[Place, Turn]:
    """What the advantages of every turn follow from."""
    states = {
        (s.row.segment, s.row.first_turn): float(s.values[0]) for s in samples if not s.row.turns
    }
    turns: dict[Place, Turn] = {}
    for sample in samples:
        trained = torch.tensor(sample.mask)
        costs = -kl_coef * sample.kl.double() * trained  # untrained tokens pay nothing
        for (segment, index), span in places_of(sample):
            tokens = tokens_of(sample, span)
            is_over = sample.row.terminated and span is sample.row.turns[-1]
            after = None if is_over else (segment, index + 1)
            values, paid = sample.values[tokens].tolist(), costs[tokens].tolist()
            turns[segment, index] = Turn(
                values, paid, span.reward, after, states.get(after, 0.0), span.moves
            )
    return turns


def places_of(sample: FakeSample) -> list[tuple[Place, TurnSpan]]:
    row = sample.row
    return [((row.segment, row.first_turn + k), span) for k, span in enumerate(row.turns)]


def tokens_of(sample: FakeSample, span: TurnSpan) -> list[int]:
    """The response tokens that a turn counts: the trained ones, or all if none is trained."""
    inside = list(range(span.start, span.end))
    return [j for j in inside if sample.mask[j]] or inside


def on_tokens(
    samples: Sequence[FakeSample], numbers: Mapping[Place, tuple[list[float], list[float]]]
) -> Rows:
    """The turns' advantages and returns on their trained tokens; 0 elsewhere."""
    rows: Rows = []
    for sample in samples:
        columns = torch.zeros(2, len(sample.mask), dtype=torch.float64)
        for place, span in places_of(sample):
            columns[:, tokens_of(sample, span)] = torch.tensor(numbers[place], dtype=torch.float64)
        advantages, returns = columns * torch.tensor(sample.mask)
        rows.append((advantages, returns))
    return rows


DISCOUNTS = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
