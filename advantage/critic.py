"""Measures the critic's progress in value pretraining.

Explained variance is 1 - Var(return - value) / Var(return) over the trained tokens of held-out turns; returns have
lambda 1, so they hardly depend on the critic.
"""

import logging
from collections.abc import Generator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from advantage.errors import PretrainingError
from advantage.ranks import Group
from advantage.settings import PerRun, ValuePretrainingSettings
from advantage.turn_table import TurnColumns, to_list

logger = logging.getLogger(__name__)

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
