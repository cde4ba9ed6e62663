"""Draws other literal arguments for tests that the agent could read, so that hard-coded answers are wrong.

Changes are mild: numbers from 2 on grow by the same small amount, and letters of short texts move along the alphabet.
Equal literals stay equal and keep their order. The reference solution decides what the answers are.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence

from envs.swe.verdict.claims import Function

MAX_TEXT = 20


def draw_literals(function: Function, seed: int) -> None:
    """Change the numbers and texts of a test function; the same seed makes the same changes."""
    rng = random.Random(f"{seed} {function.name}")
    step, turn = rng.randint(1, 3), rng.randint(1, 5)
    kept = {id(node) for outer in ast.walk(function) for node in _kept(outer)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Constant) or id(node) in kept:
            continue
        if isinstance(node.value, str) and len(node.value) <= MAX_TEXT:
            node.value = "".join(_turned(letter, turn) for letter in node.value)
        elif isinstance(node.value, int | float) and not isinstance(node.value, bool) and node.value >= 2:
            node.value += step


def _kept(node: ast.AST) -> Sequence[ast.AST]:
    """Literals that are names or formats rather than values."""
    if isinstance(node, ast.JoinedStr):
        return list(ast.walk(node))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("parametrize", "getattr", "setattr", "hasattr", "encode", "decode", "open"):
            return node.args[:2]
    return []


def _turned(letter: str, turn: int) -> str:
    for first in "aA":
        place = ord(letter) - ord(first)
        if 0 <= place < 26:
            return chr(ord(first) + (place + turn) % 26)
    return letter
