"""Writes down what Megatron really trained on: one file a role, rollout and rank under
`$SLIME_CPU_WORK/record`.

Each holds the rank's whole rollout data as it stood when training began, and per micro-batch what
reached the loss: the weight of every response token in the reducer, and the size of the gradient at
every logit position. `cpu_s` is the process's CPU time so far, `peak_kib` its peak memory.
"""

import functools
import importlib
import os
import resource
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_batches: list[dict[str, Any]] = []


def record_training(actor: ModuleType) -> None:
    """Wrap the `train` that slime's actor module calls, and the two loss functions under it."""
    train = actor.train
    losses = importlib.import_module("slime.backends.megatron_utils.loss")
    for name in ("policy_loss_function", "value_loss_function"):
        setattr(losses, name, _recorded_loss(getattr(losses, name)))

    def recorded_train(rollout_id: int, *args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        role = "critic" if get_args().loss_type == "value_loss" else "actor"
        data = _copy(args[3][0].rollout_data)
        _batches.clear()
        result = train(rollout_id, *args, **kwargs)
        folder = Path(os.environ["SLIME_CPU_WORK"]) / "record"
        folder.mkdir(exist_ok=True)
        rank = torch.distributed.get_rank()
        temporary = folder / f"{role}-{rollout_id}-{rank}-{os.getpid()}.tmp"
        spent = {
            "cpu_s": time.process_time(),
            "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
        torch.save({"data": data, "batches": list(_batches), **spent}, temporary)
        temporary.rename(folder / f"{role}-{rollout_id}-{rank}.pt")
        return result

    actor.train = recorded_train


def _recorded_loss(loss: Any) -> Any:
    @functools.wraps(loss)
    def recorded(args: Any, batch: Any, logits: torch.Tensor, reduce: Any) -> Any:
        entry: dict[str, Any] = {
            "tokens": _copy(batch["unconcat_tokens"]),
            "response_lengths": list(batch["response_lengths"]),
            "weights": _copy(_weights(reduce, sum(batch["response_lengths"]), logits.device)),
        }
        _batches.append(entry)
        if logits.requires_grad:
            logits.register_hook(
                lambda gradient: entry.update(gradient=_copy(gradient.abs().sum(-1).flatten()))
            )
        return loss(args, batch, logits, reduce)

    return recorded


def _weights(reduce: Any, count: int, device: torch.device) -> torch.Tensor:
    """What the reducer multiplies each response token of the micro-batch with; it is linear."""
    with torch.enable_grad():
        ones = torch.ones(count, requires_grad=True, device=device)
        reduce(ones).backward()
    return torch.zeros(count) if ones.grad is None else ones.grad


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value
