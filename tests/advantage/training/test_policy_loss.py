"""DIS: nothing outside the interval, finite everywhere, its metrics; docs/vectors check its gradient."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage.errors import FlagError
from advantage.flags import AdvantageFlags, check_dis
from advantage.training.policy_loss import dis_loss, dis_metrics, finish_dis

LOW, HIGH = 0.3, 5.0


def test_the_bounds_themselves_are_outside() -> None:
    bounds = torch.tensor([0.5, 3.0], dtype=torch.float64).log()
    loss, masked = dis_loss(-bounds, torch.ones(2, dtype=torch.float64), 0.5, 2.0)
    assert loss.tolist() == [0.0, 0.0] and masked.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("gap", [1e3, -1e3, float("inf"), float("-inf")])
def test_it_is_finite_however_far_the_weights_have_moved(gap: float) -> None:
    log_probs, old = torch.zeros(1, requires_grad=True), torch.tensor([gap])
    dis_loss(old - log_probs, torch.ones(1), LOW, HIGH)[0].sum().backward()
    metrics = dis_metrics(old, torch.ones(1), LOW, HIGH, torch.mean)
    assert all(torch.isfinite(value).all() for value in (log_probs.grad, *metrics.values()))


def test_metrics_split_what_was_masked_by_side_and_sign() -> None:
    ratios = torch.tensor([0.1, 0.1, 0.1, 1.0, 9.0, 9.0, 1.0, 1.0]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    metrics = finish_dis(dis_metrics(-ratios, advantages, LOW, HIGH, torch.mean))
    sides = [metrics[f"dis_masked_{side}"] for side in ("low_positive", "low_negative", "high_positive")]
    assert sides == [2 / 8, 1 / 8, 1 / 8] and metrics["dis_masked_high_negative"] == 1 / 8
    r = ratios.exp()
    assert metrics["dis_ess"] == pytest.approx((r.sum() ** 2 / (8 * (r**2).sum())).item())
    assert finish_dis(dis_metrics(torch.zeros(5), torch.ones(5), LOW, HIGH, torch.mean))["dis_ess"] == 1.0


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), per_token=st.booleans())
def test_any_split_into_micro_batches_and_ranks_gives_the_same_metrics(
    data: st.DataObject, seed: int, per_token: bool
) -> None:
    """slime adds up what the micro-batches of all ranks report, then divides by the number of samples or tokens."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8), "tokens of each sample")
    homes = [data.draw(st.integers(0, 3), "micro-batch of the sample") for _ in lengths]
    masks = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))).double() for n in lengths]
    numbers = torch.Generator().manual_seed(seed)
    normal = lambda n: torch.randn(n, generator=numbers, dtype=torch.float64)
    rows = [(normal(n), normal(n), torch.randint(-1, 4, (n,), generator=numbers)) for n in lengths]
    count = sum(float(mask.sum()) for mask in masks) if per_token else len(lengths)

    def metrics_of(batches: Sequence[Sequence[int]]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for batch in filter(None, batches):
            shares = [masks[k] if per_token else masks[k] / masks[k].sum().clamp_min(1) for k in batch]
            weights = torch.cat(shares)
            kl, advantages, stale = map(torch.cat, zip(*(rows[k] for k in batch), strict=True))
            total.update(dis_metrics(kl, advantages, LOW, HIGH, lambda x, w=weights: (x * w).sum(), stale))
        return finish_dis({name: float(value) / max(count, 1) for name, value in total.items()})

    whole = metrics_of([range(len(lengths))])
    split = metrics_of([[k for k, home in enumerate(homes) if home == number] for number in range(4)])
    assert split == pytest.approx(whole, rel=1e-9)


def test_metrics_by_staleness_are_those_of_each_staleness_alone() -> None:
    """Turns two or more updates old share one bucket."""
    torch.manual_seed(0)
    kl, stale = torch.randn(300) * 0.5, torch.randint(-1, 4, (300,)).float()
    stale[stale == 1] = 0
    found = finish_dis(dis_metrics(kl, torch.ones(300), LOW, HIGH, torch.mean, stale))
    for age, here in ((0, stale == 0), (2, stale >= 2)):
        ratio = (-kl[here]).exp()
        wanted = {
            "share": here.float().mean(),
            "masked": ((ratio <= 1 - LOW) | (ratio >= 1 + HIGH)).float().mean(),
            "ratio": ratio.mean(),
            "ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        }
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
