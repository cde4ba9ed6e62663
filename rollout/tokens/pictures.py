"""Reads and writes pictures: PIL images, arrays, files and data URIs. Needs neither torch nor a model's processor."""

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
"""Limit of a picture before it is scaled down; decoding one of this size takes 192 MiB."""

PNG_URI = "data:image/png;base64,"


def shrunk(picture: Image.Image, max_pixels: int, side: int) -> Image.Image:
    """The picture, scaled down if it has more than `max_pixels` pixels.

    The sides of a scaled picture are multiples of `side`, the pixels along one token's edge. A processor that rounds
    to whole tokens then cannot exceed `max_pixels`.
    """
    if picture.width * picture.height <= max_pixels:
        return picture
    scale = (max_pixels / (picture.width * picture.height)) ** 0.5
    size = [max(side, int(length * scale) // side * side) for length in picture.size]
    return picture.resize((size[0], size[1]), pillow().Resampling.BICUBIC)


def pillow() -> ModuleType:
    """Pillow's `Image` module; an optional dependency."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pictures need Pillow; install it with: pip install pillow") from error
    return Image


def read_image(image: Any) -> Image.Image:
    """An RGB picture from a PIL image, a uint8 array [height, width, 3], encoded bytes or a data URI.

    Raises:
        EncodingError: it has another type, cannot be decoded, or has more than `MAX_PIXELS` pixels.
        MissingDependencyError: Pillow is not installed.
    """
    module = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", module.DecompressionBombWarning)
            picture = _open(image)
            if picture.width * picture.height > MAX_PIXELS:
                raise EncodingError(
                    f"a picture of {size_of(picture)} has more than {MAX_PIXELS} pixels; "
                    "the environment must send a smaller one"
                )
            return picture.convert("RGB")
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


def write_png(picture: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def data_uri(picture: Image.Image) -> str:
    """The picture as a PNG data URI, a form that SGLang accepts in `image_data`."""
    return png_uri(write_png(picture))


def png_uri(png: bytes) -> str:
    """A PNG file as data URI."""
    return PNG_URI + base64.b64encode(png).decode("ascii")


def png_of(uri: str) -> bytes | None:
    """The PNG file in a data URI; None for another text."""
    if not uri.startswith(PNG_URI):
        return None
    png = base64.b64decode(uri.removeprefix(PNG_URI))
    return png if png_uri(png) == uri else None


def size_of(picture: Image.Image) -> str:
    """Width and height, for error texts."""
    return f"{picture.width} x {picture.height}"
