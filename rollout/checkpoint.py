"""The rollout's state beside the model's checkpoint: cursors, live episodes, kept warm-up segments.

One safetensors file, written in a folder of its own, synced and renamed, so that a crash at any byte leaves the
previous file or none. Live episodes are stored as seed and answers; `restore_slots` plays them again and checks
that every observation is the one that was seen. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollout.engine import LARGEST_ID
from rollout.env_worker import EnvSpec
from rollout.errors import CheckpointError, EnvironmentFault
from rollout.samples import Segment
from rollout.turn import Generation, Prompt, Turn

if TYPE_CHECKING:
    from rollout.data_source import EpisodeSource, EpisodeSpec
    from rollout.fixed_turn import Slot
    from rollout.runtime import Runtime

FORMAT, VERSION = "slime-verlog-rollout", "2"


def checkpoint_path(folder: str, rollout_id: int) -> Path:
    """Where the state of rollout `rollout_id` lies under slime's `--save` or `--load` folder."""
    return Path(folder) / "rollout" / f"slime_verlog_{rollout_id}.safetensors"


def save_source(source: EpisodeSource, rollout_id: int) -> None:
    """Write the state of `source`; slime calls it through `EpisodeSource.save` after the models are saved.

    Raises:
        CheckpointError: the file cannot be written (full disk, no permission); the previous one is untouched.
    """
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "next_episode": source.next_episode,
        "next_group": source.next_group,
        "buffer": [group[0].group_index for group in source.buffer],
        "n_env": source.config.n_env,
        "slots": _slots_state(source.state),
        "kept": [_segment_state(segment, tensors) for segment in source.kept],
    }
    path = checkpoint_path(source.args.save, rollout_id)
    writing = path.parent / ".writing"
    temporary = writing / path.name
    try:
        body = json.dumps(state).encode()
        tensors["state"] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        metadata = {"format": FORMAT, "version": VERSION, "sha256": checksum(tensors)}
        shutil.rmtree(writing, ignore_errors=True)  # what a run left behind that was killed as it wrote
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
    """SHA-256 of all that a checkpoint holds: names, types, shapes and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def load_source(source: EpisodeSource, rollout_id: int | None) -> None:
    """Restore what `save_source` wrote for `rollout_id`; a fresh run (None or negative) has nothing to load.

    Raises:
        CheckpointError: the file is missing, damaged, of another version or of another kind; nothing was loaded.
    """
    if rollout_id is None or rollout_id < 0:
        return
    path = _find_checkpoint(source.args, rollout_id)
    if path is None:
        return
    state, tensors = read_checkpoint(path)
    try:
        next_episode, next_group = _whole(state["next_episode"]), _whole(state["next_group"])
        # An aborted episode's environment ended with its process: its group is played again from the start.
        buffer = [source.group(_whole(episode_id)) for episode_id in state["buffer"]]
        kept = [_read_segment(item, tensors) for item in state["kept"]]
        slots = list(state["slots"])
        for slot in slots:
            _check_slot(slot)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} does not hold a whole rollout state ({error!r})") from error
    source.next_episode, source.next_group, source.buffer = next_episode, next_group, buffer
    source.kept, source.state = kept, slots


def _find_checkpoint(args: Any, rollout_id: int) -> Path | None:
    """Where the state should be: under `--load`, else where this run itself saves; None if there is no `--load`.

    While the actor is frozen it is not saved, so slime takes its initial weights for `--load`; a run that is
    resumed then finds its episodes under `--save` only.
    """
    folders = [folder for folder in (getattr(args, "load", None), getattr(args, "save", None)) if folder]
    if getattr(args, "load", None) is None:
        return None
    paths = [checkpoint_path(folder, rollout_id) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])


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
        raise CheckpointError(f"{path} is damaged or no rollout checkpoint: {error}") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no rollout checkpoint: format {metadata.get('format')!r}")
    if metadata.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {metadata.get('version')!r}, this code reads {VERSION}")
    if checksum(tensors) != metadata.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    try:
        state = json.loads(tensors.pop("state").numpy().tobytes())
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold a rollout state ({error!r})") from error
    return state, tensors


async def restore_slots(saved: list[Mapping[str, Any]], runtime: Runtime, source: EpisodeSource) -> list[Slot]:
    """Slots with their episodes played again up to where they were saved.

    An episode whose replay differs is abandoned and counted. With another `n_env` than saved, all episodes
    start anew on ids that were never used.
    """
    from rollout.fixed_turn import Slot

    n_env = source.config.n_env
    if len(saved) != n_env:
        first = max((slot["next_episode"] for slot in saved), default=0) + n_env
        return [Slot(number, first + number, n_env) for number in range(n_env)]
    slots = [Slot(number, item["next_episode"], n_env) for number, item in enumerate(saved)]
    await asyncio.gather(*(_restore(slot, item["episode"], runtime) for slot, item in zip(slots, saved, strict=True)))
    return slots


async def _restore(slot: Slot, item: Mapping[str, Any] | None, runtime: Runtime) -> None:
    from rollout.episode import open_episode

    if item is None:
        return
    try:
        episode = await open_episode(runtime, _read_spec(item["spec"]))
        slot.episode = episode
        for token_ids in item["answers"]:
            await episode.take(Generation(token_ids, [0.0] * len(token_ids), "", "stop"))
        if episode.session.digests != item["digests"] or episode.stop is not None:
            raise EnvironmentFault("the replayed episode differs from the saved one")
    except EnvironmentFault:
        runtime.counters["episodes_lost_at_resume"] += 1
        await slot.leave()


def _slots_state(state: Any) -> list[Mapping[str, Any]]:
    if state is None:
        return []
    if isinstance(state, list):  # loaded, and not played on since
        return state
    return [{"next_episode": slot.next_episode, "episode": _episode_state(slot.episode)} for slot in state.slots]


def _episode_state(episode: Any) -> Mapping[str, Any] | None:
    if episode is None:
        return None
    return {
        "spec": _spec_state(episode.spec),
        "answers": episode.answers,
        "digests": episode.session.digests,
    }


def _spec_state(spec: EpisodeSpec) -> Mapping[str, Any]:
    env = spec.env
    return {
        "episode_id": spec.episode_id,
        "name": spec.name,
        "env_path": env.env_path,
        "metadata": dict(env.metadata),
        "options": dict(env.options),
        "max_turns": env.max_turns,
    }


def _read_spec(item: Mapping[str, Any]) -> EpisodeSpec:
    from rollout.data_source import EpisodeSpec

    env = EnvSpec(
        env_path=item["env_path"],
        metadata=item["metadata"],
        options=item["options"],
        max_turns=item["max_turns"],
    )
    return EpisodeSpec(item["episode_id"], item["name"], env)


def _check_slot(slot: Mapping[str, Any]) -> None:
    _whole(slot["next_episode"])
    if slot["episode"] is None:
        return
    spec, answers, digests = (slot["episode"][key] for key in ("spec", "answers", "digests"))
    _read_spec(spec)
    _whole(spec["episode_id"])
    if not all(isinstance(spec[key], kind) for key, kind in (("name", str), ("env_path", str), ("options", dict))):
        raise ValueError("an episode's name and environment must be text, its options a mapping")
    if not isinstance(spec["metadata"], dict) or not all(isinstance(item, str) for item in digests):
        raise ValueError("an episode's metadata must be a mapping, its digests text")
    for token_ids in answers:
        _ids(token_ids)
    if len(digests) != len(answers) + 1:
        raise ValueError("an episode has not one digest more than answers")


def _whole(value: Any) -> int:
    """A number that counts or numbers something."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < LARGEST_ID for item in value):
        raise ValueError("token ids must be a list of whole numbers")
    return value


def _segment_state(segment: Segment, tensors: dict[str, torch.Tensor]) -> Mapping[str, Any]:
    return {
        "task_name": segment.task_name,
        "turns": [_turn_state(turn, tensors) for turn in segment.turns],
        "bootstrap": None if segment.bootstrap is None else _prompt_state(segment.bootstrap, tensors),
        "stop": segment.stop,
        "episode_return": segment.episode_return,
        "episode_turns": segment.episode_turns,
    }


def _read_segment(item: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Segment:
    bootstrap = None if item["bootstrap"] is None else _read_prompt(item["bootstrap"], tensors)
    turns = tuple(_read_turn(turn, tensors) for turn in item["turns"])
    return Segment(
        item["task_name"], turns, bootstrap, item["stop"], item["episode_return"], item["episode_turns"]
    )


_TURN_FIELDS = (
    *("episode_id", "index", "action", "valid", "executed_action", "reward", "terminated", "truncated"),
    *("progression", "metrics", "engine_s", "env_s"),
)


def _turn_state(turn: Turn, tensors: dict[str, torch.Tensor]) -> Mapping[str, Any]:
    generation = turn.generation
    fields = {name: getattr(turn, name) for name in _TURN_FIELDS}
    return {
        **fields,
        "metrics": dict(turn.metrics),
        "prompt": _prompt_state(turn.prompt, tensors),
        "action_span": turn.action_span,
        "generation": {
            "token_ids": generation.token_ids,
            "log_probs": generation.log_probs,
            "text": generation.text,
            "finish_reason": generation.finish_reason,
            "weight_versions": list(generation.weight_versions),
            "meta_info": dict(generation.meta_info),
        },
    }


def _read_turn(item: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Turn:
    generation = item["generation"]
    span = item["action_span"]
    _ids(generation["token_ids"])
    return Turn(
        **{name: item[name] for name in _TURN_FIELDS},
        prompt=_read_prompt(item["prompt"], tensors),
        generation=Generation(**{**generation, "weight_versions": tuple(generation["weight_versions"])}),
        action_span=None if span is None else (span[0], span[1]),
    )


def _prompt_state(prompt: Prompt, tensors: dict[str, torch.Tensor]) -> Mapping[str, Any]:
    names = {}
    for key, value in (prompt.train_inputs or {}).items():
        names[key] = f"train_input_{len(tensors)}"
        # A copy: turns may share their pictures, and safetensors refuses tensors that share memory.
        tensors[names[key]] = value.clone(memory_format=torch.contiguous_format)
    return {
        "token_ids": list(prompt.token_ids),
        "image_data": list(prompt.image_data),
        "train_inputs": names if prompt.train_inputs is not None else None,
        "engine_ids": None if prompt.engine_ids is None else list(prompt.engine_ids),
        "seen_tool": prompt.seen_tool,
    }


def _read_prompt(item: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Prompt:
    names = item["train_inputs"]
    return Prompt(
        token_ids=_ids(item["token_ids"]),
        image_data=item["image_data"],
        train_inputs=None if names is None else {key: tensors[name] for key, name in names.items()},
        engine_ids=item["engine_ids"],
        seen_tool=item.get("seen_tool", False),
    )


def _sync(path: Path) -> None:
    """Make the file's (or folder's) content survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
