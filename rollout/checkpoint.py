"""Saves and loads the rollout's state beside the model's checkpoint: cursors, live episodes, kept warm-up segments.

The state is one safetensors file, synced in a separate folder and then renamed, so a crash leaves the previous file or
none. Nothing is unpickled.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollout.errors import CheckpointError
from rollout.play.slots import check_slot, read_ids, read_whole
from rollout.tokens.image_files import png_of, png_uri
from rollout.tokens.token_prefix import TokenPrefix
from rollout.turn import FinishReason, Generation, ImageChain, NotesEvent, Prompt, Segment, StopReason, Turn

FORMAT, VERSION = "slime-verlog-rollout", "5"


def checkpoint_path(folder: str, rollout_id: int) -> Path:
    """Path of the state of rollout `rollout_id` under slime's `--save` or `--load` folder."""
    return Path(folder) / "rollout" / f"slime_verlog_{rollout_id}.safetensors"


@dataclass(frozen=True)
class SourceState:
    """The state of an `EpisodeSource` between batches; `buffer` has episode ids, `slots` comes from `slots_state`."""

    next_episode: int
    next_group: int
    buffer: list[int]
    slots: list[Mapping[str, Any]]
    kept: list[Segment]
    first_seed: int | None = None
    """Seed of training episode 0, if it is not the YAML's."""


@dataclass
class StoredImages:
    """The images that prompts refer to, each stored once; engine and training mostly get the same PNG file."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    images: list[str | list[str]] = field(default_factory=list)
    """The images as the engine gets them: each a text, or the name of the tensor with its PNG file, in a list."""
    _numbers: dict[str, int] = field(default_factory=dict)
    _names: dict[int | bytes, str] = field(default_factory=dict)
    """By the identity of a tensor, or by the hash of a file."""

    def number(self, image: str) -> int:
        """The image's position in `images`."""
        if image not in self._numbers:
            self._numbers[image] = len(self.images)
            png = png_of(image)
            name = None if png is None else self._store(hashlib.sha256(png).digest(), _as_tensor(png))
            self.images.append(image if name is None else [name])
        return self._numbers[image]

    def name(self, tensor: torch.Tensor) -> str:
        """The tensor's name in the file. The key is its identity, so prompts must live until the file is written."""
        if id(tensor) not in self._names:
            is_file = tensor.dtype == torch.uint8 and tensor.dim() == 1
            key = hashlib.sha256(tensor.numpy().tobytes()).digest() if is_file else id(tensor)
            # A copy, because safetensors refuses tensors that share memory.
            self._names[id(tensor)] = self._store(key, tensor.clone(memory_format=torch.contiguous_format))
        return self._names[id(tensor)]

    def _store(self, key: int | bytes, tensor: torch.Tensor) -> str:
        name = self._names.setdefault(key, f"picture_{len(self.tensors)}")
        self.tensors.setdefault(name, tensor)
        return name


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def save_state(source: SourceState, folder: str, rollout_id: int) -> None:
    """Write the state under slime's `--save` folder; raises CheckpointError, with the previous file untouched."""
    images = StoredImages()
    state = {
        "next_episode": source.next_episode,
        "next_group": source.next_group,
        "buffer": source.buffer,
        "first_seed": source.first_seed,
        "slots": source.slots,
        "kept": [_segment_state(segment, images) for segment in source.kept],
        "images": images.images,
    }
    tensors = images.tensors
    path = checkpoint_path(folder, rollout_id)
    writing = path.parent / ".writing"
    temporary = writing / path.name
    try:
        body = json.dumps(state).encode()
        tensors["state"] = _as_tensor(body)
        metadata = {"format": FORMAT, "version": VERSION, "sha256": checksum(tensors)}
        shutil.rmtree(writing, ignore_errors=True)  # from a run that was killed while writing
        writing.mkdir(parents=True)
        save_file(tensors, temporary, metadata)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(f"the rollout state cannot be written to {path}: {error}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of a checkpoint's content: names, types, shapes and bytes of all tensors."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def load_state(load: str | None, save: str | None, rollout_id: int | None) -> SourceState | None:
    """Return the state that `save_state` wrote for `rollout_id`; None in a fresh run (no id, -1, or no `load`).

    While the actor is frozen, slime resumes with `load` still naming the initial weights, so `save` is searched too.
    Raises CheckpointError for a missing, damaged or foreign file.
    """
    if rollout_id is None or rollout_id < 0 or not load:
        return None
    paths = [checkpoint_path(folder, rollout_id) for folder in (load, save) if folder]
    path = next((path for path in paths if path.exists()), paths[0])
    state, tensors = read_checkpoint(path)
    try:
        for slot in (slots := list(state["slots"])):
            check_slot(slot)
        png = lambda name: png_uri(tensors[name].numpy().tobytes())
        images = [image if isinstance(image, str) else png(image[0]) for image in state["images"]]
        return SourceState(
            next_episode=read_whole(state["next_episode"]),
            next_group=read_whole(state["next_group"]),
            buffer=[read_whole(episode_id) for episode_id in state["buffer"]],
            slots=slots,
            kept=[_read_segment(item, images, tensors) for item in state["kept"]],
            first_seed=state.get("first_seed"),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} does not hold a complete rollout state ({error!r})") from error


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The checked content of a rollout checkpoint: its state and the tensors it names."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist, so the live episodes of that step are unknown; load a step that has one, or "
            "pass --start-rollout-id 0 to begin with fresh episodes"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no plain iteration
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a rollout checkpoint: {error}") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a rollout checkpoint: format {metadata.get('format')!r}")
    if metadata.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {metadata.get('version')!r}, this code reads {VERSION}")
    if checksum(tensors) != metadata.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    try:
        state = json.loads(tensors.pop("state").numpy().tobytes())
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold a rollout state ({error!r})") from error
    return state, tensors


def _fields(record: Generation | Segment | Turn) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _segment_state(segment: Segment, images: StoredImages) -> Mapping[str, Any]:
    return {
        **_fields(segment),
        "turns": [_turn_state(turn, images) for turn in segment.turns],
        "bootstrap": None if segment.bootstrap is None else _prompt_state(segment.bootstrap, images),
    }


def _read_segment(item: Mapping[str, Any], images: list[str], tensors: Mapping[str, torch.Tensor]) -> Segment:
    changed = {
        "turns": tuple(_read_turn(turn, images, tensors) for turn in item["turns"]),
        "bootstrap": None if item["bootstrap"] is None else _read_prompt(item["bootstrap"], images, tensors),
        "stop": StopReason(item["stop"]),
    }
    return Segment(**{**item, **changed})


def _turn_state(turn: Turn, images: StoredImages) -> Mapping[str, Any]:
    generation = {
        **_fields(turn.generation),
        "token_ids": list(turn.generation.token_ids),
        "log_probs": list(turn.generation.log_probs),
        "meta_info": dict(turn.generation.meta_info),
    }
    changed = {"prompt": _prompt_state(turn.prompt, images), "generation": generation, "metrics": dict(turn.metrics)}
    return {**_fields(turn), **changed, "spans": []}


def _read_turn(item: Mapping[str, Any], images: list[str], tensors: Mapping[str, torch.Tensor]) -> Turn:
    generation, span = item["generation"], item["action_span"]
    compact = {
        "token_ids": TokenPrefix(read_ids(generation["token_ids"])),
        "log_probs": array("f", generation["log_probs"]),
        "finish_reason": FinishReason(generation["finish_reason"]),
        "weight_versions": tuple(generation["weight_versions"]),
        "version_ends": tuple(generation["version_ends"]),
    }
    changed = {
        "prompt": _read_prompt(item["prompt"], images, tensors),
        "generation": Generation(**{**generation, **compact}),
        "action_span": None if span is None else (span[0], span[1]),
        "notes_events": tuple(map(NotesEvent, item["notes_events"])),
        "spans": (),
    }
    return Turn(**{**item, **changed})


def _prompt_state(prompt: Prompt, images: StoredImages) -> Mapping[str, Any]:
    parts = () if prompt.train_inputs is None else prompt.train_inputs.parts
    return {
        "token_ids": list(prompt.token_ids),
        "image_data": [images.number(image) for image in prompt.image_data],
        "train_inputs": [{key: images.name(value) for key, value in part.items()} for part in parts],
        "engine_ids": None if prompt.engine_ids is None else list(prompt.engine_ids),
        "seen_tool": prompt.seen_tool,
    }


def _read_prompt(item: Mapping[str, Any], images: list[str], tensors: Mapping[str, torch.Tensor]) -> Prompt:
    parts = [{key: tensors[name] for key, name in part.items()} for part in item["train_inputs"]]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("the pictures of one prompt have training inputs of different names")
    return Prompt(
        token_ids=TokenPrefix(read_ids(item["token_ids"])),
        image_data=[images[read_whole(number)] for number in item["image_data"]],
        train_inputs=ImageChain(parts) if parts else None,
        engine_ids=item["engine_ids"],
        seen_tool=item["seen_tool"],
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
