"""Encodes ASCII text from a cache of words, for byte-level BPE tokenizers that split text with one regular expression.

Such a tokenizer encodes each match of its expression independently and spends most of its time on finding them. Python
finds the same matches several times faster, if the expression has only syntax that means the same in both.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

ASCII_OF = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""The ASCII characters of Unicode categories, in a character class."""

SYNTAX = re.compile(
    r"\\p\{(?P<category>\w+)\}|(?P<opened>\[\^?)|(?P<closed>\])|"
    r"\\[sSrn]|\(\?i:[a-z'|]+\)|\(\?[!:]|\)|\||(?:[?*+]|\{\d+(?:,\d+)?\})(?![?*+{])|[ '/A-Za-z]"
)
"""One element of an expression whose meaning is the same in Python's `re.ASCII` and in the tokenizers' engine."""

ASCII_SAFE = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normalizers that do not change ASCII text."""

MAX_WORDS = 1 << 14
MAX_WORD_CHARS = 64
"""Limits of the cache: its number of words, and the characters of a word in it."""


class WordCache:
    """The words of one tokenizer and their ids; `build` makes one if the tokenizer allows it. Thread-safe."""

    def __init__(self, backend: Tokenizer, words: re.Pattern[str]) -> None:
        self._words = words
        self._model = backend.model
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        added = sorted(token.content for token in backend.get_added_tokens_decoder().values())
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def build(cls, backend: Tokenizer) -> WordCache | None:
        """None if words cannot be found or encoded one by one as this tokenizer does it."""
        model, normalizer, splitter = backend.model, backend.normalizer, backend.pre_tokenizer
        if not isinstance(model, models.BPE) or model.dropout or splitter is None:
            return None
        if normalizer is not None and not _keeps_ascii(_settings(normalizer)):
            return None
        words = _word_pattern(_settings(splitter))
        return None if words is None else cls(backend, words)

    def encode(self, text: str) -> list[int] | None:
        """Ids of the text; None if it has other characters than ASCII, an added token, or a character in no word."""
        if not text.isascii() or self._added.search(text):
            return None
        words = self._words.findall(text)
        if len("".join(words)) != len(text):
            return None
        ids: list[int] = []
        known = self._ids
        for word in words:
            ids += known.get(word) or self._encoded(word)
        return ids

    def _encoded(self, word: str) -> tuple[int, ...]:
        symbols = "".join(piece for piece, _ in self._bytes.pre_tokenize_str(word))
        ids = tuple(token.id for token in self._model.tokenize(symbols))
        if len(word) <= MAX_WORD_CHARS:
            if len(self._ids) >= MAX_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def _settings(component: Any) -> dict[str, Any]:
    """A normalizer or pre-tokenizer as `tokenizer.json` describes it."""
    return json.loads(component.__getstate__())


def _keeps_ascii(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_ascii, normalizer["normalizers"]))
    return normalizer["type"] in ASCII_SAFE


def _word_pattern(pre_tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The expression that finds a pre-tokenizer's words in ASCII text; None for a pre-tokenizer of another kind."""
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return ascii_pattern(pattern)
    return None


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """A tokenizer's expression for ASCII text, as Python writes it; None if it has syntax that is not in `SYNTAX`."""
    translated, at, inside = "", 0, False
    while at < len(pattern):
        element = SYNTAX.match(pattern, at)
        if element is None or (element["opened"] and inside):
            return None
        written = element.group()
        if (category := element["category"]) is not None:
            if category not in ASCII_OF:
                return None
            written = ASCII_OF[category] if inside else f"[{ASCII_OF[category]}]"
        inside = bool(element["opened"]) or (inside and not element["closed"])
        translated, at = translated + written, element.end()
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
