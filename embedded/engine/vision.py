"""Serves a small vision-language model on the embedded engine, with images in `image_data` as in
SGLang.

It has the same scheduler as a text model. Each row has a cache of transformers. Prefixes are not
shared, because equal tokens can stand for different images.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedded.engine.engine import Engine
from envs.images import ImageError, open_image
from rollout.errors import ConfigError
from rollout.tokens.images import load_processor

SERVED_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
PIXELS = "pixel_values"
GRIDS = "image_grid_thw"


class ImagePrompt(list[int]):
    """Prompt tokens with expanded placeholders, and the tensors of their images."""

    images: Mapping[str, Tensor] = {}


class VisionDecoder:
    """Computes next-token logits of a Qwen vision-language model, one row at a time."""

    def __init__(self, folder: str, rows: int, context_length: int | None, device: str) -> None:
        """Load the model folder; raises ConfigError if the engine does not support this model."""
        self.model = load_vision_model(folder).to(device)
        config = self.model.config
        self.image_token: int = config.image_token_id
        self.vocab_size: int = config.text_config.vocab_size
        self.context_length = context_length or min(
            config.text_config.max_position_embeddings, 4096
        )
        self.rows = rows
        self.device = torch.device(device)
        self.images: dict[int, Mapping[str, Tensor]] = {}
        self._caches: dict[int, Any] = {}
        self._shifts: dict[int, int] = {}

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Copy in weights under Hugging Face names; raises ConfigError, before any change, if they
        do not fit."""
        own = self.model.state_dict()
        for name, weight in own.items():
            if name not in state or state[name].shape != weight.shape:
                raise ConfigError(
                    f"the new weights have no '{name}' of shape {tuple(weight.shape)}"
                )
        self.model.load_state_dict({name: state[name] for name in own})

    def open_row(self, row: int, prompt: Sequence[int]) -> None:
        """Keep the images of the row's prompt for `prefill`."""
        self.images[row] = getattr(prompt, "images", {})

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert length == 0, "prefixes with images are not shared"

    @torch.inference_mode()
    def prefill(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]
    ) -> Tensor:
        """Compute whole prompts; return the last logits [rows, vocab]."""
        logits = []
        for row, ids in zip(rows, tokens, strict=True):
            self.model.model.rope_deltas = None
            inputs = forward_inputs(torch.from_numpy(ids), self.images[row], self.image_token)
            out = self.model(**inputs, use_cache=True)
            shift = self.model.model.rope_deltas
            self._shifts[row] = 0 if shift is None else int(shift)
            self._caches[row] = out.past_key_values
            logits.append(out.logits[:, -1])
        return torch.cat(logits)

    @torch.inference_mode()
    def decode(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> Tensor:
        """Compute one token per row, at its position; return logits [rows, vocab]."""
        logits = []
        for row, position, token in zip(
            rows.tolist(), positions.tolist(), tokens.tolist(), strict=True
        ):
            place = torch.full((3, 1, 1), position + self._shifts[row], device=self.device)
            ids = torch.tensor([[token]], device=self.device)
            cache = self._caches[row]
            out = self.model(
                input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True
            )
            logits.append(out.logits[:, -1])
        return torch.cat(logits)


def forward_inputs(
    ids: Tensor, images: Mapping[str, Tensor] | None, image_token: int
) -> dict[str, Tensor]:
    """Arguments of a Qwen model's forward pass for one sequence `ids` [tokens] with its images."""
    ids = ids[None]
    if not images:
        return {"input_ids": ids}
    return {"input_ids": ids, "mm_token_type_ids": (ids == image_token).int(), **images}


def load_vision_model(folder: str | Path) -> Any:
    """Load a Qwen vision-language model in float32; raises ConfigError if the engine does not
    support it."""
    from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

    kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in SERVED_TYPES:
        supported = (
            f"the embedded engine supports the vision-language models {', '.join(SERVED_TYPES)}"
        )
        raise ConfigError(
            f"'{folder}' is a {kind} model; {supported}. Serve this model with SGLang instead"
        )
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


class VisionEngine(Engine):
    """The engine of a vision-language model. Prompts have one placeholder per image, which is
    expanded here."""

    max_body_bytes = 64 << 20
    UNSUPPORTED = tuple(name for name in Engine.UNSUPPORTED if name != "image_data")
    SHARES_PREFIXES = False

    load_model = staticmethod(load_vision_model)

    def _load_decoder(self) -> VisionDecoder:
        options = self.options
        self.processor: Any = load_processor(options.model_path)
        if self.processor is None:
            raise ConfigError(
                f"'{options.model_path}' has no preprocessor_config.json, so images cannot be read"
            )
        found = VisionDecoder(
            options.model_path, options.max_running_requests, options.context_length, options.device
        )
        self.image_token = found.image_token
        return found

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        given = body.get("image_data") or []
        prompt = super()._prompt(body)
        if given:
            return self._expanded(prompt, given if isinstance(given, list) else [given])
        if self.image_token in prompt:
            raise ConfigError("input_ids has an image's placeholder, but image_data is empty")
        return prompt

    def _expanded(self, ids: Sequence[int], images: Sequence[Any]) -> ImagePrompt:
        if not all(isinstance(image, str) and image.startswith("data:") for image in images):
            raise ConfigError(
                "image_data must be data URIs (data:image/png;base64,...), not paths or links"
            )
        try:
            images = [open_image(image) for image in images]
        except ImageError as error:
            raise ConfigError(f"image_data: {error}") from error
        reader = self.processor.image_processor
        inputs = reader(images=images, return_tensors="pt")
        patches = inputs[GRIDS].prod(-1)
        counts = iter((patches // reader.merge_size**2).tolist())
        if ids.count(self.image_token) != len(images):
            raise ConfigError(
                f"input_ids has {ids.count(self.image_token)} placeholders for {len(images)} images"
            )
        prompt = ImagePrompt()
        for token in ids:
            prompt.extend([token] * next(counts) if token == self.image_token else [token])
        prompt.images = {key: inputs[key] for key in (PIXELS, GRIDS)}
        return prompt


def has_vision(folder: str | Path) -> bool:
    """Tell whether a folder contains a vision-language model."""
    path = Path(folder) / "config.json"
    return path.is_file() and "vision_config" in json.loads(path.read_text(encoding="utf-8"))
