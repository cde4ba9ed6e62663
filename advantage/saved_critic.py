"""What a checkpoint says about its critic: the head, and after value pretraining the objective, the
data and the score.

A record is a plain dictionary, saved with the weights: in slime as an attribute of the saved
`args`, on one machine in `state.json`. A head that differs is an error, because slime would only
warn and replace the trained head by a new one, and with equal widths it would not even notice.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from advantage.exchange import Layout
from advantage.hl_gauss import describe_head, hl_gauss_of
from advantage.settings import AdvantageSettings
from advantage.turn_table import TABLE_KEY
from slime_verlog import ConfigError, read_settings

logger = logging.getLogger(__name__)

RECORD = "slime_verlog_critic"
"""Attribute of `args` with the record of the critic that this process trains."""
HEAD_KEYS = ("value_loss", "value_bins", "value_range", "value_sigma")
OBJECTIVE_KEYS = ("gamma_step", "gamma_token")
"""Keys of the YAML that say which returns value pretraining learns; its lambdas are 1."""

Record = Mapping[str, Any]


def head_record(settings: AdvantageSettings) -> dict[str, Any]:
    """The head's keys of the YAML."""
    if hl_gauss_of(settings) is None:
        return {"value_loss": "mse"}
    return {
        **{key: getattr(settings, key) for key in HEAD_KEYS},
        "value_range": list(settings.value_range or ()),
    }


def pretrained_record(
    settings: AdvantageSettings,
    explained: Sequence[float],
    best: int,
    data: Mapping[str, Any],
    layout: Layout,
) -> dict[str, Any]:
    """The record after value pretraining; every rank must call this.

    Args:
        explained: held-out explained variance before the first pass and after each.
        best: the pass whose weights are kept.
        data: this rank's rollout data, with the turn table.
    """
    objective = {key: getattr(settings, key) for key in OBJECTIVE_KEYS}
    score = {"explained_variance": explained[best], "passes": best}
    return {**head_record(settings), **objective, **score, "data": fingerprint(data, layout)}


def fingerprint(data: Mapping[str, Any], layout: Layout) -> str:
    """Hash the tokens and turns of all ranks, in any order, to 16 hexadecimal digits; every rank
    must call this."""
    total = torch.zeros(1, dtype=torch.int64)
    for tokens, row in zip(data["tokens"], data[TABLE_KEY], strict=True):
        content = (
            torch.as_tensor(tokens, dtype=torch.int64).cpu().numpy().tobytes() + repr(row).encode()
        )
        total += int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")
    whole = layout.data.total(total, like=torch.zeros(0))
    return f"{int(whole) % 2**64:016x}"


def keys_taken_over(settings: AdvantageSettings, record: Record, place: str) -> dict[str, Any]:
    """Check a saved critic, and return the keys of its head unless the YAML has them.

    Args:
        settings: those of this run.
        record: that of the critic in the folder `place`.

    Raises:
        ConfigError: the YAML asks for another head; or value pretraining learned other returns, or
            did not explain more than `value_pretraining.least_explained_variance` of them.
    """
    saved = {
        key: tuple(value) if key == "value_range" else value
        for key, value in record.items()
        if key in HEAD_KEYS
    }
    theirs = hl_gauss_of(read_settings(AdvantageSettings, saved))
    ours = hl_gauss_of(settings)
    silent = "value_loss" not in settings.model_fields_set
    if theirs != ours and not silent:
        raise ConfigError(
            f"the critic in {place} has the head {describe_head(theirs)}, and the YAML asks for "
            f"{describe_head(ours)}, which would start untrained: give the same keys, leave them "
            "out to take the saved ones, or start the critic from another checkpoint"
        )
    differing = [
        key
        for key in OBJECTIVE_KEYS
        if record.get(key, getattr(settings, key)) != getattr(settings, key)
    ]
    if differing:
        key = differing[0]
        raise ConfigError(
            f"the critic in {place} was pretrained on returns with {key} {record[key]:g}, and this "
            f"run has {getattr(settings, key):g}; give the same, or pretrain it again"
        )
    _check_score(settings, record, place)
    return saved if silent and theirs is not None else {}


def _check_score(settings: AdvantageSettings, record: Record, place: str) -> None:
    score = record.get("explained_variance")
    pretraining = settings.value_pretraining
    if score is None or pretraining.batches:
        return
    if not pretraining.accepts(score):
        limit = pretraining.least_explained_variance or 0.0
        raise ConfigError(
            f"the critic in {place} explains {score:.4f} of the variance of held-out returns, not "
            f"above value_pretraining.least_explained_variance {limit:g}, so its values would "
            "mislead PPO: pretrain it on more batches, with another learning rate or head "
            "(value_loss), use critic_warmup instead, or set the key to null"
        )
    logger.info(
        "the critic in %s explains %.4f of the variance of held-out returns (data %s)",
        place,
        score,
        record.get("data"),
    )
