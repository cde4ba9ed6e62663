"""Writes an observation's images to files, and draws them in terminals with true colour."""

import os
from pathlib import Path
from typing import Any, TextIO

from slime_verlog import ConfigError

BLOCK_COLUMNS = 64
"""Width of an image drawn with half blocks; each character shows two pixels, one above the other."""


class Images:
    """Shows images one after another; their files are numbered."""

    def __init__(self, folder: Path, out: TextIO) -> None:
        self._folder, self._out = folder, out
        self._draws = out.isatty() and os.environ.get("COLORTERM") in ("truecolor", "24bit")
        self._count = 0

    def show(self, image: Any) -> str:
        """Draw an image, and return a text that names its file and size."""
        path = self._folder / f"picture_{self._count:04}.png"
        self._count += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            image.save(path)
        except OSError as error:
            raise ConfigError(f"--out: {path} cannot be written: {error.strerror}") from error
        if self._draws:
            self._out.write(half_blocks(image) + "\n")
        return f"[picture {image.size[0]} x {image.size[1]}: {path}]"


def half_blocks(image: Any, columns: int = BLOCK_COLUMNS) -> str:
    """Return the image as rows of upper half blocks in true colour."""
    columns = min(columns, image.size[0])
    rows = max(2, round(image.size[1] * columns / image.size[0]) // 2 * 2)
    small = image.convert("RGB").resize((columns, rows))
    lines = []
    for y in range(0, rows, 2):
        pairs = [(small.getpixel((x, y)), small.getpixel((x, y + 1))) for x in range(columns)]
        line = "".join(f"\033[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in pairs)
        lines.append(line + "\033[0m")
    return "\n".join(lines)
