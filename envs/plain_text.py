"""Encodes text to token ids; only the chat template may write control tokens.

Control tokens divide a conversation into pieces that a tokenizer encodes independently, so the ids of a piece can be
cached. The string of a control token inside a message (`<|im_end|>` in an observation) stays ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

TAG = re.compile(r"</?[a-z_]+>")
"""Tokens such as `<think>` and `</tool_call>`, which models write in their answers and which do not change the role."""

STAND_INS = 0x100000
"""First of the private-use characters that replace control strings while a template is rendered."""

LONG_CHARS = 4096
"""Texts with more characters take milliseconds to encode, too long for an event loop."""

LONGEST_KEPT = 32_768
"""Characters of the longest piece that is cached, to bound the cache's memory."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Template text, split at its first and last control token."""

    head: str
    ids: tuple[int, ...] | None
    """Ids from the first to the last control token; None if there is none."""
    tail: str
    strip_before: bool = False
    strip_after: bool = False


class PlainText:
    """Encodes text with the tokenizer's rules except for its control tokens, and caches the ids of recent pieces."""

    def __init__(self, tokenizer: Any, template: str, *, cache_pieces: int = 2048) -> None:
        added = tokenizer.added_tokens_decoder
        self.control: dict[str, int] = {t.content: i for i, t in added.items() if _is_control(t, template)}
        self.control_ids = frozenset(self.control.values())
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or r"(?!)")
        self._escaped = re.compile(f"{self.pattern.pattern}|[\U000f0000-\U0010ffff]")
        self._flags = {i: (t.lstrip, t.rstrip) for i, t in added.items()}
        self.bos_id: int | None = getattr(tokenizer, "bos_token_id", None)
        self._tokenizer = tokenizer
        self._backend, self._renamed = _without_control(tokenizer, self.control)
        self._cached = lru_cache(cache_pieces)(self._encode)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text; none of them is a control token."""
        return self._cached(text) if len(text) <= LONGEST_KEPT else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if self._backend is None:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if len(text) > LONG_CHARS:
            # Unlike `encode`, this releases the GIL.
            ids = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
        else:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        return tuple(self._renamed.get(i, i) for i in ids) if self._renamed else tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def stand_ins(self, text: str, marks: dict[str, str]) -> str:
        """The text with a private-use character for each control string and each private-use character.

        `marks` collects these characters by the string that they replace; `frame` takes the inverse.
        """
        return self._escaped.sub(lambda m: marks.setdefault(m.group(), chr(STAND_INS + len(marks))), text)

    def broken(self, value: Any) -> Any:
        """The value with a space after the first character of every control string; pictures are unchanged."""
        if isinstance(value, str):
            return self.pattern.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", value)
        if isinstance(value, Mapping):
            return {k: v if k in ("type", "image") else self.broken(v) for k, v in value.items()}
        return [self.broken(v) for v in value] if isinstance(value, list) else value

    def frame(self, text: str, plain: Mapping[int, str] | None = None) -> Frame:
        """Split template text, whose control strings become control tokens, at the first and the last of them.

        `plain` maps the code points of stand-ins back to the strings that they replace.
        """
        found = list(self.pattern.finditer(text))
        if not found:
            return Frame(_restored(text, plain), None, "")
        ids: list[int] = []
        for previous, match in zip([None, *found], found, strict=False):
            if previous is not None:
                piece = _restored(text[previous.end() : match.start()], plain)
                ids += self.encode(self._stripped(piece, previous, match))
            ids.append(self.control[match.group()])
        head, tail = text[: found[0].start()], text[found[-1].end() :]
        before, after = self._flags[ids[0]][0], self._flags[ids[-1]][1]
        return Frame(_restored(head, plain), tuple(ids), _restored(tail, plain), before, after)

    def _stripped(self, piece: str, previous: re.Match[str], following: re.Match[str]) -> str:
        """Remove the white space that the tokens on both sides absorb (`rstrip`, `lstrip`)."""
        piece = piece.lstrip() if self._flags[self.control[previous.group()]][1] else piece
        return piece.rstrip() if self._flags[self.control[following.group()]][0] else piece

    def join(self, parts: Sequence[Frame | str]) -> list[int]:
        """Ids of frames and message texts in turn; the text between two control tokens is one piece."""
        out: list[int] = []
        piece, strip = "", False
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
            piece, strip = part.tail, part.strip_after
        out += self.encode(piece.lstrip() if strip else piece)
        return out


def _restored(text: str, plain: Mapping[int, str] | None) -> str:
    return text.translate(plain) if plain else text


def _is_control(token: AddedToken, template: str) -> bool:
    """Whether a token is special or written by the template (DeepSeek's `<｜User｜>` is not marked special).

    White space is text, even if it is one token (Gemma's line breaks).
    """
    text = token.content
    return token.special or (text in template and not text.isspace() and not TAG.fullmatch(text))


def _without_control(tokenizer: Any, control: dict[str, int]) -> tuple[Tokenizer | None, dict[int, int]]:
    """A copy of the tokenizer's pipeline without control tokens, and a map from its ids to the tokenizer's.

    The copy shares the model, but neither truncation nor padding.
    """
    original = getattr(tokenizer, "backend_tokenizer", None)
    if original is None:
        return None, {}
    backend = Tokenizer(original.model)
    if original.normalizer is not None:
        backend.normalizer = original.normalizer
    if original.pre_tokenizer is not None:
        backend.pre_tokenizer = _inside_text(original.pre_tokenizer)
    harmless = {t.content: (i, t) for i, t in tokenizer.added_tokens_decoder.items() if t.content not in control}
    backend.add_tokens([t for _, t in harmless.values()])
    ids = [(backend.token_to_id(content), i) for content, (i, _) in harmless.items()]
    return backend, {ours: original for ours, original in ids if ours is not None and ours != original}


def _inside_text(pre_tokenizer: Any) -> Any:
    """Pieces follow a control token, so they must not get the prefix space of a text's first word."""
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace) and pre_tokenizer.prepend_scheme == "first":
        return pre_tokenizers.Metaspace(pre_tokenizer.replacement, "never", pre_tokenizer.split)
    return pre_tokenizer
