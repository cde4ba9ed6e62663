"""Text for a terminal: bold and coloured where it is one, and without control characters of the environment."""

from __future__ import annotations

import sys

_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text with control characters other than line breaks and tabs shown as `\\x1b`."""
    return text.translate(_CONTROL)


def bold(text: str) -> str:
    return paint(text, "1")


def paint(text: str, code: str) -> str:
    """The text with an ANSI code, if stdout is a terminal."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text
