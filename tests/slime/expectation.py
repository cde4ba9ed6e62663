"""What Megatron must have trained on, worked out in float64 from the ledger of the environments.

Payments and endings come from the ledger, values, log-probs and KL from the record of the training
process; the discounted sums are `tests.advantage.reference.brute_force`, which shares no code with
what is tested.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from advantage.turn_table import PADDING_INDEX
from tests.advantage.reference import Turn, brute_force

DISCOUNTS = {"gamma_step": 0.99, "lambda_step": 0.95, "gamma_token": 1.0, "lambda_token": 1.0}


@dataclass(frozen=True)
class Trained:
    """One sample as a rank trained on it: the rollout's sample, and the rank's row of every
    per-sample list."""

    sample: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def is_bootstrap(self) -> bool:
        return self.sample["metadata"]["kind"] == "bootstrap"

    @property
    def segment(self) -> int:
        return self.sample["group_index"]

    @property
    def turn(self) -> int:
        return self.sample["metadata"]["round_number"]


def trained_samples(
    records: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]
) -> list[Trained]:
    """All samples of all data-parallel ranks, joined with what the rollout handed over, in the
    rollout's order."""
    found = {}
    for record in records:
        data = record["data"]
        own = positions(data, samples)
        for i, position in enumerate(own):
            if data["sample_indices"][i] == PADDING_INDEX:
                continue
            # `raw_reward` and `total_lengths` of some versions cover the whole batch; only a rank's
            # own rows are read.
            row = {key: value[i] for key, value in data.items() if _is_row(value, len(own))}
            assert position not in found, f"sample {position} was trained on twice"
            found[position] = Trained(samples[position], row)
    return [found[position] for position in sorted(found)]


def positions(data: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Sequence[int]:
    """Where a rank's samples stood in the rollout's batch; padding stands behind its end."""
    # Not `partition`: its places count the padding of chains. A turn and its group's bootstrap
    # differ in their tokens.
    place = {(sample["index"], tuple(sample["tokens"])): i for i, sample in enumerate(samples)}
    pairs = zip(data["sample_indices"], data["tokens"], strict=True)
    return [place.get((index, tuple(tokens.tolist())), len(samples)) for index, tokens in pairs]


def _is_row(value: Any, count: int) -> bool:
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0
    return isinstance(value, list | torch.Tensor) and not is_number and len(value) == count


def payments_of(
    trained: Sequence[Trained], ledger: Mapping[Any, Mapping[str, Any]], tokenizer: Any
) -> list[Any]:
    """The ledger's line for every turn; None for bootstrap samples."""
    return [None if item.is_bootstrap else _payment(item, ledger, tokenizer) for item in trained]


def _payment(
    item: Trained, ledger: Mapping[Any, Mapping[str, Any]], tokenizer: Any
) -> Mapping[str, Any]:
    ids = list(item.sample["tokens"][-item.sample["response_length"] :])
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return ledger[(item.sample["metadata"]["episode_id"], item.turn, text)]


def expected_advantages(
    trained: Sequence[Trained], paid: Sequence[Any], kl_coef: float = 0.0, **changes: Any
) -> list[torch.Tensor | None]:
    """Float64 advantages of every turn's trained tokens, before whitening; None for bootstrap
    samples.

    `changes` are discounts of `brute_force` that differ from the defaults.
    """
    places = [(item.segment, item.turn) for item in trained]
    lent = {
        place: float(item.row["values"][0])
        for place, item in zip(places, trained, strict=True)
        if item.is_bootstrap
    }
    turns: dict[tuple[int, int], Turn] = {}
    for place, item, line in zip(places, trained, paid, strict=True):
        if not item.is_bootstrap:
            values = on_trained_tokens(item, "values").tolist()
            costs = (
                (-kl_coef * on_trained_tokens(item, "kl")).tolist()
                if kl_coef
                else [0.0] * len(values)
            )
            after = None if line["terminated"] else (place[0], place[1] + 1)
            turns[place] = Turn(values, costs, line["reward"], after, lent.get(after, 0.0))
    found = brute_force(turns, **{**DISCOUNTS, **changes})
    return [
        None if item.is_bootstrap else torch.tensor(found[place], dtype=torch.float64)
        for place, item in zip(places, trained, strict=True)
    ]


def on_trained_tokens(item: Trained, name: str) -> torch.Tensor:
    """One of the sample's rows, in float64, at the tokens that are trained on."""
    return item.row[name].double()[item.row["loss_masks"].bool()]


def largest_difference(
    trained: Sequence[Trained], name: str, expected: Sequence[torch.Tensor | None]
) -> float:
    """Between what was trained on and what was expected, over all trained tokens."""
    pairs = [
        (on_trained_tokens(i, name), want)
        for i, want in zip(trained, expected, strict=True)
        if want is not None
    ]
    return max(float((row - want).abs().max()) for row, want in pairs if len(want))


def assert_trained_as_paid(
    run: Any,
    role: str,
    rollout: int,
    tokenizer: Any,
    *,
    whitens: bool = False,
    kl_coef: float = 0.0,
) -> None:
    """Compare a role's advantages, which the run may whiten, and returns with what the environments
    paid."""
    items = trained_samples(run.records(role, rollout), run.samples(rollout))
    assert_as_paid(
        items, payments_of(items, run.payments(), tokenizer), whitens=whitens, kl_coef=kl_coef
    )


def assert_as_paid(
    items: Sequence[Trained], paid: Sequence[Any], *, whitens: bool = False, kl_coef: float = 0.0
) -> None:
    """Compare advantages and returns with these payments."""
    expected = expected_advantages(items, paid, kl_coef)
    assert (
        largest_difference(items, "advantages", whitened(expected) if whitens else expected) < 2e-5
    )
    assert largest_difference(items, "returns", critic_targets(items, expected)) < 2e-5


def log_prob_gaps(run: Any, *rollouts: int) -> torch.Tensor:
    """How far training and rollout are apart in the log-prob of each token that the actor trained
    on."""
    items = [
        item for r in rollouts for item in trained_samples(run.records("actor", r), run.samples(r))
    ]
    trained = [item for item in items if not item.is_bootstrap]
    both = [
        (on_trained_tokens(item, "log_probs"), on_trained_tokens(item, "rollout_log_probs"))
        for item in trained
    ]
    gaps = torch.cat([ours - theirs for ours, theirs in both]).abs()
    print(
        f"log-prob difference of training and rollout: mean {gaps.mean():.2e}, max {gaps.max():.2e}"
    )
    return gaps


def critic_targets(
    trained: Sequence[Trained], advantages: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Advantages and values, added up."""
    pairs = zip(trained, advantages, strict=True)
    return [None if a is None else a + on_trained_tokens(item, "values") for item, a in pairs]


def whitened(advantages: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Zero mean and unit variance over all trained tokens of the batch, as slime does it."""
    flat = torch.cat([a for a in advantages if a is not None])
    mean = flat.mean()
    variance = ((flat - mean) ** 2).sum() / (len(flat) - 1)
    return [None if a is None else (a - mean) / torch.sqrt(variance + 1e-8) for a in advantages]
