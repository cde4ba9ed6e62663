"""From the converter's train data to tensors and micro-batches, under slime's keys and its step rule.

Invariants: all samples of one training group are in one optimizer step; a step holds exactly `global_batch_size`
groups; a sample without trainable tokens is never in a training micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.bridge.framework import train_data_keys
from rollout.errors import ConfigError

RolloutData = dict[str, Any]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples, right-padded; positions (row, column) are those whose outputs predict the response tokens."""

    samples: tuple[int, ...]
    ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]
    """Response tokens a sample."""

    def gather(self, per_sample: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flatten a per-sample list of response-aligned tensors to this micro-batch's tokens."""
        return torch.cat([per_sample[i] for i in self.samples])


def to_rollout_data(train_data: dict[str, Any], device: torch.device) -> RolloutData:
    """What one rank gets in slime: token ids, masks and log-probs as tensors; all lists stay per sample.

    Raises:
        ConfigError: the data lacks the keys that every converter gives.
    """
    groups, sums = train_data_keys() or ("sample_indices", None)
    needed = ["tokens", "response_lengths", "loss_masks", "rewards", groups, *([sums] if sums else [])]
    missing = [key for key in needed if key not in train_data]
    if missing:
        raise ConfigError(f"the train data lacks {', '.join(missing)}; use the converter of rollout.samples")
    data = dict(train_data)
    data["tokens"] = [torch.tensor(t, dtype=torch.long, device=device) for t in train_data["tokens"]]
    data["loss_masks"] = [torch.tensor(m, dtype=torch.int, device=device) for m in train_data["loss_masks"]]
    if "rollout_log_probs" in train_data:
        data["rollout_log_probs"] = [
            torch.tensor(p, dtype=torch.float32, device=device) for p in train_data["rollout_log_probs"]
        ]
    data["total_lengths"] = [len(t) for t in train_data["tokens"]]
    data["rollout_ids"] = list(train_data[groups])
    data["rollout_mask_sums"] = list(train_data[sums]) if sums else [max(sum(m), 1) for m in train_data["loss_masks"]]
    data["partition"] = list(range(len(data["tokens"])))
    return data


def optimizer_steps(rollout_ids: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Samples of each optimizer step, `global_batch_size` training groups a step, in order of appearance.

    Raises:
        ConfigError: the groups do not fill whole steps; slime would drop the rest in silence.
    """
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(rollout_ids):
        groups.setdefault(group, []).append(sample)
    if not groups or len(groups) % global_batch_size:
        raise ConfigError(
            f"{len(groups)} training groups do not fill steps of --global-batch-size {global_batch_size}; "
            "make it a divisor of the batch"
        )
    members = list(groups.values())
    return [
        [sample for group in members[start : start + global_batch_size] for sample in group]
        for start in range(0, len(members), global_batch_size)
    ]


def micro_batches(data: RolloutData, samples: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Split samples into right-padded micro-batches of at most `max_tokens` tokens, padding included.

    Samples of like length go together; a single sample that is longer gets a micro-batch of its own.
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
