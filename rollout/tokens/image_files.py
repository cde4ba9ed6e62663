"""Reads and writes images: PIL images, arrays, files and data URIs. Needs neither torch nor a
model's processor."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from envs.base import import_pillow
from envs.images import ImageError, open_image
from rollout.errors import EncodingError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 1 << 26
"""Limit of an image before it is scaled down; decoding one of this size takes 192 MiB."""


def shrunk(image: Image.Image, max_pixels: int, side: int) -> Image.Image:
    """Scale the image down if it has more than `max_pixels` pixels, to multiples of `side`, a
    token's edge."""
    if image.width * image.height <= max_pixels:
        return image
    scale = (max_pixels / (image.width * image.height)) ** 0.5
    size = [max(side, int(length * scale) // side * side) for length in image.size]
    return image.resize((size[0], size[1]), import_pillow().Resampling.BICUBIC)


def read_image(image: Any) -> Image.Image:
    """Return an RGB image from a PIL image, a uint8 array [height, width, 3], encoded bytes or a
    data URI.

    Raises EncodingError if it is something else, damaged, too thin or without pixels, or has more
    than `MAX_PIXELS`.
    """
    if isinstance(image, str) and not image.startswith("data:"):
        raise EncodingError("a picture given as str cannot be read: text must be a data URI")
    try:
        return open_image(image, MAX_PIXELS)
    except ImageError as error:
        raise EncodingError(str(error)) from error


def write_png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def data_uri(image: Image.Image) -> str:
    """The image as a PNG data URI, a form that SGLang accepts in `image_data`."""
    return "data:image/png;base64," + base64.b64encode(write_png(image)).decode("ascii")


def size_of(image: Image.Image) -> str:
    """Width and height, for error texts."""
    return f"{image.width} x {image.height}"
