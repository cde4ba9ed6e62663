"""Collects what the files of a tree hold: the literals of Python files, and the text of all
files."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.swe.sandbox.usage import walk
from envs.swe.verdict.encoding import encode, loosely
from envs.swe.verdict.values import Unreadable, decode

_MAX_BYTES = 4 << 20
_SHORTEST = 4
"""Characters from which on the written form of a value is searched in texts."""


@dataclass(frozen=True)
class Literals:
    """Values as `loosely` writes them, and texts."""

    values: frozenset[str]
    text: str

    def holds(self, encoded: Any) -> bool:
        """Whether a value stands in one of the files, by itself or in a larger one."""
        if loosely(encoded) in self.values:
            return True
        if isinstance(encoded, str):
            return encoded in self.text
        try:
            written = repr(decode(encoded))
        except Unreadable:
            return False
        return len(written) >= _SHORTEST and written in self.text


def literals_in(tree: Path) -> Literals:
    """Read all files of a tree; what is neither Python nor text, or too large, is left out."""
    values = set[str]()
    texts = list[str]()
    for entry in walk(tree, (".git",)):
        if not entry.is_file(follow_symlinks=False) or entry.stat().st_size > _MAX_BYTES:
            continue
        try:
            text = Path(entry.path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(text)
        if entry.name.endswith(".py"):
            for value in _literals_of(text):
                values.add(loosely(encode(value)))
                if isinstance(value, str):
                    texts.append(value)
    return Literals(frozenset(values), "\0".join(texts))


def _literals_of(source: str) -> Iterator[Any]:
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(module):
        if isinstance(node, ast.Constant | ast.UnaryOp | ast.List | ast.Tuple | ast.Set | ast.Dict):
            try:
                yield ast.literal_eval(node)
            except (ValueError, TypeError):
                continue
