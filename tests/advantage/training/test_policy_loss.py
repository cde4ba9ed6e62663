"""DIS: its gradient by definition, nothing outside the interval, finite everywhere, its metrics."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from advantage.errors import FlagError
from advantage.flags import AdvantageFlags, check_dis
from advantage.training.policy_loss import dis_loss, dis_metrics, finish_dis
from tests.advantage.vectors import dis_case

LOW, HIGH = 0.3, 5.0


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_those_of_the_definition(seed: int) -> None:
    case = dis_case(random.Random(seed), LOW, HIGH)
    log_probs = torch.tensor(case["log_ratios"], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor(case["advantages"], dtype=torch.float64)
    loss, masked = dis_loss(-log_probs, advantages, LOW, HIGH)
    (gradients,) = torch.autograd.grad(loss.sum(), log_probs)
    assert gradients.tolist() == pytest.approx(case["gradients"], abs=1e-12)
    assert masked.bool().tolist() == case["masked"]


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
    ratios = torch.tensor([0.1, 0.1, 0.1, 1.0, 9.0, 9.0, 1.0, 1.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])
    metrics = finish_dis(dis_metrics(-ratios.log(), advantages, LOW, HIGH, torch.mean))
    masked = {
        "low_positive": 2 / 8,
        "low_negative": 1 / 8,
        "high_positive": 1 / 8,
        "high_negative": 1 / 8,
    }
    assert {side: metrics[f"dis_masked_{side}"] for side in masked} == masked
    assert metrics["dis_ess"] == pytest.approx((ratios.sum() ** 2 / (8 * (ratios**2).sum())).item())
    assert (
        finish_dis(dis_metrics(torch.zeros(5), torch.ones(5), LOW, HIGH, torch.mean))["dis_ess"]
        == 1.0
    )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_any_split_into_micro_batches_and_ranks_gives_the_same_metrics(
    seed: int, per_token: bool
) -> None:
    """slime adds up what the micro-batches of all ranks report, then divides by the number of
    samples or tokens."""
    rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    samples, count = [], 0.0
    for _ in range(rng.randint(1, 8)):
        n = rng.randint(1, 6)
        kl, advantages = torch.randn(2, n, generator=numbers, dtype=torch.float64)
        mask = torch.randint(0, 2, (n,), generator=numbers).double()
        weights = mask if per_token else mask / mask.sum().clamp_min(1)
        count += float(mask.sum()) if per_token else 1.0
        samples.append((kl, advantages, torch.randint(-1, 4, (n,), generator=numbers), weights))

    def metrics_of(batches: Sequence[Sequence[Any]]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for batch in filter(None, batches):
            kl, advantages, stale, weights = map(torch.cat, zip(*batch, strict=True))
            total.update(
                dis_metrics(kl, advantages, LOW, HIGH, lambda x, w=weights: (x * w).sum(), stale)
            )
        return finish_dis({name: float(value) / max(count, 1) for name, value in total.items()})

    homes = [rng.randrange(4) for _ in samples]
    split = [
        [sample for sample, home in zip(samples, homes, strict=True) if home == k] for k in range(4)
    ]
    assert metrics_of(split) == pytest.approx(metrics_of([samples]), rel=1e-9)


def test_metrics_by_staleness_are_those_of_each_staleness_alone() -> None:
    """Turns two or more updates old share one bucket."""
    torch.manual_seed(0)
    kl, stale, ones = torch.randn(300) * 0.5, torch.randint(-1, 4, (300,)).float(), torch.ones(300)
    stale[stale == 1] = 0
    found = finish_dis(dis_metrics(kl, ones, LOW, HIGH, torch.mean, stale))
    for age, here in ((0, stale == 0), (2, stale >= 2)):
        alone = finish_dis(dis_metrics(kl[here], ones[here], LOW, HIGH, torch.mean))
        masked = sum(share for name, share in alone.items() if name.startswith("dis_masked_"))
        assert found[f"dis_stale{age}_share"] == pytest.approx(here.float().mean().item())
        assert found[f"dis_stale{age}_masked"] == pytest.approx(float(masked), rel=1e-5)
        assert found[f"dis_stale{age}_ratio"] == pytest.approx(
            (-kl[here]).exp().mean().item(), rel=1e-5
        )
        assert found[f"dis_stale{age}_ess"] == pytest.approx(float(alone["dis_ess"]), rel=1e-5)
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
