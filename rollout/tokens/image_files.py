"""Reads and writes images: PIL images, arrays, files and data URIs. Needs neither torch nor a model's processor."""

from __future__ import annotations

import base64
import io
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import EncodingError, MissingDependencyError

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 1 << 26
"""Limit of an image before it is scaled down; decoding one of this size takes 192 MiB."""

PNG_URI = "data:image/png;base64,"


def shrunk(image: Image.Image, max_pixels: int, side: int) -> Image.Image:
    """Scale the image down if it has more than `max_pixels` pixels, to multiples of `side`, a token's edge."""
    if image.width * image.height <= max_pixels:
        return image
    scale = (max_pixels / (image.width * image.height)) ** 0.5
    size = [max(side, int(length * scale) // side * side) for length in image.size]
    return image.resize((size[0], size[1]), pillow().Resampling.BICUBIC)


def pillow() -> ModuleType:
    """Pillow's `Image` module; an optional dependency."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pictures need Pillow; install it with: pip install pillow") from error
    return Image


def read_image(image: Any) -> Image.Image:
    """Return an RGB image from a PIL image, a uint8 array [height, width, 3], encoded bytes or a data URI.

    Raises EncodingError if it is something else or damaged, or has more than `MAX_PIXELS` pixels.
    """
    module = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", module.DecompressionBombWarning)
            opened = _open(image)
            if opened.width * opened.height > MAX_PIXELS:
                raise EncodingError(
                    f"a picture of {size_of(opened)} has more than {MAX_PIXELS} pixels; "
                    "the environment must send a smaller one"
                )
            return opened.convert("RGB")
    except EncodingError:
        raise
    except (OSError, ValueError, TypeError, SyntaxError, module.DecompressionBombError) as error:
        raise EncodingError(f"a picture given as {type(image).__name__} cannot be read: {error}") from error


def _open(image: Any) -> Image.Image:
    if isinstance(image, pillow().Image):
        return image
    if isinstance(image, np.ndarray):
        return pillow().fromarray(image)
    if isinstance(image, str) and image.startswith("data:"):
        image = base64.b64decode(image.partition(",")[2], validate=True)
    if isinstance(image, bytes):
        return pillow().open(io.BytesIO(image))
    raise TypeError("expected a PIL image, a uint8 array, the bytes of an image file or a data URI")


def write_png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def data_uri(image: Image.Image) -> str:
    """The image as a PNG data URI, a form that SGLang accepts in `image_data`."""
    return png_uri(write_png(image))


def png_uri(png: bytes) -> str:
    """A PNG file as data URI."""
    return PNG_URI + base64.b64encode(png).decode("ascii")


def png_of(uri: str) -> bytes | None:
    """The PNG file in a data URI; None for another text."""
    if not uri.startswith(PNG_URI):
        return None
    png = base64.b64decode(uri.removeprefix(PNG_URI))
    return png if png_uri(png) == uri else None


def size_of(image: Image.Image) -> str:
    """Width and height, for error texts."""
    return f"{image.width} x {image.height}"
