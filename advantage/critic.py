"""Measures the critic: a trend at the end of its warm-up, and its progress in value pretraining.

The warm-up's losses are tested for a trend with the Mann-Kendall rank test, which assumes only that the noise of single
batches is independent. In value pretraining, explained variance is 1 - Var(return - value) / Var(return) over the
trained tokens of held-out turns; returns have lambda 1, so they hardly depend on the critic.
"""

import itertools
import logging
import math
import statistics
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from advantage.errors import PretrainingError
from advantage.flags import advantage_flags
from advantage.ranks import Group
from advantage.settings import PerRun, ValuePretrainingSettings, advantage_settings
from advantage.turn_table import TurnColumns, to_list

logger = logging.getLogger(__name__)

warmup_losses: PerRun[list[float]] = PerRun(list)
"""The critic's loss before each update of its warm-up, per run."""
SIGNIFICANCE = 0.05
"""Share of settled critics that cause a warning by chance."""
MIN_UPDATES = 16
"""Updates that are needed to tell a trend from noise."""


@dataclass(frozen=True)
class Trend:
    """The trend over the second half of a warm-up."""

    change: float
    """Relative change of the loss over the half, from the median slope of its logarithm."""
    chance: float
    """Two-sided p-value."""


def find_trend(losses: Sequence[float]) -> Trend | None:
    """Test the second half of `losses` for a trend; None if there are fewer than 16."""
    if len(losses) < MIN_UPDATES:
        return None
    logs = [math.log(max(loss, 1e-12)) for loss in losses[-(len(losses) // 2) :]]
    n = len(logs)
    slopes = [(logs[j] - logs[i]) / (j - i) for i, j in itertools.combinations(range(n), 2)]
    rises = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    chance = math.erfc(max(abs(rises) - 1, 0) / deviation / math.sqrt(2))
    return Trend(math.expm1(statistics.median(slopes) * (n - 1)), chance)


def watch_warmup(
    args: Any, rollout_data: Mapping[str, Any], values: Tensor, returns: Tensor, mask: Tensor, group: Group
) -> Trend | None:
    """Record the loss of one batch of the critic's warm-up; after the last one, log and return whether it has a trend.

    `values`, `returns` and `mask` are flat, with one entry per response token; every rank of `group`, which is data
    parallelism, must call this.
    """
    flags = advantage_flags(args)
    updates, start = flags.num_critic_only_steps or 0, flags.start_rollout_id
    role = flags.slime_verlog_role
    is_actors = role == "actor" if role else "log_probs" in rollout_data or flags.use_rollout_logprobs
    if not updates or start is None or is_actors:
        return None
    losses = warmup_losses.of(args)
    if start + len(losses) >= updates:
        return None
    error = ((returns - values) ** 2 * mask).sum()
    sums = torch.stack([error, mask.sum().to(error)]).double()
    total, count = (float(x) for x in group.total(sums, like=values))
    losses.append(total / max(count, 1.0))
    if start + len(losses) < updates:
        return None
    return _report(losses, advantage_settings(args).critic_warmup.tolerance)


def _report(losses: Sequence[float], tolerance: float) -> Trend | None:
    trend = find_trend(losses)
    if trend is None:
        logger.info(
            "the critic's warm-up had %d updates since the start; at least %d are needed to tell a trend in its loss "
            "from noise",
            *(len(losses), MIN_UPDATES),
        )
    elif trend.chance <= SIGNIFICANCE and abs(trend.change) > tolerance:
        logger.warning(
            "the critic had not converged when its warm-up of %d updates ended: its loss moved by %+.0f %% over the "
            "second half (now %.4g; p = %.2g; critic_warmup.tolerance is %.0f %%); lengthen critic_warmup and "
            "--num-critic-only-steps, or change the critic's learning rate",
            *(len(losses), 100 * trend.change, losses[-1], trend.chance, 100 * tolerance),
        )
    else:
        logger.info(
            "no trend beyond critic_warmup.tolerance was found in the critic's loss over the second half of its "
            "warm-up: %+.0f %% (p = %.2g)",
            *(100 * trend.change, trend.chance),
        )
    return trend


MIN_GAIN = 1e-3
"""A pass is a new best only if it explains at least this much more."""


class Progress:
    """The passes of one run so far."""

    def __init__(self) -> None:
        self.explained: list[float] = []
        """Held-out explained variance before the first pass, after it, after the second, ..."""
        self.best = 0
        """Number of passes after which it was highest."""
        self._held_out: list[bool] = []
        """For each sample of this rank, whether its turns are held out."""
        self._moments: Tensor | None = None
        self._weights: list[Tensor] = []

    def measure(
        self, columns: TurnColumns, lengths: Sequence[int], values: Tensor, returns: Tensor, mask: Tensor, data: Group
    ) -> None:
        """Take in the values of the held-out tokens; every data-parallel rank must call this.

        `lengths` are the response tokens of each sample; `values`, `returns` and `mask` are flat, one entry per token.
        """
        held_out = torch.zeros(len(lengths), dtype=torch.bool).index_fill_(0, columns.sample[columns.held_out], True)
        tokens = held_out.repeat_interleave(torch.tensor(lengths, dtype=torch.long)).to(mask.device) & mask
        v, r = (x[tokens].double() for x in (values, returns))
        sums = torch.stack([r.new_tensor(len(r)), (r - v).sum(), ((r - v) ** 2).sum(), r.sum(), (r**2).sum()])
        self._held_out, self._moments = [bool(h) for h in to_list(held_out)], data.total(sums, like=values)

    def begin_pass(self, settings: ValuePretrainingSettings, models: Sequence[torch.nn.Module], stages: Group) -> bool:
        """Record what was measured; returns whether another pass is due. A new best keeps a copy of the weights.

        `models` are the critic's parts on this rank. Every pipeline stage must call this; only the last has measured.
        """
        mine = torch.zeros(5, dtype=torch.float64) if self._moments is None else self._moments
        moments = mine.to(stages.device_like(None))
        stages.all_reduce(moments)
        self._moments = None
        count, error, errors, total, totals = to_list(moments)
        assert count, "no rank has held-out tokens"
        variance = totals / count - (total / count) ** 2
        self.explained.append(1 - (errors / count - (error / count) ** 2) / max(variance, 1e-8))
        passes = len(self.explained) - 1
        logger.info("value pretraining: after %d passes, held-out explained variance %.4f", passes, self.explained[-1])
        if passes == 0 or self.explained[-1] >= self.explained[self.best] + MIN_GAIN:
            self.best = passes
            self._weights = [tensor.detach().cpu().clone() for tensor in _tensors(models)]
        return not self.has_converged(settings) and passes < settings.passes

    @contextmanager
    def held_out_hidden(self, rollout_data: MutableMapping[str, Any]) -> Generator[None]:
        """Set the loss masks of held-out turns to 0 inside this context."""
        masks: list[Tensor] = rollout_data["loss_masks"]
        hidden = self._held_out or [False] * len(masks)  # a pipeline stage without values has no loss to mask
        rollout_data["loss_masks"] = [torch.zeros_like(m) if h else m for m, h in zip(masks, hidden, strict=True)]
        try:
            yield
        finally:
            rollout_data["loss_masks"] = masks

    def has_converged(self, settings: ValuePretrainingSettings) -> bool:
        """Tell whether the last `patience` passes brought no new best."""
        return len(self.explained) - 1 - self.best >= settings.patience

    @torch.no_grad()
    def finish(self, settings: ValuePretrainingSettings, models: Sequence[torch.nn.Module]) -> None:
        """Give the critic the weights of the best pass; raises PretrainingError if that explains too little."""
        for tensor, kept in zip(_tensors(models), self._weights, strict=True):
            tensor.copy_(kept)
        self._weights = []
        best, least = self.explained[self.best], settings.least_explained_variance
        if least is not None and not best > least:
            raise PretrainingError(
                f"after {len(self.explained) - 1} passes, the critic's best held-out explained variance is {best:.4f}, "
                f"not above value_pretraining.least_explained_variance {least:g}, so its values would mislead PPO: "
                "collect more batches, or change the critic's learning rate"
            )
        if not self.has_converged(settings):
            logger.warning(
                "held-out explained variance was still rising after the last pass; raise value_pretraining.passes (%d)",
                settings.passes,
            )
        logger.info(
            "value pretraining ends: held-out explained variance %.4f after %d of %d passes, whose weights are kept",
            *(best, self.best, len(self.explained) - 1),
        )


progress_of: PerRun[Progress] = PerRun(Progress)


def _tensors(models: Sequence[torch.nn.Module]) -> list[Tensor]:
    # Megatron's DDP has a list named `buffers`, hence the class's method.
    return [x for model in models for x in (*model.parameters(), *torch.nn.Module.buffers(model))]
