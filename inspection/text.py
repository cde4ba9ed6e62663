"""Text for a terminal: aligned, bold and coloured, and without control characters of an
environment."""

import argparse
import sys
import textwrap
from collections.abc import Sequence

_CONTROL = {
    code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fits the paragraphs of a description to the terminal (COLUMNS); indented lines, such as
    commands, stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            part if part.startswith(" ") else textwrap.fill(part, width) for part in parts
        )


def printable(text: str) -> str:
    """The text with control characters other than line breaks and tabs shown as `\\x1b`."""
    return text.translate(_CONTROL)


def bold(text: str) -> str:
    return paint(text, "1")


def paint(text: str, code: str) -> str:
    """Return the text with an ANSI code, if stdout is a terminal."""
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def align(rows: Sequence[Sequence[str]], left: int | None = None, border: str = "  ") -> list[str]:
    """Return the rows as lines with aligned columns; those after the first `left` are aligned to
    the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if left is None else left
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        lines.append(border.join(cells).rstrip())
    return lines
