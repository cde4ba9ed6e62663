"""A critic's classification head: a histogram over returns, trained by cross-entropy (HL-Gauss),
whose mean is V.

The bins' centres z_i are w apart and reach 2.5 bins beyond the range of returns on both sides. With
s bins of sigma, the target of a return y, clamped to the range, is the share of a normal
distribution around y that falls into each bin:

    t_i = (Phi((z_i + w/2 - y) / (s w)) - Phi((z_i - w/2 - y) / (s w))) / sum over bins
    L   = -sum_i t_i log p_i,   dL/dlogit_i = p_i - t_i,   V = sum_i p_i z_i

Source: Farebrother et al. 2024 (arXiv 2403.03950), section 3.1. There, the range is that of the
bins; here it is that of the returns, and the bins are padded, because the target of a return at the
edge of the bins has its mean 0.4 bins inside. slime's patch and the trainer of one machine both use
this file.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from advantage.settings import AdvantageSettings

SLACK = 1e-3
"""Bins by which a return may be outside the range without being marked, as a new head's 0 is."""
PADDING = 2.5
"""Bins between each end of the range and the centre of the last bin beyond it."""


@dataclass(frozen=True)
class HlGauss:
    """The bins of a histogram over returns."""

    low: float
    """The smallest return; the target of a smaller one is that of this one."""
    high: float
    """The largest return."""
    bins: int
    sigma: float
    """Standard deviation of the targets, in bins."""

    @property
    def width(self) -> float:
        """Distance between two centres, in units of the return."""
        return (self.high - self.low) / (self.bins - 1 - 2 * PADDING)

    def centres(self, like: Tensor) -> Tensor:
        """The returns that the bins stand for, [bins], on the device and in the dtype of `like`."""
        steps = torch.arange(self.bins, dtype=torch.float64)
        return (self.low + (steps - PADDING) * self.width).to(like)

    def targets(self, returns: Tensor) -> Tensor:
        """Spread each return over the bins; [..., bins], which sum to 1, from [...]."""
        clamped = returns.clamp(self.low, self.high)[..., None]
        centres = self.centres(returns)
        edges = torch.cat([centres - self.width / 2, centres[-1:] + self.width / 2])
        deviations = (edges - clamped) / (self.sigma * self.width)
        below = torch.erf(deviations / math.sqrt(2.0)) / 2  # the normal distribution, less 1/2
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])

    def loss(self, logits: Tensor, returns: Tensor) -> Tensor:
        """Cross-entropy in nats, [...], of logits [..., bins] and returns [...]."""
        targets = self.targets(returns.to(logits.dtype))
        return -(targets * torch.log_softmax(logits, -1)).sum(-1)

    def expectation(self, logits: Tensor) -> Tensor:
        """The values V, [...], of logits [..., bins]."""
        return (torch.softmax(logits, -1) * self.centres(logits)).sum(-1)

    def outside(self, returns: Tensor) -> Tensor:
        """Mark the returns that the targets clamp, bool [...]; rounding does not count."""
        slack = SLACK * self.width
        return (returns < self.low - slack) | (returns > self.high + slack)

    def start_bias(self) -> Tensor:
        """Logits [bins], float64, whose value is 0, or the end of the range that is nearest to 0.

        Equal logits would have the middle of the range as value, from which cut episodes are
        bootstrapped. These are k z_i, where k is found by bisection.
        """
        start = min(max(0.0, self.low), self.high)
        steps = (self.centres(torch.zeros(1, dtype=torch.float64)) - start) / self.width
        least = -8.0
        most = 8.0
        for _ in range(80):
            middle = (least + most) / 2
            if (torch.softmax(middle * steps, -1) * steps).sum() < 0:
                least = middle
            else:
                most = middle
        return least * steps


def hl_gauss_of(settings: AdvantageSettings) -> HlGauss | None:
    """Return the head that the settings ask for; None: one output, trained by squared error."""
    if settings.value_loss == "mse" or settings.value_range is None:
        return None
    low, high = settings.value_range
    return HlGauss(low, high, settings.value_bins, settings.value_sigma)


def describe_head(head: HlGauss | None) -> str:
    """The head as the YAML has it."""
    if head is None:
        return "value_loss: mse"
    ends = f"[{head.low:g}, {head.high:g}]"
    return f"value_loss: hl_gauss, value_bins: {head.bins}, value_range: {ends}, value_sigma: {head.sigma:g}"
