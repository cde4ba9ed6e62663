"""The values that a trained critic gives to recorded states, for `slime-verlog branch --critic`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from advantage.hl_gauss import hl_gauss_of
from advantage.saved_critic import HEAD_KEYS
from advantage.settings import AdvantageSettings
from embedded.trainer import megatron
from embedded.trainer.checkpoint import (
    check_tokenizer,
    critic_record,
    is_checkpoint,
    load_critic,
)
from slime_verlog import ConfigError, read_settings

AT_ONCE = 64
"""Prompts in one forward pass."""


@torch.no_grad()
def values_of(prompts: Sequence[Sequence[int]], checkpoints: Path, policy: Path) -> list[float]:
    """Return the critic's value of each prompt, given as token ids.

    Args:
        checkpoints: the folder in which a run on one machine saved its critic.
        policy: a model of that run as Hugging Face folder, which tells the critic's shape.

    Raises:
        ConfigError: the folder has no checkpoint, or its critic was trained with another tokenizer.
        CheckpointError: its critic cannot be read, or is of another shape.
    """
    if not is_checkpoint(checkpoints):
        raise ConfigError(
            f"--critic {checkpoints} holds no checkpoint; give OUT/critic_after of slime-verlog "
            "train, or OUT/checkpoints while that runs"
        )
    check_tokenizer(checkpoints, policy)
    record = critic_record(checkpoints)
    head = {key: record[key] for key in HEAD_KEYS if key in record}
    bins = hl_gauss_of(read_settings(AdvantageSettings, head))
    device = megatron.initialize()
    critic = megatron.build_model(policy, device, critic=True, bins=bins)
    load_critic(checkpoints, critic)
    values: list[float] = []
    for start in range(0, len(prompts), AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        rows = [torch.tensor(prompt, device=device) for prompt in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        row = torch.arange(len(some), device=device)
        last = torch.tensor([len(prompt) - 1 for prompt in some], device=device)
        outputs = megatron.predict(critic, ids, row, last)
        found = outputs[:, 0] if bins is None else bins.expectation(outputs)
        values += found.tolist()
    return values
