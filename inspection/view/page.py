"""Puts template, style, script and packed episodes together as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from inspection.view.packing import compress, to_json

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = (
    "dom.js",
    "data.js",
    "state.js",
    "summary.js",
    "list.js",
    "search.js",
    "answer.js",
    "transcript.js",
    "world.js",
    "episode.js",
    "keys.js",
    "main.js",
)


def build_page(title: str, head: Mapping[str, Any], chunks: Sequence[str], atlases: Mapping[int, bytes]) -> str:
    """The page as text.

    Args:
        head: what the page needs at once: the runs' names, and one row per episode.
        chunks: the episodes, as `Packer.blocks` returns them.
        atlases: for each tile size in pixels, the PNG picture with all tiles.
    """
    style = _read("style.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_read(name) for name in _SCRIPTS) + "\n})();\n"
    blocks = [_block("head", compress(to_json(head)))]
    blocks += [_block(f"chunk-{number}", chunk) for number, chunk in enumerate(chunks)]
    blocks += [_block(f"atlas-{size}", base64.b64encode(png).decode("ascii")) for size, png in atlases.items()]
    return Template(_read("page.html")).substitute(
        policy=_policy(style, script), title=html.escape(title), style=style, script=script, data="\n".join(blocks)
    )


def write_page(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader never sees half a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _policy(style: str, script: str) -> str:
    """A content security policy: this style, this script, embedded pictures, and no HTML made from strings."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _block(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="{name}">{text}</script>'


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
