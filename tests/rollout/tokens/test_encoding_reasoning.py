"""Thinking models: earlier reasoning in both modes, in training and rollout."""

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import CHAT_TEMPLATE, chatml_tokenizer
from tests.fixtures.messages import answer, response, user
from tests.fixtures.tokenizers import real_tokenizer

property_test = settings(max_examples=80, deadline=None)


@cache
def encoder_of(thinking: bool = True, inference: bool = False) -> DeltaEncoder:
    return DeltaEncoder(
        real_tokenizer("qwen3"),
        chat_template_kwargs={"enable_thinking": thinking},
        use_inference_chat_template=inference,
    )


def kept_reasoning(messages: list[dict[str, Any]], thinking: bool) -> list[int]:
    """Qwen3's one-shot encoding if its template kept the reasoning of every answer that has
    some."""
    tokenizer = real_tokenizer("qwen3")
    template = tokenizer.chat_template
    for old, new in (
        ("loop.index0 > ns.last_query_index", "reasoning_content"),
        ("loop.last or (not loop.last and reasoning_content)", "true"),
    ):
        assert old in template
        template = template.replace(old, new)
    return _ids(messages, thinking, template)


def production(messages: list[dict[str, Any]], thinking: bool) -> list[int]:
    return _ids(messages, thinking, None)


def _ids(messages: list[dict[str, Any]], thinking: bool, template: str | None) -> list[int]:
    return real_tokenizer("qwen3").apply_chat_template(
        messages,
        chat_template=template,
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_dict=True,
    )["input_ids"]


TEXT = st.sampled_from(["go left", "ACTION: open\nthe door", "42", "Tür 🙂"])


@st.composite
def answers(draw: Any) -> dict[str, Any]:
    thought = draw(st.sampled_from([None, "because", "first\n\nsecond"]))
    text = draw(TEXT)
    if thought is None:
        return answer(text)
    if draw(st.booleans()):
        return answer(text, reasoning_content=thought)
    return answer(f"<think>\n{thought}\n</think>\n\n{text}")


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}


@st.composite
def answers_with_calls(draw: Any) -> dict[str, Any]:
    own = draw(answers())
    content = draw(st.sampled_from(["", "\n", "\n\n "])) + own["content"]
    return {**own, "content": content, "tool_calls": [CALL]}


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "Play."}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        messages += [user(draw(TEXT)), draw(answers() | answers_with_calls())]
        if draw(st.booleans()):
            messages.append({"role": "tool", "content": draw(TEXT)})
            messages += draw(st.lists(answers(), max_size=1))
    return [*messages, user(draw(TEXT))]


@pytest.mark.parametrize("thinking", [True, False])
@property_test
@given(messages=conversations())
def test_the_default_keeps_all_reasoning_and_the_inference_template_shows_what_production_sees(
    thinking: bool, messages: Any
) -> None:
    assert encoder_of(thinking).prompt(messages).token_ids == kept_reasoning(messages, thinking)
    assert encoder_of(thinking, inference=True).prompt(messages).token_ids == production(
        messages, thinking
    )


@pytest.mark.parametrize("thinking", [True, False])
@property_test
@given(data=st.data())
def test_a_window_prompt_shows_past_answers_exactly_as_full_history_holds_them(
    thinking: bool, data: Any
) -> None:
    """With thinking on, rollout in both histories and training see one and the same past."""
    encoder = encoder_of(thinking)
    messages = [user(data.draw(TEXT))]
    prompt = encoder.prompt(messages)
    for _ in range(data.draw(st.integers(1, 4))):
        text = f"<think>\nbecause\n</think>\n\n{data.draw(TEXT)}" if thinking else data.draw(TEXT)
        reply = user(data.draw(TEXT))
        prompt = encoder.append(prompt, response(encoder, text), [reply])
        messages += [answer(text), reply]
    encoder.check(messages, prompt.token_ids)
    if thinking:
        assert prompt.token_ids == encoder.prompt(messages).token_ids
    else:
        assert (
            encoder.decode(prompt.token_ids).count("<think>\n\n</think>\n\n")
            == 1 + len(messages) // 2
        )


def conversation(
    past: str, rendered: str | None = None
) -> tuple[Any, list[dict[str, Any]], list[int]]:
    """The small tokenizer, whose template changes messages, a conversation, and its one-shot
    encoding."""
    tokenizer = copy.copy(chatml_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "render(message.content)", rendered or "render(message.content)"
    )
    messages = [user("a"), answer(past), user("b")]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return tokenizer, messages, expected


def test_reasoning_that_a_template_always_drops_is_kept_by_default_too() -> None:
    """DeepSeek-R1's template drops the reasoning even of the last answer."""
    past = "<think>\nbecause\n</think>\n\nleft"
    tokenizer, messages, expected = conversation(
        past, "render(message.content).split('</think>')[-1]"
    )
    kept, dropped = (
        DeltaEncoder(tokenizer),
        DeltaEncoder(tokenizer, use_inference_chat_template=True),
    )
    assert past in kept.decode(kept.prompt(messages).token_ids)
    assert dropped.prompt(messages).token_ids == expected and "because" not in dropped.decode(
        expected
    )


def test_reasoning_that_a_template_rewrites_is_shown_as_the_template_writes_it() -> None:
    rewritten = "render(message.content).replace('<think>', '<think> ')"
    tokenizer, messages, expected = conversation("<think>because</think>left", rewritten)
    assert DeltaEncoder(tokenizer).prompt(messages).token_ids == expected


def test_a_memorys_own_words_before_the_reasoning_are_kept() -> None:
    past = "Previous plan:\n<think>\nbecause\n</think>\n\nACTION: left"
    _, messages, _ = conversation(past)
    assert past in encoder_of().decode(encoder_of().prompt(messages).token_ids)
