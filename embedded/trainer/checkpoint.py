"""The trainer's checkpoints: safetensors and JSON, written to a temporary folder and renamed.

A crash during a save leaves the previous checkpoint intact. Older ones are deleted: only the latest
can be loaded.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedded.run.folder import write_text
from rollout.errors import CheckpointError
from slime_verlog import ConfigError

if TYPE_CHECKING:
    from embedded.trainer.megatron import Adam

Models = Mapping[str, torch.nn.Module]
Optimizers = Mapping[str, "Adam"]
FORMAT = "slime-verlog-trainer-2"
TOKENIZER = "tokenizer"
"""Entry of a critic's record: `tokenizer_digest` of the model that it was trained with."""
_LATEST = "latest.json"


def save_trainer(
    folder: str | Path,
    rollout_id: int,
    models: Models,
    optimizers: Optimizers,
    critic: Mapping[str, Any] | None = None,
) -> Path:
    """Write models and optimizers as `folder/trainer_<rollout_id>`, point `latest.json` at it, and
    delete older ones.

    `critic` is the critic's record (`advantage/saved_critic.py`).

    Raises CheckpointError, with earlier checkpoints untouched, if the folder cannot be written.
    """
    target = Path(folder) / f"trainer_{rollout_id}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        for unfinished in Path(folder).glob(".trainer_*"):
            # Left by a save that was killed: a run's folder has one writer.
            shutil.rmtree(unfinished)
        temporary.mkdir(parents=True)
        for name, model in models.items():
            save_file(_tensors(model.state_dict()), temporary / f"{name}.safetensors")
        groups = {}
        samples = {}
        for name, optimizer in optimizers.items():
            state = optimizer.state_dict()
            groups[name] = state["param_groups"]
            samples[name] = optimizer.schedule.num_steps
            moments = {}
            for i, entry in state["state"].items():
                moments |= {f"{i}.{key}": value for key, value in entry.items()}
            save_file(_tensors(moments), temporary / f"{name}_optimizer.safetensors")
        info = {
            "format": FORMAT,
            "rollout_id": rollout_id,
            "param_groups": groups,
            "samples": samples,
        }
        info["frozen"] = {name: _frozen(model) for name, model in models.items()}
        info["critic"] = dict(critic or {})
        (temporary / "state.json").write_text(json.dumps(info), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        write_text(Path(folder) / _LATEST, json.dumps({"rollout_id": rollout_id}))
        for old in Path(folder).glob("trainer_*"):
            if old != target:
                shutil.rmtree(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write the trainer's checkpoint to {target}: {error}"
        ) from error
    return target


def is_checkpoint(folder: str | Path) -> bool:
    """Tell whether the folder holds a checkpoint of `save_trainer`."""
    return (Path(folder) / _LATEST).is_file()


def _latest(folder: str | Path) -> tuple[Path, int]:
    """The folder of the latest checkpoint, and its rollout id."""
    rollout_id = json.loads((Path(folder) / _LATEST).read_text(encoding="utf-8"))["rollout_id"]
    return Path(folder) / f"trainer_{rollout_id}", rollout_id


def saved_actor(folder: str | Path) -> dict[str, Tensor]:
    """Load the actor's weights in the latest checkpoint, under Megatron's names."""
    return load_file(_latest(folder)[0] / "actor.safetensors")


def critic_record(folder: str | Path) -> dict[str, Any]:
    """Read what the latest checkpoint says about its critic; raises CheckpointError if it is
    unusable."""
    with _reading(folder):
        path, _ = _latest(folder)
        return json.loads((path / "state.json").read_text(encoding="utf-8"))["critic"]


@contextmanager
def _reading(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"no usable trainer checkpoint in {folder}: {error}") from error


def keep_critic(folder: str | Path, target: Path) -> None:
    """Copy the critic and its record from the latest checkpoint to `target`, as a checkpoint of the
    critic alone; does nothing without a critic that was trained."""
    source, rollout_id = _latest(folder)
    if not critic_record(folder):
        return
    shutil.rmtree(target, ignore_errors=True)
    (target / source.name).mkdir(parents=True)
    for name in ("critic.safetensors", "state.json"):
        shutil.copyfile(source / name, target / source.name / name)
    write_text(target / _LATEST, json.dumps({"rollout_id": rollout_id}))


def tokenizer_digest(model: str | Path) -> str | None:
    """Hash the tokenizer of a Hugging Face folder; None without one."""
    path = Path(model) / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def check_tokenizer(folder: str | Path, model: str | Path) -> None:
    """Raise ConfigError if the checkpoint's critic reads other token ids than the model's."""
    trained = critic_record(folder).get(TOKENIZER)
    if trained is not None and trained != tokenizer_digest(model):
        raise ConfigError(
            f"the critic in {folder} was trained with another tokenizer than that of {model}, so "
            "the same token ids mean other words; give a critic and a model of the same run"
        )


def load_critic(folder: str | Path, critic: torch.nn.Module) -> None:
    """Load the critic alone, value head included, from the latest checkpoint; raises
    CheckpointError if unusable."""
    with _reading(folder):
        path = _latest(folder)[0] / "critic.safetensors"
        weights = load_file(path)
    _check_shapes(path, critic, weights)
    critic.load_state_dict(weights, strict=False)


def load_trainer(folder: str | Path, models: Models, optimizers: Optimizers) -> int:
    """Restore the latest checkpoint and return its rollout id; raises CheckpointError, nothing
    loaded, if unusable."""
    with _reading(folder):
        source, rollout_id = _latest(folder)
        info = json.loads((source / "state.json").read_text(encoding="utf-8"))
        if info["format"] != FORMAT:
            raise CheckpointError(
                f"{source} has format {info['format']!r}; this version reads {FORMAT} only"
            )
        frozen = {name: info["frozen"][name] for name in models}
        groups = {name: info["param_groups"][name] for name in optimizers}
        samples = {name: info["samples"][name] for name in optimizers}
        weights = {name: load_file(source / f"{name}.safetensors") for name in models}
        moments = {name: load_file(source / f"{name}_optimizer.safetensors") for name in optimizers}
    for name, model in models.items():
        _check_shapes(source / f"{name}.safetensors", model, weights[name])
        saved = frozen[name]
        if saved != _frozen(model):
            raise CheckpointError(
                f"{source}: the {name} was trained with {len(saved)} frozen parameters, this run "
                f"freezes {len(_frozen(model))}, and the optimizer's state fits only the former: "
                "give the same critic_frozen"
            )
    for name, model in models.items():
        model.load_state_dict(weights[name], strict=False)
    for name, optimizer in optimizers.items():
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments[name].items():
            index, entry = key.split(".")
            state.setdefault(int(index), {})[entry] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups[name]})
        optimizer.schedule.num_steps = samples[name]
        optimizer.schedule.step(0)
    return rollout_id


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Contiguous copies of a state's tensors, without Megatron's empty extra states."""
    return {k: v.detach().clone().contiguous() for k, v in state.items() if isinstance(v, Tensor)}


def _frozen(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def _check_shapes(path: Path, model: torch.nn.Module, found: dict[str, Tensor]) -> None:
    wanted = _tensors(model.state_dict())
    for name in sorted(wanted.keys() | found.keys()):
        here = tuple(wanted[name].shape) if name in wanted else None
        there = tuple(found[name].shape) if name in found else None
        if here != there:
            raise CheckpointError(f"{path}: {name} has shape {there}, but the model has {here}")
