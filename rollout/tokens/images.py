"""Images: base64 for the engine, pixel tensors and grids for training, their tokens for both, and
the processor."""

from __future__ import annotations

import hashlib
import importlib
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from envs.base import import_pillow, make_image
from envs.plain_text import PlainText, TemplateText
from rollout.errors import EncodingError
from rollout.tokens.image_files import data_uri, read_image, shrunk, size_of, write_png

if TYPE_CHECKING:
    from PIL import Image

QWEN_PROCESSORS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
NAMES_ONLY = frozenset(
    {"image_processor_type", "processor_class", "feature_extractor_type", "auto_map"}
)
GRID = "image_grid_thw"
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Keys of a processor's output that describe tokens rather than images."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class EncodedImage:
    """One image: its placeholder in the text, its expanded tokens, and its payloads for engine and
    training."""

    placeholder: TemplateText
    expanded: TemplateText
    data: str
    """A PNG as data URI."""
    inputs: Mapping[str, torch.Tensor]


Part = TemplateText | str | EncodedImage
"""A piece of a conversation: what the template wrote, a message's text, or an image."""


def expanded(parts: Sequence[Part]) -> list[TemplateText | str]:
    """The parts for training, with all placeholder tokens of each image."""
    return [part.expanded if isinstance(part, EncodedImage) else part for part in parts]


def unexpanded(parts: Sequence[Part]) -> list[TemplateText | str]:
    """The parts for the engine, with one placeholder per image."""
    return [part.placeholder if isinstance(part, EncodedImage) else part for part in parts]


class ImageEncoder:
    """Encodes images with a checkpoint's processor; caches each result until its image is
    garbage-collected."""

    def __init__(
        self, processor: Any, text: PlainText, placeholder: str, max_pixels: int, small: bool
    ) -> None:
        """With `small`, training inputs hold PNG bytes, which the training ranks expand."""
        self._processor = processor
        self._text = text
        self._max_pixels = max_pixels
        self._small = small
        settings = processor.image_processor
        self._side = getattr(settings, "patch_size", 1) * getattr(settings, "merge_size", 1)
        self.placeholder_text = placeholder
        self.placeholder = text.template_text(placeholder)
        self._kept: dict[int, tuple[weakref.ref[Any], EncodedImage]] = {}
        self._by_pixels = weakref.WeakValueDictionary[tuple[Any, ...], EncodedImage]()
        token_id = getattr(processor, "image_token_id", None)
        if token_id is None:
            token_id = text.control.get(str(getattr(processor, "image_token", None)))
        if token_id is None:
            raise EncodingError(
                f"{type(processor).__name__} does not say which token stands for a picture"
            )
        self.token_id = int(token_id)
        video = getattr(processor, "video_token_id", None)
        self.placeholder_ids = tuple(i for i in (self.token_id, video) if i is not None and i >= 0)

    def encode(self, image: Any) -> EncodedImage:
        """Return the image's tokens and payloads; raises EncodingError if it cannot be used."""
        kept = self._kept.get(id(image))
        if kept is not None and kept[0]() is image:
            return kept[1]
        scaled = shrunk(read_image(image), self._max_pixels, self._side)
        # A worker sends an image that stays on show, such as a question's, anew with every reply.
        pixels = scaled.size, hashlib.blake2b(scaled.tobytes(), digest_size=16).digest()
        encoded = self._by_pixels[pixels] = self._by_pixels.get(pixels) or self._encode(scaled)
        if isinstance(image, import_pillow().Image):
            key = id(image)
            self._kept[key] = (weakref.ref(image, lambda _: self._kept.pop(key, None)), encoded)
        return encoded

    def _encode(self, image: Image.Image) -> EncodedImage:
        out = _processed(self._processor, image, text=[self.placeholder_text])
        ids = out["input_ids"][0].tolist()
        inputs = {
            k: v for k, v in out.items() if k not in TEXT_KEYS and isinstance(v, torch.Tensor)
        }
        found = ids.count(self.token_id)
        image_processor = self._processor.image_processor
        grid = inputs.get(GRID)
        merge = getattr(image_processor, "merge_size", 1)
        if grid is not None and found != (expected := int(grid.prod(-1).sum()) // merge**2):
            raise EncodingError(
                f"a picture of {size_of(image)} has {found} placeholder tokens in the text but its "
                f"grid {grid.tolist()} requires {expected}; processor and chat template do not "
                "match"
            )
        if not found:
            raise EncodingError(f"the processor put no image token into {self.placeholder_text!r}")
        small = make_small(inputs, image_processor) if self._small else inputs
        return EncodedImage(self.placeholder, self._expanded(ids), data_uri(image), small)

    def _expanded(self, ids: list[int]) -> TemplateText:
        """The expanded placeholder; ordinary text at its ends is kept apart, since it may merge
        with its neighbours."""
        at = [i for i, token in enumerate(ids) if token in self._text.control_ids]
        if ids[:1] == [self._text.bos_id]:
            ids = ids[1:]
            at = [i - 1 for i in at[1:]]
        head = self._text.decode(ids[: at[0]])
        tail = self._text.decode(ids[at[-1] + 1 :])
        return TemplateText(head, tuple(ids[at[0] : at[-1] + 1]), tail)


def _processed(processor: Any, image: Image.Image, **more: Any) -> Any:
    try:
        return processor(images=[image], return_tensors="pt", **more)
    except Exception as error:  # whatever a checkpoint's own code raises
        raise EncodingError(
            f"the processor rejects a picture of {size_of(image)}: {error}"
        ) from error


def make_small(
    inputs: Mapping[str, torch.Tensor], image_processor: Any
) -> Mapping[str, torch.Tensor]:
    """Put PNG bytes in place of one image's `pixel_values` (`advantage/training/images.py` has the
    form).

    The inputs are returned unchanged if the processor is not of Qwen's kind, or if expanding the
    bytes would not give back the same tensor bit for bit.
    """
    from advantage.training.images import CODE, PIXELS, TABLE, expand

    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    found: list[Any] = [getattr(image_processor, name, None) for name in names]
    if any(value is None for value in found) or PIXELS not in inputs or GRID not in inputs:
        return inputs
    patch, temporal, merge, *colors = found
    mean, std = (torch.tensor(list(color)) for color in colors)
    values = inputs[PIXELS]
    grid = inputs[GRID]
    channels = 3
    fits = values.dim() == 2 and values.shape[1] == channels * temporal * patch**2
    if (
        not fits
        or len(mean) != channels
        or len(std) != channels
        or len(grid) != 1
        or int(grid[0, 0]) != 1
    ):
        return inputs
    if values.dtype != torch.float32:
        return inputs
    parts = values.reshape(len(values), channels, temporal, patch * patch)[:, :, 0]
    levels = ((parts * std[:, None] + mean[:, None]) * 255).round().clamp(0, 255).to(torch.uint8)
    table = torch.zeros(channels, 256)
    for channel in range(channels):
        table[channel][levels[:, channel].flatten().long()] = parts[:, channel].flatten()
    _, rows, columns = grid[0].tolist()
    blocks = levels.reshape(rows // merge, columns // merge, merge, merge, channels, patch, patch)
    pixels = blocks.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, channels)
    data = write_png(make_image(pixels.contiguous().numpy()))
    small = {
        PIXELS: torch.frombuffer(bytearray(data), dtype=torch.uint8),
        CODE: torch.tensor([[len(data), patch, temporal, merge]]),
        TABLE: table[None],
        **{key: value for key, value in inputs.items() if key != PIXELS},
    }
    return small if torch.equal(expand(small)[PIXELS], values) else inputs


def load_processor(path: str) -> Any | None:
    """Load a checkpoint's processor; None for a text-only checkpoint, EncodingError if it cannot be
    loaded.

    Without torchvision, which AutoProcessor needs for Qwen's videos, it is built here, for images
    only.
    """
    settings = image_settings(path)
    if settings is None:
        return None
    whole = read_json(path, "processor_config.json") or {}
    from transformers.models.auto.processing_auto import AutoProcessor
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=True)
        if hasattr(processor, "image_processor"):
            return processor
        failure: Exception = TypeError(f"AutoProcessor returned a {type(processor).__name__}")
    except (ImportError, OSError, ValueError, TypeError, AttributeError) as error:
        failure = error
    name = whole.get("processor_class") or settings.get("processor_class")
    if name not in QWEN_PROCESSORS:
        raise EncodingError(
            f"the image processor of {path} ({name}) cannot be loaded: {failure}"
        ) from failure
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    old_template = (read_json(path, "chat_template.json") or {}).get("chat_template")
    return build_qwen_processor(
        name, tokenizer, settings, _read(path, "chat_template.jinja") or old_template
    )


def image_settings(path: str) -> dict[str, Any] | None:
    """Read the settings of a checkpoint's image processor; None if the checkpoint takes no
    images."""
    whole = read_json(path, "processor_config.json") or {}
    return read_json(path, "preprocessor_config.json") or whole.get("image_processor")


def build_qwen_processor(
    name: str, tokenizer: Any, settings: dict[str, Any], template: str | None
) -> Any:
    """Build a Qwen processor for images only; `settings` are the contents of
    `preprocessor_config.json`."""
    transformers: Any = importlib.import_module("transformers")

    slow = (
        getattr(transformers, "Qwen2VLImageProcessorPil", None)
        or transformers.Qwen2VLImageProcessor
    )
    base = getattr(transformers, name)
    images_only = type(
        name, (base,), {"get_attributes": classmethod(lambda cls: ["image_processor", "tokenizer"])}
    )
    image_processor = slow(**{k: v for k, v in settings.items() if k not in NAMES_ONLY})
    return images_only(
        image_processor=image_processor,
        tokenizer=tokenizer,
        chat_template=template or tokenizer.chat_template,
    )


def read_json(path: str, name: str) -> Any:
    """What a JSON file of the checkpoint holds; None without it. Raises EncodingError if it is
    damaged."""
    text = _read(path, name)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise EncodingError(
            f"{path}/{name} is damaged ({error}); copy the checkpoint again"
        ) from error


def _read(path: str, name: str) -> str | None:
    """The text of a file of the checkpoint, a folder or a name on the hub; None if there is
    none."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found).read_text(encoding="utf-8")
