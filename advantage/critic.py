"""Measures the critic's progress in value pretraining.

Explained variance is 1 - Var(return - value) / Var(return) over the trained tokens of held-out
turns; returns have lambda 1, so they hardly depend on the critic.
"""

import logging
from collections.abc import Generator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from advantage.errors import PretrainingError
from advantage.exchange import Layout, relayed
from advantage.packing import local_tokens
from advantage.settings import ValuePretrainingSettings
from advantage.turn_table import read_turn_table, to_list, whole_numbers
from advantage.values import explained_share

logger = logging.getLogger(__name__)

Data = MutableMapping[str, Any]
Models = Sequence[torch.nn.Module]
"""The critic's parts on one rank."""

MIN_GAIN = 1e-3
"""A pass is a new best only if it explains at least this much more."""


class Progress:
    """The passes of value pretraining so far."""

    def __init__(self) -> None:
        self.explained: list[float] = []
        """Held-out explained variance before the first pass, after it, after the second, ..."""
        self.best = 0
        """Number of passes after which it was highest."""
        self._held_out: list[bool] = []
        """For each sample of this rank, whether its turns are held out."""
        self._weights: list[Tensor] = []

    def begin_pass(
        self, settings: ValuePretrainingSettings, data: Data, models: Models, layout: Layout
    ) -> bool:
        """Measure the critic; returns whether another pass is due. A new best keeps a copy of the
        weights.

        Every rank must call this; only the last pipeline stage has values and returns in slime's
        rollout data.
        """
        mine = (
            self._measure(data, layout)
            if layout.last_stage
            else torch.zeros(5, dtype=torch.float64)
        )
        moments = mine.to(layout.pipeline.device_like(None))
        layout.pipeline.all_reduce(moments)
        count, error, errors, total, totals = to_list(moments)
        assert count, "no rank has held-out tokens"
        variance = totals / count - (total / count) ** 2
        unexplained = errors / count - (error / count) ** 2
        self.explained.append(explained_share(variance, unexplained))
        passes = len(self.explained) - 1
        explained = self.explained[-1]
        logger.info(
            "value pretraining: after %d passes, held-out explained variance %.4f",
            passes,
            explained,
        )
        if passes == 0 or explained >= self.explained[self.best] + MIN_GAIN:
            self.best = passes
            self._weights = [tensor.detach().cpu().clone() for tensor in _tensors(models)]
        return not self.has_converged(settings) and passes < settings.passes

    def _measure(self, data: Data, layout: Layout) -> Tensor:
        """Sum up values and returns over the held-out tokens of all data- and context-parallel
        ranks, [5] float64."""
        with relayed(layout.stage):
            columns = read_turn_table(data, keep=True)
            local = local_tokens(data, layout)
            samples = torch.zeros(len(local.lengths), dtype=torch.bool)
            samples[columns.sample[columns.held_out]] = True
            self._held_out = [bool(held_out) for held_out in to_list(samples)]
            tokens = samples.repeat_interleave(whole_numbers(local.lengths))
            masks = data["loss_masks"]
            trained = torch.cat(list(masks)).bool() if masks else tokens
            measured = local.pick(tokens.to(trained.device) & trained)
            values = local.pick(local.join(data["values"]))[measured].double()
            returns = local.pick(local.join(data["returns"]))[measured].double()
            errors = returns - values
            count = returns.new_tensor(len(returns))
            squares = (errors**2).sum(), (returns**2).sum()
            sums = torch.stack([count, errors.sum(), squares[0], returns.sum(), squares[1]])
        return layout.data_context.total(sums, like=values)

    @contextmanager
    def held_out_hidden(self, data: Data) -> Generator[None]:
        """Set the loss masks of held-out turns to 0 inside this context."""
        masks: list[Tensor] = data["loss_masks"]
        # A pipeline stage without values has no loss to mask.
        hidden = self._held_out or [False] * len(masks)
        data["loss_masks"] = [
            torch.zeros_like(mask) if hide else mask
            for mask, hide in zip(masks, hidden, strict=True)
        ]
        try:
            yield
        finally:
            data["loss_masks"] = masks

    def has_converged(self, settings: ValuePretrainingSettings) -> bool:
        """Tell whether the last `patience` passes brought no new best."""
        return len(self.explained) - 1 - self.best >= settings.patience

    @torch.no_grad()
    def finish(self, settings: ValuePretrainingSettings, models: Models) -> None:
        """Give the critic the weights of the best pass; raises PretrainingError if that explains
        too little."""
        for tensor, kept in zip(_tensors(models), self._weights, strict=True):
            tensor.copy_(kept)
        self._weights = []
        best = self.explained[self.best]
        if not settings.accepts(best):
            least = settings.least_explained_variance or 0.0
            raise PretrainingError(
                f"after {len(self.explained) - 1} passes, the critic's best held-out explained "
                f"variance is {best:.4f}, not above value_pretraining.least_explained_variance "
                f"{least:g}, so its values would mislead PPO: collect more batches whose "
                "returns differ, or change the critic's learning rate"
            )
        if not self.has_converged(settings):
            logger.warning(
                "held-out explained variance was still rising after the last pass; raise "
                "value_pretraining.passes (%d)",
                settings.passes,
            )
        logger.info(
            "value pretraining ends: held-out explained variance %.4f after %d of %d passes, "
            "whose weights are kept",
            best,
            self.best,
            len(self.explained) - 1,
        )


def _tensors(models: Models) -> list[Tensor]:
    tensors: list[Tensor] = []
    for model in models:
        tensors += model.parameters()
        tensors += torch.nn.Module.buffers(model)  # Megatron's DDP has a list of that name
    return tensors
