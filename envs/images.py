"""Opens images of every kind: PIL images, arrays, files, data URIs, rows of a parquet file."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.base import import_pillow
from envs.errors import EnvironmentFault

MAX_PIXELS = 4096 * 4096
MAX_BYTES = 64 << 20
MAX_RATIO = 200
"""Of the longer side to the shorter one; Qwen's processors refuse more."""
ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held; 1 is upright."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow knows many more, among them PostScript, which it would run."""


class ImageError(EnvironmentFault):
    """An image cannot be read, has no pixels, or is too large or too thin."""


class TooManyPixelsError(ImageError):
    """An image has more pixels than the caller allows."""


def is_image(value: Any) -> bool:
    """Return whether it is a PIL image, a uint8 array [height, width, 3] or a row `{"bytes": ...}`
    of a data set."""
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    if getattr(value, "ndim", None) == 3:
        return str(getattr(value, "dtype", "")) == "uint8"
    return type(value).__module__.startswith("PIL.")


def open_image(value: Any, max_pixels: int = MAX_PIXELS) -> Any:
    """Decode an image to an RGB PIL image. An RGB PIL image is returned itself, so caches keyed by
    identity stay warm.

    Accepts what `is_image` accepts, the bytes of an image file, a path, a data URI, and `{"path":
    ...}`.

    Raises:
        ImageError: it cannot be read, or has no pixels, more than `max_pixels` pixels or more than
            8 bits per color.
        MissingDependencyError: Pillow is not installed.
    """
    pillow = import_pillow()
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            image = _open(value, pillow)
            size = f"a picture of {image.width} x {image.height}"
            if image.width * image.height > max_pixels:
                raise TooManyPixelsError(f"{size} has more than the {max_pixels} pixels allowed")
            if not all(image.size):
                raise ImageError(f"{size} has no pixels")
            if max(image.size) > MAX_RATIO * min(image.size):
                raise ImageError(f"{size} is thinner than 1 : {MAX_RATIO}")
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"its mode {image.mode} has more than 8 bits per color, which would be cut to "
                    "0..255"
                )
            image.load()
            if image.getexif().get(ORIENTATION, 1) != 1:
                # Turned as the camera says, which models cannot.
                image = ImageOps.exif_transpose(image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except (
        OSError,
        ValueError,
        TypeError,
        SyntaxError,
        EOFError,
        pillow.DecompressionBombError,
    ) as error:
        # Pillow names the object that holds the bytes, with an address that differs in every run.
        reason = re.sub(r"(?: file)? <[^<>]* at 0x[0-9a-f]+>", "", str(error))
        named = isinstance(value, str | Path) and not str(value).startswith("data:")
        given = (named and str(value)[:200]) or type(value).__name__
        raise ImageError(f"a picture given as {given} cannot be read: {reason}") from error


def _open(value: Any, pillow: Any) -> Any:
    if isinstance(value, pillow.Image):
        return value
    if hasattr(value, "ndim"):
        shape = tuple(value.shape)
        if len(shape) == 3 and shape[2] == 1:
            value, shape = value[:, :, 0], shape[:2]
        if str(value.dtype) != "uint8" or shape[2:] not in ((), (3,), (4,)) or len(shape) < 2:
            raise TypeError(
                f"expected uint8 of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), got "
                f"{value.dtype} of {shape}"
            )
        return pillow.fromarray(value)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image") or value.get("url")
    if isinstance(value, str) and value.startswith("data:"):
        try:
            value = base64.b64decode(value.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its base64 is damaged ({error})") from error
    if isinstance(value, str | Path):
        if Path(value).stat().st_size > MAX_BYTES:
            raise ValueError(f"the file has more than {MAX_BYTES >> 20} MiB")
        value = Path(value).read_bytes()
    if isinstance(value, bytes):
        pillow.init()  # some formats are registered only then
        return pillow.open(io.BytesIO(value), formats=FORMATS)
    raise TypeError(
        "expected a PIL image, a uint8 array, the bytes or path of an image file, or a data URI"
    )
