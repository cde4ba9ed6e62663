"""Saves and loads the rollout's state beside the model's checkpoint: cursors, live episodes, kept
warm-up segments.

A file is one line with its format and the SHA-256 of what follows, and then what `torch.save`
wrote. It is synced in a separate folder and then renamed, so a crash leaves the previous file or
none. PyTorch's restricted unpickler reads it, which makes nothing but the records that are listed
here.
"""

import hashlib
import os
import pickle
import shutil
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch

from rollout.errors import CheckpointError
from rollout.tokens.token_prefix import TokenPrefix
from rollout.turn import (
    FinishReason,
    Generation,
    ImageChain,
    NotesEvent,
    Prompt,
    Segment,
    StopReason,
    Turn,
)

FORMAT = b"slime-verlog rollout 7"
"""What the first line begins with; the number rises when the records change."""


def checkpoint_path(folder: str, rollout_id: int) -> Path:
    """Path of the state of rollout `rollout_id` under slime's `--save` or `--load` folder."""
    return Path(folder) / "rollout" / f"slime_verlog_{rollout_id}.pt"


@dataclass(frozen=True)
class SourceState:
    """The state of an `EpisodeSource` between batches; `buffer` has episode ids, `slots` comes from
    `slots_state`."""

    next_episode: int
    next_group: int
    buffer: list[int]
    slots: list[Mapping[str, Any]]
    kept: list[Segment]
    first_seed: int | None = None
    """Seed of training episode 0, if it is not the YAML's."""


_RECORDS = (
    SourceState,
    Segment,
    Turn,
    Prompt,
    ImageChain,
    Generation,
    StopReason,
    FinishReason,
    NotesEvent,
)
_ARRAYS = (list, array, cast(Any, array("f")).__reduce_ex__(2)[0])
"""How lists of token ids and arrays of log-probs are pickled."""


def save_state(source: SourceState, folder: str, rollout_id: int) -> None:
    """Write the state under slime's `--save` folder; raises CheckpointError, with the previous file
    untouched."""
    path = checkpoint_path(folder, rollout_id)
    writing = path.parent / ".writing"
    temporary = writing / path.name
    content = BytesIO()
    try:
        torch.save(replace(source, kept=list(map(_written, source.kept))), content)
        body = content.getbuffer()
        shutil.rmtree(writing, ignore_errors=True)  # from a run that was killed while writing
        writing.mkdir(parents=True)
        with temporary.open("wb") as file:
            file.write(_first_line(body))
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    except (OSError, TypeError, ValueError, pickle.PicklingError) as error:
        raise CheckpointError(f"the rollout state cannot be written to {path}: {error}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def load_state(load: str | None, save: str | None, rollout_id: int | None) -> SourceState | None:
    """Return the state that `save_state` wrote for `rollout_id`; None in a fresh run (no id, -1, or
    no `load`).

    While the actor is frozen, slime resumes with `load` still naming the initial weights, so `save`
    is searched too. Raises CheckpointError for a missing, damaged or foreign file.
    """
    if rollout_id is None or rollout_id < 0 or not load:
        return None
    paths = [checkpoint_path(folder, rollout_id) for folder in (load, save) if folder]
    path = next((path for path in paths if path.exists()), paths[0])
    return read_state(path)


def read_state(path: Path) -> SourceState:
    """Read and check one file; raises CheckpointError as `load_state`."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist, so the live episodes of that step are unknown; load a step "
            "that has one, or pass --start-rollout-id 0 to begin with fresh episodes"
        )
    with path.open("rb") as file:
        line = file.readline(200)
        body = file.read()
    if not line.startswith(FORMAT):
        raise CheckpointError(
            f"{path} is not a rollout checkpoint of this version: it must begin with {FORMAT!r}"
        )
    if line != _first_line(body):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    try:
        with torch.serialization.safe_globals([*_RECORDS, *_ARRAYS]):
            state: SourceState = torch.load(BytesIO(body), weights_only=True)
        return replace(state, kept=list(map(_compact, state.kept)))
    except Exception as error:  # whatever unpickling raises
        raise CheckpointError(f"{path} does not hold a rollout state: {error}") from error


def _first_line(body: bytes | memoryview) -> bytes:
    return b"%s %s\n" % (FORMAT, hashlib.sha256(body).hexdigest().encode())


def _written(segment: Segment) -> Segment:
    """The segment without the spans of its turns, because their batch was traced."""
    return replace(segment, turns=tuple(replace(turn, spans=()) for turn in segment.turns))


def _compact(segment: Segment) -> Segment:
    """The segment with token ids in 4 bytes each, as they were before they were pickled."""

    def prompt_of(prompt: Prompt) -> Prompt:
        return replace(prompt, token_ids=TokenPrefix(prompt.token_ids))

    turns: list[Turn] = []
    for turn in segment.turns:
        generation = replace(turn.generation, token_ids=TokenPrefix(turn.generation.token_ids))
        turns.append(replace(turn, prompt=prompt_of(turn.prompt), generation=generation))
    bootstrap = None if segment.bootstrap is None else prompt_of(segment.bootstrap)
    return replace(segment, turns=tuple(turns), bootstrap=bootstrap)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
