"""DIS: the gradient of its definition, nothing outside the interval, finite everywhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.errors import FlagError
from advantage.flags import AdvantageFlags, check_dis
from advantage.training.policy_loss import dis_loss, dis_metrics, finish_dis

LOW, HIGH = 0.3, 5.0


def gradient(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    moving = log_probs.clone().requires_grad_()
    dis_loss(old - moving, advantages, LOW, HIGH)[0].sum().backward()
    assert moving.grad is not None
    return moving.grad


def test_the_gradient_is_that_of_the_definition_with_a_weight_that_is_not_differentiated() -> None:
    torch.manual_seed(0)
    old, advantages = -torch.rand(4000, dtype=torch.float64) * 5, torch.randn(4000, dtype=torch.float64)
    log_probs = old + torch.randn(4000, dtype=torch.float64)
    moving = log_probs.clone().requires_grad_()
    ratio = (log_probs - old).exp()
    weight = torch.where((ratio > 1 - LOW) & (ratio < 1 + HIGH), ratio, 0.0)
    (-weight * advantages * moving).sum().backward()
    assert 0.1 < (weight == 0).double().mean() < 0.9
    torch.testing.assert_close(gradient(log_probs, old, advantages), moving.grad, rtol=1e-12, atol=1e-12)


def test_the_bounds_themselves_are_outside() -> None:
    bounds = torch.tensor([0.5, 3.0], dtype=torch.float64).log()
    loss, masked = dis_loss(-bounds, torch.ones(2, dtype=torch.float64), 0.5, 2.0)
    assert loss.tolist() == [0.0, 0.0] and masked.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("gap", [1e3, -1e3, float("inf"), float("-inf")])
def test_it_is_finite_however_far_the_weights_have_moved(gap: float) -> None:
    found = gradient(torch.zeros(1), torch.tensor([gap]), torch.ones(1))
    assert torch.isfinite(found).all()
    metrics = dis_metrics(torch.tensor([gap]), torch.ones(1), LOW, HIGH, torch.mean)
    assert all(torch.isfinite(value) for value in metrics.values())


def test_metrics_split_what_was_masked_by_side_and_sign() -> None:
    ratios = torch.tensor([0.1, 0.1, 0.1, 1.0, 9.0, 9.0, 1.0, 1.0]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    metrics = finish_dis({k: v.item() for k, v in dis_metrics(-ratios, advantages, LOW, HIGH, torch.mean).items()})
    sides = [metrics[f"dis_masked_{side}"] for side in ("low_positive", "low_negative", "high_positive")]
    assert sides == [2 / 8, 1 / 8, 1 / 8] and metrics["dis_masked_high_negative"] == 1 / 8
    r = ratios.exp()
    assert metrics["dis_ess"] == pytest.approx((r.sum() ** 2 / (8 * (r**2).sum())).item())
    assert finish_dis(dis_metrics(torch.zeros(5), torch.ones(5), LOW, HIGH, torch.mean))["dis_ess"] == 1.0


@settings(deadline=None)
@given(data=st.data())
def test_any_split_into_micro_batches_and_ranks_gives_the_same_metrics(data: st.DataObject) -> None:
    """slime adds up what the micro-batches of all ranks report, then divides by the number of samples or tokens."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8), "tokens of each sample")
    homes = [data.draw(st.integers(0, 3), "micro-batch of the sample") for _ in lengths]
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    numbers = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    rows = [
        tuple(
            torch.from_numpy(x) for x in (numbers.normal(0, 1, n), numbers.normal(0, 1, n), numbers.integers(-1, 4, n))
        )
        for n in lengths
    ]
    per_token = data.draw(st.booleans(), "--calculate-per-token-loss")
    count = sum(map(sum, masks)) if per_token else len(lengths)

    def metrics_of(batches: Sequence[Sequence[int]]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for batch in filter(None, batches):
            parts = [torch.tensor(masks[k]).double() for k in batch]
            weights = torch.cat([mask if per_token else mask / mask.sum().clamp_min(1) for mask in parts])
            kl, advantages, stale = (torch.cat(column) for column in zip(*(rows[k] for k in batch), strict=True))
            total.update(dis_metrics(kl, advantages, LOW, HIGH, lambda x, w=weights: (x * w).sum(), stale))
        return finish_dis({name: float(value) / max(count, 1) for name, value in total.items()})

    whole = metrics_of([range(len(lengths))])
    split = metrics_of([[k for k, home in enumerate(homes) if home == number] for number in range(4)])
    assert split == pytest.approx(whole, rel=1e-9)
    if per_token and count:
        ratio = torch.cat([row[0][torch.tensor(mask)] for row, mask in zip(rows, masks, strict=True)]).neg().exp()
        assert whole["dis_ess"] == pytest.approx((ratio.sum() ** 2 / (count * (ratio**2).sum())).item(), rel=1e-9)


def test_metrics_by_staleness_are_those_of_each_staleness_alone() -> None:
    """Sums of three micro-batches, added up as slime does; turns two or more updates old share one bucket."""
    torch.manual_seed(0)
    kl, stale = torch.randn(300) * 0.5, torch.randint(-1, 4, (300,)).float()
    stale[stale == 1] = 0
    parts = [
        dis_metrics(k, torch.ones(100), LOW, HIGH, torch.sum, s)
        for k, s in zip(kl.split(100), stale.split(100), strict=True)
    ]
    found = finish_dis({name: sum(float(part[name]) for part in parts) / 300 for name in parts[0]})
    r = (-kl).exp()
    for age, here in ((0, stale == 0), (2, stale >= 2)):
        alone = r[here]
        masked = ((alone <= 1 - LOW) | (alone >= 1 + HIGH)).float().mean()
        wanted = {"share": here.float().mean(), "masked": masked, "ratio": alone.mean()}
        wanted["ess"] = alone.sum() ** 2 / (len(alone) * (alone**2).sum())
        for name, value in wanted.items():
            assert found[f"dis_stale{age}_{name}"] == pytest.approx(value.item(), rel=1e-5)
    assert found["dis_stale1_share"] == 0 and "dis_stale1_ratio" not in found


ALLOWED = AdvantageFlags(use_rollout_logprobs=True, eps_clip=0.3, eps_clip_high=5.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_rollout_logprobs": False}, "--use-rollout-logprobs"),
        ({"use_opsm": True}, "--use-opsm would both mask"),
        ({"use_tis": True}, "--use-tis would weigh the same ratio twice"),
        ({"get_mismatch_metrics": True}, "--get-mismatch-metrics would weigh the same ratio twice"),
        ({"eps_clip_high": None}, "--eps-clip-high, which must be given"),
        ({"eps_clip_high": 0.3}, "--eps-clip-high, which must be given"),
        ({"eps_clip": 1.2}, "--eps-clip of at most 1"),
        ({"eps_clip_c": 3.0}, "leave --eps-clip-c out"),
    ],
)
def test_flags_that_make_it_another_loss_are_refused(changes: dict[str, Any], said: str) -> None:
    check_dis(ALLOWED)
    with pytest.raises(FlagError, match=said):
        check_dis(replace(ALLOWED, **changes))
