"""The compact form in which prompts and turns cross the connection between the manager and a
player."""

from __future__ import annotations

import copyreg
import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from io import BytesIO
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch

from rollout.tokens.token_prefix import TokenPrefix, token_prefix
from rollout.turn import Generation, ImageChain, Prompt, Span, Turn


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except TypeError:  # a type that numpy lacks, such as bfloat16
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _reducer(record: type) -> Callable[[Any], Any]:
    """Reduce a dataclass to its values, several times faster than its own pickling by name."""
    values = attrgetter(*(field.name for field in fields(record)))
    return lambda item: (record, values(item))


class _Pickler(pickle.Pickler):
    dispatch_table: ClassVar[Any] = {
        **copyreg.dispatch_table,
        **{record: _reducer(record) for record in (Generation, Span, Turn)},
        TokenPrefix: lambda ids: (TokenPrefix, (ids.since(None)[1],)),
        Prompt: lambda prompt: (Prompt, ((),)),
        torch.Tensor: _reduce_tensor,
    }


def dumps(value: Any) -> bytes:
    """Pickle with token ids and tensors as plain bytes, and empty prompts: a prompt crosses as a
    `PromptChange`."""
    file = BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class PromptChange(NamedTuple):
    """A prompt, as its difference from the episode's previous prompt: a growing conversation is
    sent once."""

    kept: int
    """Number of first token ids that are those of the previous prompt."""
    ids: array[int]
    """The token ids after them."""
    images: Sequence[int | str]
    """`image_data`; a number is a position in the previous prompt's."""
    inputs: Sequence[int | Mapping[str, torch.Tensor]] | None
    """The parts of `train_inputs`, likewise."""
    engine_kept: int
    engine_ids: array[int] | None
    seen_tool: bool


NOTHING = Prompt(TokenPrefix())


def prompt_change(old: Prompt, new: Prompt) -> PromptChange:
    """Return how `new` differs from `old`, the prompt before it."""
    kept, ids = token_prefix(new.token_ids).since(old.token_ids)
    engine_kept = 0
    engine_ids = None
    if new.engine_ids is not None:
        engine_kept, engine_ids = token_prefix(new.engine_ids).since(old.engine_ids)
    inputs = None if new.train_inputs is None else _known(_parts(old), new.train_inputs.parts)
    return PromptChange(
        kept,
        ids,
        _known(old.image_data, new.image_data),
        inputs,
        engine_kept,
        engine_ids,
        new.seen_tool,
    )


def changed_prompt(old: Prompt, change: PromptChange) -> Prompt:
    """Return the prompt after `old`; it shares memory with it."""
    parts = _parts(old)
    inputs = (
        None
        if change.inputs is None
        else [parts[i] if isinstance(i, int) else i for i in change.inputs]
    )
    engine = change.engine_ids
    return Prompt(
        token_ids=_extended(old.token_ids, change.kept, change.ids),
        image_data=[
            old.image_data[image] if isinstance(image, int) else image for image in change.images
        ],
        train_inputs=None if inputs is None else ImageChain(inputs),
        engine_ids=None
        if engine is None
        else _extended(old.engine_ids or (), change.engine_kept, engine),
        seen_tool=change.seen_tool,
    )


def _parts(prompt: Prompt) -> Sequence[Mapping[str, torch.Tensor]]:
    return () if prompt.train_inputs is None else prompt.train_inputs.parts


def _known(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """The new items, with the position of those that are the same objects as old ones."""
    places = {id(item): place for place, item in enumerate(old)}
    return [places.get(id(item), item) for item in new]


def _extended(old: Sequence[int], kept: int, new: array[int]) -> TokenPrefix:
    return token_prefix(old).extended(new) if kept else TokenPrefix(new)
