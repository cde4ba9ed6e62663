"""Turns a processor's float32 patches back into the bytes that they were made of, where that loses nothing.

The training rank expands them again (`advantage/training/pictures.py`, which describes the form).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from advantage.training.pictures import CODE, PIXELS, TABLE, expand

GRID = "image_grid_thw"


def make_small(inputs: Mapping[str, Tensor], image_processor: Any) -> Mapping[str, Tensor]:
    """One picture's inputs with PNG bytes in place of `pixel_values`.

    The inputs are returned unchanged if the processor is not of Qwen's kind, or if expanding the bytes would not give
    back the same tensor bit for bit.
    """
    layout = _layout(inputs, image_processor)
    if layout is None:
        return inputs
    patch, temporal, merge, mean, std = layout
    values = inputs[PIXELS]
    channels = len(mean)
    parts = values.reshape(len(values), channels, temporal, patch * patch)[:, :, 0]
    levels = ((parts * std[:, None] + mean[:, None]) * 255).round().clamp(0, 255).to(torch.uint8)
    table = torch.zeros(channels, 256)
    for channel in range(channels):
        table[channel][levels[:, channel].flatten().long()] = parts[:, channel].flatten()
    _, rows, columns = inputs[GRID][0].tolist()
    blocks = levels.reshape(rows // merge, columns // merge, merge, merge, channels, patch, patch)
    pixels = blocks.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, channels)
    data = _png(pixels)
    small = {
        PIXELS: torch.frombuffer(bytearray(data), dtype=torch.uint8),
        CODE: torch.tensor([[len(data), patch, temporal, merge]]),
        TABLE: table[None],
        **{key: value for key, value in inputs.items() if key != PIXELS},
    }
    return small if torch.equal(expand(small)[PIXELS], values) else inputs


def _layout(inputs: Mapping[str, Tensor], processor: Any) -> tuple[int, int, int, Tensor, Tensor] | None:
    """Patch size, temporal patch size, merge size, means, standard deviations; None for another kind of processor."""
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    found: list[Any] = [getattr(processor, name, None) for name in names]
    if any(value is None for value in found) or PIXELS not in inputs or GRID not in inputs:
        return None
    patch, temporal, merge, mean, std = found
    values, grid = inputs[PIXELS], inputs[GRID]
    fits = values.dim() == 2 and values.shape[1] == len(mean) * temporal * patch**2 and len(mean) == len(std) == 3
    if not fits or len(grid) != 1 or int(grid[0, 0]) != 1 or values.dtype != torch.float32:
        return None
    return patch, temporal, merge, torch.tensor(list(mean)), torch.tensor(list(std))


def _png(pixels: Tensor) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
