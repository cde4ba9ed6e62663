"""From the converter's train data to tensors and micro-batches, with slime's keys and slime's optimizer steps.

Invariants: all samples of a training group are in the same optimizer step; a step holds exactly `global_batch_size`
groups; a sample without trainable tokens is never in a training micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.errors import ConfigError

RolloutData = dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples, right-padded. Outputs at positions (row, column) predict the response tokens."""

    samples: tuple[int, ...]
    """Indices of the samples in the batch."""
    ids: torch.Tensor
    """[samples, longest] token ids."""
    row: torch.Tensor
    """[n] row of each response token's predecessor."""
    column: torch.Tensor
    """[n] column of each response token's predecessor."""
    targets: torch.Tensor
    """[n] response tokens."""
    lengths: tuple[int, ...]
    """Response tokens per sample; they add up to n."""

    def gather(self, per_sample: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flatten a list of response-aligned tensors, one per sample, to this micro-batch's [n] tokens."""
        return torch.cat([per_sample[i] for i in self.samples])


def to_rollout_data(train_data: dict[str, Any], device: torch.device) -> RolloutData:
    """Convert to what a rank gets in slime, tensors per sample; raises ConfigError if keys are missing."""
    needed = ["tokens", "response_lengths", "loss_masks", "rewards", "rollout_ids", "rollout_mask_sums"]
    missing = [key for key in needed if key not in train_data]
    if missing:
        raise ConfigError(f"the train data lacks {', '.join(missing)}; use the converter of rollout.samples")
    data = dict(train_data)
    dtypes = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}
    for key in dtypes.keys() & train_data.keys():
        data[key] = [torch.tensor(values, dtype=dtypes[key], device=device) for values in train_data[key]]
    data["total_lengths"] = [len(t) for t in train_data["tokens"]]
    data["partition"] = list(range(len(data["tokens"])))
    return data


def optimizer_steps(rollout_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Split samples into steps of `global_batch_size` groups, in order; raises ConfigError if groups are left over."""
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(rollout_ids):
        groups.setdefault(group, []).append(sample)
    if not groups or len(groups) % global_batch_size:
        unfilled = f"{len(groups)} training groups do not fill steps of --global-batch-size {global_batch_size}"
        raise ConfigError(f"{unfilled}; choose a divisor of {len(groups)}")
    members = list(groups.values())
    starts = range(0, len(members), global_batch_size)
    return [[sample for group in members[start : start + global_batch_size] for sample in group] for start in starts]


def micro_batches(data: RolloutData, samples: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Split samples into right-padded micro-batches of at most `max_tokens` tokens, padding included.

    Samples of similar length share a micro-batch. A sample longer than `max_tokens` has its own.
    """
    lengths = data["total_lengths"]
    batches: list[list[int]] = []
    for sample in sorted(samples, key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[sample] <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return [_micro_batch(data, batch) for batch in batches]


def _micro_batch(data: RolloutData, samples: list[int]) -> MicroBatch:
    tokens = [data["tokens"][i] for i in samples]
    lengths = [data["response_lengths"][i] for i in samples]
    device = tokens[0].device
    row = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    column = torch.cat([torch.arange(len(t) - n - 1, len(t) - 1) for t, n in zip(tokens, lengths, strict=True)])
    return MicroBatch(
        samples=tuple(samples),
        ids=torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        row=row.to(device),
        column=column.to(device),
        targets=torch.cat([t[len(t) - n :] for t, n in zip(tokens, lengths, strict=True)]),
        lengths=tuple(lengths),
    )
