"""From the converter's train data to tensors and micro-batches, with slime's keys and slime's
optimizer steps.

Invariants: all samples of a training group are in the same optimizer step; a step holds exactly
`global_batch_size` groups; a sample without trainable tokens is never in a training micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError

RolloutData = dict[str, Any]
NEEDED = ("tokens", "response_lengths", "loss_masks", "rewards", "rollout_ids", "rollout_mask_sums")


@dataclass(frozen=True)
class MicroBatch:
    """Some samples, right-padded. Outputs at positions (row, column) predict the response
    tokens."""

    samples: tuple[int, ...]
    """Indices of the samples in the batch."""
    ids: Tensor
    """[samples, longest] token ids."""
    row: Tensor
    """[n] row of each response token's predecessor."""
    column: Tensor
    """[n] column of each response token's predecessor."""
    targets: Tensor
    """[n] response tokens."""
    lengths: tuple[int, ...]
    """Response tokens per sample; they add up to n."""

    def gather(self, per_sample: Sequence[Tensor]) -> Tensor:
        """Flatten a list of response-aligned tensors, one per sample, to this micro-batch's [n]
        tokens."""
        return torch.cat([per_sample[i] for i in self.samples])


def to_rollout_data(train_data: dict[str, Any], device: torch.device) -> RolloutData:
    """Convert to what a rank gets in slime, tensors per sample; raises ConfigError if keys are
    missing."""
    missing = [key for key in NEEDED if key not in train_data]
    if missing:
        raise ConfigError(
            f"the train data lacks {', '.join(missing)}; use the converter of rollout.samples"
        )
    data = dict(train_data)
    dtypes = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}
    for key in dtypes.keys() & train_data.keys():
        data[key] = [
            torch.tensor(values, dtype=dtypes[key], device=device) for values in train_data[key]
        ]
    data["total_lengths"] = [len(t) for t in train_data["tokens"]]
    data["partition"] = list(range(len(data["tokens"])))
    return data


def optimizer_steps(rollout_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Split samples into steps of `global_batch_size` groups, in order; raises ConfigError if
    groups are left over."""
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(rollout_ids):
        groups.setdefault(group, []).append(sample)
    if not groups or len(groups) % global_batch_size:
        unfilled = f"{len(groups)} training groups do not fill steps of --global-batch-size {global_batch_size}"
        raise ConfigError(f"{unfilled}; choose a divisor of {len(groups)}")
    steps = []
    members = list(groups.values())
    for start in range(0, len(members), global_batch_size):
        of_step = members[start : start + global_batch_size]
        steps.append([sample for group in of_step for sample in group])
    return steps


def micro_batches(data: RolloutData, samples: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Split samples into right-padded micro-batches of at most `max_tokens` tokens, padding
    included.

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
    rows = []
    columns = []
    targets = []
    for row, (i, ids) in enumerate(zip(samples, tokens, strict=True)):
        start = len(ids) - data["response_lengths"][i]
        end = len(ids)
        rows.append(torch.full((end - start,), row))
        columns.append(torch.arange(start - 1, end - 1))
        targets.append(ids[start:])
    device = tokens[0].device
    return MicroBatch(
        samples=tuple(samples),
        ids=torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        row=torch.cat(rows).to(device),
        column=torch.cat(columns).to(device),
        targets=torch.cat(targets),
        lengths=tuple(map(len, targets)),
    )
