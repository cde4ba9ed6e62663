"""Small images: training data carries PNG bytes, and the training rank makes the processor's
tensors from them.

`rollout/tokens/images.py` writes this form; `expand` gives back the processor's tensor bit for bit.
Keys of a sample's `multimodal_train_inputs`, for k images, all concatenated along dim 0:

- `pixel_values`: uint8 [bytes], the PNG files one after another
- `pixel_values_code`: int64 [k, 4], per image: bytes of its file, patch size, temporal patch size,
  merge size
- `pixel_values_table`: float32 [k, 3, 256], the processor's value for each channel's byte
"""

import io
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from slime_verlog import MissingDependencyError

PIXELS = "pixel_values"
CODE = "pixel_values_code"
TABLE = "pixel_values_table"


def expand(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the three keys by `pixel_values`, float32 [patches, channels x temporal x patch^2];
    other inputs stay."""
    if CODE not in inputs:
        return dict(inputs)
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "training on pictures needs Pillow: pip install pillow"
        ) from error
    data = inputs[PIXELS].cpu().numpy()  # one transfer for all images of a micro-batch
    patches: list[Tensor] = []
    start = 0
    codes = cast(list[list[int]], inputs[CODE].tolist())  # pyright: ignore[reportUnknownMemberType]
    for (size, patch, temporal, merge), table in zip(codes, inputs[TABLE], strict=True):
        with Image.open(io.BytesIO(data[start : start + size].tobytes())) as image:
            pixels = torch.tensor(np.array(image)).to(table.device)
        start += size
        height, width, channels = pixels.shape
        values = torch.stack([table[c][pixels[:, :, c].long()] for c in range(channels)])
        # Qwen's order: patches of one merged token are neighbours.
        side = merge * patch
        blocks = values.reshape(channels, height // side, merge, patch, width // side, merge, patch)
        rows = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels, 1, patch * patch)
        patches.append(rows.expand(-1, -1, temporal, -1).reshape(len(rows), -1))
    others = {key: value for key, value in inputs.items() if key not in (PIXELS, CODE, TABLE)}
    return {PIXELS: torch.cat(patches), **others}
