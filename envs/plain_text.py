"""Text to token ids: only the chat template writes control tokens, and each piece of text is
encoded once.

Control tokens split a conversation into pieces that a tokenizer encodes independently, so their ids
can be cached. The string of a control token inside a message (`<|im_end|>` in an observation) stays
ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TAG = re.compile(r"</?[a-z_]+>")
"""Tokens such as `<think>` and `</tool_call>`, which the model may write in its responses; they do
not change roles."""

STAND_INS = 0x100000
"""The first of the private-use characters that replace control strings while a template is
rendered."""

LONG_CHARS = 4096
"""Text with more characters takes milliseconds to encode, too long for an event loop."""

MAX_CACHED_CHARS = 32_768
"""Longer pieces (in characters) are not cached, which bounds the cache's memory."""

ASCII_OF = {
    "L": "A-Za-z",
    "N": "0-9",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
}
"""The ASCII characters of Unicode categories, in a character class."""

SYNTAX = re.compile(
    r"\\p\{(?P<category>\w+)\}|(?P<opened>\[\^?)|(?P<closed>\])|"
    r"\\[sSrn]|\(\?i:[a-z'|]+\)|\(\?[!:]|\)|\||(?:[?*+]|\{\d+(?:,\d+)?\})(?![?*+{])|[ '/A-Za-z]"
)
"""One element of an expression whose meaning is the same in Python's `re.ASCII` and in the
tokenizers' engine."""

ASCII_SAFE = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normalizers that do not change ASCII text."""

MAX_WORDS = 1 << 14
MAX_WORD_CHARS = 64
"""Limits of the cache: its number of words, and the characters of a word in it."""


@dataclass(frozen=True, slots=True)
class TemplateText:
    """Template text, split at its first and last control token."""

    head: str
    ids: tuple[int, ...] | None
    """Ids from the first control token to the last; None if there is none."""
    tail: str
    strip_before: bool = False
    """Whether white space before the first control token is dropped; `strip_after` likewise."""
    strip_after: bool = False


class PlainText:
    """Encodes text with the tokenizer's own rules but without control tokens; caches the ids of
    recent pieces."""

    def __init__(self, tokenizer: Any, template: str, *, cache_pieces: int = 2048) -> None:
        added = tokenizer.added_tokens_decoder
        self.control: dict[str, int] = {
            t.content: i for i, t in added.items() if _is_control(t, template)
        }
        self.control_ids = frozenset(self.control.values())
        self.pattern = _any_of(self.control)
        self._escaped = re.compile(f"{self.pattern.pattern}|[\U000f0000-\U0010ffff]")
        self._flags = {i: (t.lstrip, t.rstrip) for i, t in added.items()}
        self.bos_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self._tokenizer = tokenizer
        self._backend, self._renamed = _without_control(tokenizer, self.control)
        self._words = None if self._backend is None else WordCache.build(self._backend)
        self._cached = lru_cache(cache_pieces)(self._encode)
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._joins_bytes = isinstance(decoder, decoders.ByteLevel)
        self._text_of = lru_cache(1 << 16)(lambda token: self._decode((token,)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return token ids of ordinary text; strings of control tokens in it are text too."""
        return self._cached(text) if len(text) <= MAX_CACHED_CHARS else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if self._backend is None:
            return self._encode_in_python(text)
        if self._words is not None and len(text) <= MAX_CACHED_CHARS:
            found = self._words.encode(text)
            if found is not None:
                return tuple(found)
        if len(text) > LONG_CHARS:
            # Unlike `encode`, this releases the GIL.
            ids = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
        else:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        if self._renamed:
            ids = [self._renamed.get(i, i) for i in ids]
        return tuple(ids)

    def _encode_in_python(self, text: str) -> tuple[int, ...]:
        """Encode with a tokenizer written in Python, which may read control strings as control
        tokens all the same."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if self.control_ids.isdisjoint(ids):
            return tuple(ids)
        out = []
        begin = 0
        for end in (*(match.start() + 1 for match in self.pattern.finditer(text)), len(text)):
            out += self._tokenizer.encode(
                text[begin:end], add_special_tokens=False, split_special_tokens=True
            )
            begin = end
        return tuple(out)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including control tokens."""
        texts = self._texts(ids)
        return self._decode(ids) if texts is None else "".join(texts)

    def chars_within(self, ids: Sequence[int]) -> Callable[[int], int]:
        """Return a function from n to the number of characters that the first n tokens decode
        to."""
        texts = self._texts(ids)
        if texts is None:
            return lambda n: len(self.decode(ids[:n]))
        return [0, *accumulate(map(len, texts))].__getitem__

    def _texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return each token's text; None if a character is spread over several of them."""
        if not self._joins_bytes:
            return None
        texts = list(map(self._text_of, ids))
        return None if "\ufffd" in "".join(texts) else texts

    def _decode(self, ids: Sequence[int]) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def stand_ins(self, text: str, marks: dict[str, str]) -> str:
        """Return the text with private-use characters for control strings; `marks` collects
        both."""

        def mark(found: re.Match[str]) -> str:
            return marks.setdefault(found[0], chr(STAND_INS + len(marks)))

        return self._escaped.sub(mark, text)

    def defused(self, value: Any) -> Any:
        """Return message content with a space after the first character of every control string;
        images unchanged."""
        if isinstance(value, str):
            return self.pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
        if isinstance(value, Mapping):
            return {k: v if k in ("type", "image") else self.defused(v) for k, v in value.items()}
        return [self.defused(v) for v in value] if isinstance(value, list) else value

    def template_text(self, text: str, plain: Mapping[int, str] | None = None) -> TemplateText:
        """Split template text at its first and last control token; `plain` maps stand-ins back."""
        found = list(self.pattern.finditer(text))
        if not found:
            return TemplateText(_restored(text, plain), None, "")
        ids: list[int] = []
        for previous, match in zip([None, *found], found, strict=False):
            following = self.control[match.group()]
            if previous is not None:
                piece = _restored(text[previous.end() : match.start()], plain)
                piece = piece.lstrip() if self._flags[ids[-1]][1] else piece
                ids += self.encode(piece.rstrip() if self._flags[following][0] else piece)
            ids.append(following)
        head = _restored(text[: found[0].start()], plain)
        tail = _restored(text[found[-1].end() :], plain)
        strip_before, _ = self._flags[ids[0]]
        _, strip_after = self._flags[ids[-1]]
        return TemplateText(head, tuple(ids), tail, strip_before, strip_after)

    def join(self, parts: Sequence[TemplateText | str]) -> list[int]:
        """Return the ids of template and message text; text between two control tokens is encoded
        as one piece."""
        out: list[int] = []
        piece = ""
        strip = False
        for part in parts:
            if isinstance(part, str):
                piece += part
                continue
            piece += part.head
            if part.ids is None:
                continue
            piece = piece.lstrip() if strip else piece
            out += self.encode(piece.rstrip() if part.strip_before else piece)
            out += part.ids
            piece = part.tail
            strip = part.strip_after
        out += self.encode(piece.lstrip() if strip else piece)
        return out


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of one of the texts, the longest if several fit."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _restored(text: str, plain: Mapping[int, str] | None) -> str:
    return text.translate(plain) if plain else text


def _is_control(token: AddedToken, template: str) -> bool:
    """Special tokens, and others that the template writes (`<｜User｜>`) unless they are white
    space."""
    text = token.content
    return token.special or (text in template and not text.isspace() and not TAG.fullmatch(text))


def _without_control(
    tokenizer: Any, control: dict[str, int]
) -> tuple[Tokenizer | None, dict[int, int]]:
    """Return a copy of the tokenizer's pipeline without control tokens, and its ids that differ
    from the original's.

    The copy shares the model. Truncation or padding that other code sets on the original does not
    affect it.
    """
    original = getattr(tokenizer, "backend_tokenizer", None)
    if original is None:
        return None, {}
    backend = Tokenizer(original.model)
    if original.normalizer is not None:
        backend.normalizer = original.normalizer
    pre_tokenizer: Any = original.pre_tokenizer
    if (
        isinstance(pre_tokenizer, pre_tokenizers.Metaspace)
        and pre_tokenizer.prepend_scheme == "first"
    ):
        # Pieces follow a control token, so the prefix space of a text's first word is not theirs.
        pre_tokenizer = pre_tokenizers.Metaspace(
            pre_tokenizer.replacement, "never", pre_tokenizer.split
        )
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    harmless = {i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content not in control}
    backend.add_tokens(list(harmless.values()))
    renamed = {backend.token_to_id(t.content): i for i, t in harmless.items()}
    return backend, {copied: i for copied, i in renamed.items() if copied not in (None, i)}


class WordCache:
    """The words of one tokenizer and their ids; `build` makes one if the tokenizer allows it.
    Thread-safe.

    For byte-level BPE tokenizers that split text with one regular expression. Such a tokenizer
    encodes each match independently and spends most of its time on finding them. In ASCII text,
    Python finds the same matches several times faster, if the expression has only syntax that means
    the same in both.
    """

    def __init__(self, backend: Tokenizer, words: re.Pattern[str]) -> None:
        self._words = words
        self._model = backend.model
        self._bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._added = _any_of(
            token.content for token in backend.get_added_tokens_decoder().values()
        )
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def build(cls, backend: Tokenizer) -> WordCache | None:
        """None if words cannot be found or encoded one by one as this tokenizer does it."""
        model = backend.model
        normalizer = backend.normalizer
        splitter = backend.pre_tokenizer
        if not isinstance(model, models.BPE) or model.dropout or splitter is None:
            return None
        if normalizer is not None and not _keeps_ascii(_settings(normalizer)):
            return None
        words = None
        match _settings(splitter):
            case {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": pattern},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            }:
                words = ascii_pattern(pattern)
        return None if words is None else cls(backend, words)

    def encode(self, text: str) -> list[int] | None:
        """Ids of the text; None if it has other characters than ASCII, an added token, or a
        character in no word."""
        if not text.isascii() or self._added.search(text):
            return None
        words = self._words.findall(text)
        if len("".join(words)) != len(text):
            return None
        ids: list[int] = []
        known = self._ids
        for word in words:
            found = known.get(word)
            if found is None:
                symbols = "".join(piece for piece, _ in self._bytes.pre_tokenize_str(word))
                found = tuple(token.id for token in self._model.tokenize(symbols))
                if len(word) <= MAX_WORD_CHARS:
                    if len(known) >= MAX_WORDS:
                        known.clear()
                    known[word] = found
            ids += found
        return ids


def _settings(component: Any) -> dict[str, Any]:
    """A normalizer or pre-tokenizer as `tokenizer.json` describes it."""
    return json.loads(component.__getstate__())


def _keeps_ascii(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_ascii, normalizer["normalizers"]))
    return normalizer["type"] in ASCII_SAFE


def ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """A tokenizer's expression for ASCII text, as Python writes it; None if it has syntax that is
    not in `SYNTAX`."""
    translated = ""
    at = 0
    inside = False
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
        translated = translated + written
        at = element.end()
    try:
        return re.compile(translated, re.ASCII)
    except re.error:
        return None
