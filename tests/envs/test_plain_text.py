"""The text of token ids is what the tokenizer itself decodes."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.plain_text import PlainText
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.tokenizers import FAMILIES, real_tokenizer

TEXT = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=8),
        st.sampled_from(
            ["\n", "\r\n", "  ", " \n ", "'s", "'LL", "don't", "!\n/", "\x0b", "\x1c", "<tool_call>", "é🙂"]
        ),
        st.from_regex(r"\A[ A-Za-z]{1,9}[0-9]{0,5}[.,!?/]{0,3}\Z"),
    ),
    max_size=12,
).map("".join)


@cache
def plain_text(family: str) -> PlainText:
    tokenizer = chatml_tokenizer() if family == "chatml" else real_tokenizer(family)
    return PlainText(tokenizer, tokenizer.chat_template)


@pytest.mark.parametrize("family", ("chatml", *FAMILIES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.one_of(TEXT, st.text("é🙂 a\n汉", max_size=8)), cut=st.integers(0, 20))
def test_text_of_tokens_is_what_the_tokenizer_decodes(family: str, text: str, cut: int) -> None:
    encoder = plain_text(family)
    ids = [*encoder.encode(text), *encoder.control.values()][cut:]
    backend = encoder._tokenizer.backend_tokenizer
    assert encoder.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    chars = encoder.chars_within(ids)
    assert chars(len(ids) // 2) == len(backend.decode(ids[: len(ids) // 2], skip_special_tokens=False))
