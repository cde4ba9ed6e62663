"""Turns the token ids of slime's dumps into text, if a tokenizer is at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime_verlog import ConfigError


class Decoder:
    """Decodes with a tokenizer; without one, tokens are shown as their ids."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @classmethod
    def find(cls, folder: str | None, dumps: Iterable[Path]) -> Decoder:
        """The decoder for a tokenizer's folder; by default the `tokenizer` that slime puts beside its dumps.

        Raises:
            ConfigError: no tokenizer can be loaded from `folder`.
        """
        beside = [path.parent.parent / "tokenizer" for path in dumps]
        chosen = folder or next((str(path) for path in beside if path.is_dir()), None)
        if chosen is None:
            return cls()
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(chosen))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no tokenizer can be loaded from {chosen!r}: {str(error).splitlines()[0]}") from error

    def prompt(self, ids: Sequence[int], given: Any = None) -> Any:
        """The prompt as text with its control tokens; without a tokenizer, `given` (slime's own prompt) or a note."""
        if self._tokenizer is not None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return given or f"A prompt of {len(ids)} tokens. To read it, give --tokenizer with the model's folder."

    def answer(self, ids: Sequence[int]) -> str:
        """The answer's text, without the token that ends it."""
        if self._tokenizer is not None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return f"An answer of {len(ids)} tokens. To read it, give --tokenizer with the model's folder."

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """One text per token. A character that spans several tokens is put at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts, waiting = [], []
        for token in ids:
            waiting.append(token)
            text = self._tokenizer.decode(waiting, skip_special_tokens=False)
            whole = not text.endswith("\ufffd") or len(waiting) > 4
            texts.append(text if whole else "")
            waiting = [] if whole else waiting
        return texts
