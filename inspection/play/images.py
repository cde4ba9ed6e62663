"""Writes an observation's images to files, and shows them in terminals that can."""

import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from slime_verlog import ConfigError

BLOCK_COLUMNS = 64
"""Width of an image drawn with half blocks; each character shows two pixels, one above the other."""
PIECE = 4096
"""Bytes of base64 per escape sequence of kitty's protocol."""


class Images:
    """Shows images one after another; their files are numbered."""

    def __init__(self, folder: Path, way: str, out: TextIO) -> None:
        self._folder, self._out = folder, out
        self._way = choose_way(os.environ, out.isatty()) if way == "auto" else way
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
        drawn = draw(image, self._way)
        if drawn:
            self._out.write(drawn + "\n")
        return f"[picture {image.size[0]} x {image.size[1]}: {path}]"


def choose_way(environment: Mapping[str, str], is_terminal: bool) -> str:
    """Return the best way that the terminal says it can: kitty, iterm, blocks, or only a file."""
    if not is_terminal:
        return "file"
    program, inside = environment.get("TERM_PROGRAM", ""), "TMUX" in environment
    if not inside and ("KITTY_WINDOW_ID" in environment or program == "ghostty"):
        return "kitty"
    if not inside and program in ("iTerm.app", "WezTerm"):
        return "iterm"
    return "blocks" if environment.get("COLORTERM") in ("truecolor", "24bit") else "file"


def draw(image: Any, way: str) -> str:
    """Return the characters and escape sequences that draw the image; empty for `file`."""
    if way == "blocks":
        return half_blocks(image)
    if way not in ("kitty", "iterm"):
        return ""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    if way == "iterm":
        return f"\033]1337;File=inline=1;size={len(buffer.getvalue())}:{data}\a"
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    return "".join(
        f"\033_G{'a=T,f=100,' * (number == 0)}m={int(number < len(pieces) - 1)};{piece}\033\\"
        for number, piece in enumerate(pieces)
    )


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
