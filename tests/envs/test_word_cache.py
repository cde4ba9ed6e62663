"""Words from the cache give the ids of the whole text, on every tokenizer that splits text with one
expression."""

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from envs import plain_text as texts
from envs.plain_text import PlainText, WordCache, ascii_pattern
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.tokenizers import FAMILIES, real_tokenizer

CACHED = ("qwen2_5", "qwen3", "llama3_2", "mistral_nemo")
TEXT = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=8),
        st.sampled_from(
            [
                "\n",
                "\r\n",
                "  ",
                " \n ",
                "'s",
                "'LL",
                "don't",
                "!\n/",
                "\x0b",
                "\x1c",
                "<tool_call>",
                "é🙂",
            ]
        ),
        st.from_regex(r"\A[ A-Za-z]{1,9}[0-9]{0,5}[.,!?/]{0,3}\Z"),
    ),
    max_size=12,
).map("".join)


@cache
def plain_text(family: str) -> PlainText:
    tokenizer = chatml_tokenizer() if family == "chatml" else real_tokenizer(family)
    return PlainText(tokenizer, tokenizer.chat_template)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXT)
@example(text="a" * 100 + "\t\t b" + "x y" * 30)
def test_ids_are_those_of_the_tokenizers_own_pipeline(text: str) -> None:
    for family in ("chatml", *FAMILIES):
        encoder = plain_text(family)
        expected = encoder._backend.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text) == tuple(encoder._renamed.get(i, i) for i in expected), family


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_that_split_text_otherwise_have_no_cache(family: str) -> None:
    assert (plain_text(family)._words is not None) == (family in CACHED)


@pytest.mark.parametrize("family", CACHED)
def test_other_characters_and_added_tokens_go_to_the_tokenizer(family: str) -> None:
    words = plain_text(family)._words
    assert words.encode("a red key") and words.encode("eine Tür") is None
    added = plain_text(family)._backend.get_added_tokens_decoder().values()
    assert all(words.encode(f"a{token.content}b") is None for token in added)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\s+)|\S+",
        r"[a-z&&[^b]]+|\s",
        r"^a|.",
        r"\p{Han}+|\s+",
        r"(?m:a.b)|\s",
        r"\w+|\s+",
    ],
)
def test_an_expression_that_may_mean_something_else_in_python_is_refused(pattern: str) -> None:
    assert ascii_pattern(pattern) is None


def bpe(**changes: Any) -> Tokenizer:
    letters = {letter: k for k, letter in enumerate("abĠ")}
    backend = Tokenizer(models.BPE(letters, [], **changes))
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def test_random_splits_and_rewritten_text_are_not_cached() -> None:
    assert WordCache.build(bpe()) is not None
    assert WordCache.build(bpe(dropout=0.5)) is None
    rewriting = bpe()
    rewriting.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert WordCache.build(rewriting) is None


def test_the_cache_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_WORDS", 3)
    words = WordCache.build(bpe())
    for text in ("a b ab", "ba aa bb", "ab " * 3, "a" * 1000):
        assert words.encode(text) == bpe().encode(text).ids
        assert len(words._ids) <= 3 and max(map(len, words._ids)) <= texts.MAX_WORD_CHARS


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.one_of(TEXT, st.text("é🙂 a\n汉", max_size=8)), cut=st.integers(0, 20))
def test_text_of_tokens_is_what_the_tokenizer_decodes(text: str, cut: int) -> None:
    for family in ("chatml", *FAMILIES):
        encoder = plain_text(family)
        ids = [*encoder.encode(text), *encoder.control.values()][cut:]
        backend = encoder._tokenizer.backend_tokenizer
        assert encoder.decode(ids) == backend.decode(ids, skip_special_tokens=False), family
        chars = encoder.chars_within(ids)
        assert chars(len(ids) // 2) == len(
            backend.decode(ids[: len(ids) // 2], skip_special_tokens=False)
        ), family
