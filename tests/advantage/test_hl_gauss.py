"""The classification head's formulas against plain loops, and the keys of the YAML that make no
sense."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from advantage.hl_gauss import HlGauss
from advantage.settings import AdvantageSettings
from slime_verlog import ConfigError, read_settings
from tests.advantage.vectors import hl_gauss_centres, hl_gauss_token


@st.composite
def heads(draw: Any) -> HlGauss:
    low = draw(st.floats(-50, 50))
    width = draw(st.floats(0.1, 100))
    return HlGauss(low, low + width, draw(st.integers(7, 101)), draw(st.floats(0.2, 2)))


@given(heads(), st.floats(-0.5, 1.5), st.integers(0, 9))
def test_targets_loss_gradient_and_value_are_those_of_the_definition(
    head: HlGauss, place: float, seed: int
) -> None:
    y = head.low + place * (head.high - head.low)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(head.bins, dtype=torch.float64, generator=generator, requires_grad=True)
    wanted = hl_gauss_token(head.low, head.high, head.bins, head.sigma, y, logits.tolist())
    returns = torch.tensor(y, dtype=torch.float64)
    # The centres of narrow bins far from 0 differ in their last digit.
    size = abs(head.low) + abs(head.high)
    close = 1e-12 + 1e-15 * size / (head.sigma * head.width)
    assert head.centres(returns).tolist() == pytest.approx(
        hl_gauss_centres(head.low, head.high, head.bins)
    )
    assert head.targets(returns).tolist() == pytest.approx(wanted["targets"], abs=close)
    loss = head.loss(logits, returns)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-9)
    assert gradient.tolist() == pytest.approx(wanted["gradient"], abs=close)
    assert head.expectation(logits).item() == pytest.approx(wanted["value"], abs=1e-9 * (1 + size))
    slack = 1e-3 * head.width
    assert bool(head.outside(returns)) == (y < head.low - slack or y > head.high + slack)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-16.0, 0.0), (0.0, 16.0), (-1.0, 20.0)])
def test_the_value_of_a_new_head_is_in_a_range_that_ends_at_0(ends: tuple[float, float]) -> None:
    head = HlGauss(*ends, 51, 0.75)
    assert not head.outside(head.expectation(head.start_bias().float()))


@pytest.mark.parametrize(
    ("sigma", "inside", "edge"), [(0.75, 1e-5, 2e-4), (0.5, 3e-3, 3e-3), (2.0, 1e-9, 0.3)]
)
def test_the_mean_of_a_target_is_the_return(sigma: float, inside: float, edge: float) -> None:
    """Biases in bins; without padding, that at the edge would be 0.37 at sigma 0.75."""
    head = HlGauss(0.0, 1.0, 51, sigma)
    middle = torch.linspace(0.4, 0.6, 41, dtype=torch.float64)
    for returns, bound in ((middle, inside), (torch.tensor([0.0, 1.0], dtype=torch.float64), edge)):
        means = (head.targets(returns) * head.centres(returns)).sum(-1)
        assert float((means - returns).abs().max() / head.width) < bound


@given(heads())
def test_the_first_value_is_zero_or_the_nearest_end_and_survives_bf16(head: HlGauss) -> None:
    wanted = min(max(0.0, head.low), head.high)
    bias = head.start_bias()
    assert head.expectation(bias).item() == pytest.approx(
        wanted, abs=1e-9 * (1 + abs(head.low) + head.high)
    )
    assert head.expectation(bias.bfloat16().float()).item() == pytest.approx(
        wanted, abs=0.05 * head.width + 1e-5
    )


def test_float32_is_enough_and_far_returns_stay_finite() -> None:
    head = HlGauss(-5.0, 20.0, 51, 0.75)
    returns = torch.tensor([-1e6, -5.0, 0.1, 20.0, 1e6])
    logits = torch.randn(5, 51, generator=torch.Generator().manual_seed(1))
    exact = head.loss(logits.double(), returns.double())
    torch.testing.assert_close(head.loss(logits, returns).double(), exact, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"value_loss": "hl_gauss", "value_range": [0, 1], "value_bins": 1},
            "value_bins must be at least 7, got 1",
        ),
        ({"value_loss": "hl_gauss"}, "value_loss: hl_gauss needs value_range"),
        ({"value_loss": "hl_gauss", "value_range": [1, 1]}, r"smallest, largest return\].*got \[1"),
        ({"value_loss": "hl_gauss", "value_range": [0, 1e308]}, r"at most 1e\+30 in size"),
        ({"value_loss": "hl_gauss", "value_range": [1]}, r"value_range must be two numbers"),
        (
            {"value_range": [0, 1]},
            "value_range belongs to value_loss: hl_gauss, and value_loss is mse",
        ),
        (
            {"value_sigma": 0.5, "value_bins": 9},
            "value_bins belongs.*leave value_bins and value_sigma out",
        ),
    ],
)
def test_a_head_that_makes_no_sense_is_refused_in_one_sentence(
    keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_settings(AdvantageSettings, keys)
