"""The sanity check names the first difference; smaller guarantees of the encoder."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import EncodingError
from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import CHAT_TEMPLATE, chatml_tokenizer
from tests.fixtures.messages import answer, response, user
from tests.fixtures.playing import play_batches
from tests.rollout.tokens.test_encoding_templates import encoder_of

TURN = [user(), answer(), user()]


@pytest.fixture(scope="module")
def encoder() -> DeltaEncoder:
    return DeltaEncoder(chatml_tokenizer())


def assert_differs(encoder: DeltaEncoder, messages: list[dict[str, Any]], ids: Any) -> str:
    """The check refuses these ids; returns the error."""
    with pytest.raises(EncodingError) as caught:
        encoder.check(messages, ids)
    return str(caught.value)


def test_the_check_names_the_first_differing_token_in_its_context(encoder: DeltaEncoder) -> None:
    ids = encoder.prompt(TURN).token_ids
    lost = ids.index(encoder.end_of_turn_ids[0]) + 1
    text = assert_differs(encoder, TURN, ids[:lost] + ids[lost + 1 :])
    assert all(
        fact in text for fact in (f"position {lost}", repr("\n"), "<|im_start|>", "a red key")
    )
    for wrong in (ids[:-1], [*ids, *ids[-3:]]):
        assert_differs(encoder, TURN, wrong)


def test_white_space_is_ignored_only_in_the_mode_for_it(encoder: DeltaEncoder) -> None:
    ids = encoder.prompt(TURN).token_ids
    lost = ids.index(encoder.end_of_turn_ids[0]) + 1
    without_newline = ids[:lost] + ids[lost + 1 :]
    lenient = DeltaEncoder(chatml_tokenizer(), sanity_check="ignore_strippable")
    lenient.check(TURN, without_newline)
    assert_differs(lenient, [user(), answer("ACTION: right"), user()], without_newline)
    DeltaEncoder(chatml_tokenizer(), sanity_check="disable").check(TURN, [1, 2, 3])


@pytest.mark.parametrize(("content", "allowed"), [("ACTION: left", True), (" red key", False)])
def test_an_answer_may_be_split_into_other_tokens_but_an_observation_may_not(
    encoder: DeltaEncoder, content: str, allowed: bool
) -> None:
    ids, piece = encoder.prompt(TURN).token_ids, list(encoder.text.encode(content))
    at = next(k for k in range(len(ids)) if ids[k : k + len(piece)] == piece)
    spelled = [token for letter in encoder.decode(piece) for token in encoder.text.encode(letter)]
    other = ids[:at] + spelled + ids[at + len(piece) :]
    assert other != ids and encoder.decode(other) == encoder.decode(ids)
    if allowed:
        encoder.check(TURN, other)
    else:
        assert_differs(encoder, TURN, other)


@pytest.mark.parametrize(
    "text", ["  padded \n", "left<|im_start|>user\nobey", "", "Tür 🙂 <|endoftext|>"]
)
def test_text_that_the_model_wrote_is_never_a_difference(encoder: DeltaEncoder, text: str) -> None:
    """The model's own white space and control tokens stay unchanged and pass the check."""
    own = [*encoder.tokenizer.encode(text, add_special_tokens=False), encoder.end_of_turn_ids[0]]
    prompt = encoder.append(encoder.prompt([user()]), own, [user()])
    encoder.check([user(), answer(encoder.answer_text(own)), user()], prompt.token_ids)
    assert_differs(encoder, [user(), answer("right"), user()], prompt.token_ids)


def test_padding_and_truncation_of_the_tokenizer_do_not_affect_encoding() -> None:
    tokenizer = chatml_tokenizer()
    expected = DeltaEncoder(tokenizer).prompt([user("long " * 50)]).token_ids
    tokenizer(["x", "x y z"], truncation=True, max_length=2, padding=True)
    try:
        assert DeltaEncoder(tokenizer).prompt([user("long " * 50)]).token_ids == expected
    finally:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


@pytest.mark.parametrize("family", ["chatml", "qwen2_5", "gemma3"])
@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.sampled_from(["go", " left", "\n", " é", "Tür", " ", "<tool_call>", "汉"])),
    data=st.data(),
)
def test_every_span_of_an_answer_is_found_among_its_tokens(
    family: str, words: list[str], data: Any
) -> None:
    encoder, text = encoder_of(family), "".join(words)
    ids = response(encoder, text)
    last = data.draw(st.integers(0, len(text)))
    first = data.draw(st.integers(0, last))
    chars = [len(encoder.decode(ids[:n])) for n in range(len(ids) + 1)]
    start, end = (
        max(n for n, length in enumerate(chars) if length <= limit) for limit in (first, last)
    )
    end += chars[end] < last
    assert encoder.token_span(ids, (first, last)) == (
        (start, end) if first < last and start < end else None
    )


def test_no_messages_or_a_picture_without_a_processor_are_named(encoder: DeltaEncoder) -> None:
    with pytest.raises(EncodingError, match="at least one message"):
        encoder.prompt([])
    tokenizer = copy.deepcopy(chatml_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE.replace("content is string", "content.strip()")
    for one in (encoder, DeltaEncoder(tokenizer)):  # the second template fails on lists
        with pytest.raises(EncodingError, match="no image processor"):
            one.prompt([user([{"type": "image", "image": object()}])])


@pytest.mark.parametrize("history", ["full", "window"])
async def test_the_check_of_a_finished_episode_counts_its_last_response(
    tmp_path: Path, history: str
) -> None:
    outputs, _ = await play_batches(tmp_path, 1, lambda number: 0.0, history=history)
    assert outputs[0].metrics["rollout/stop/terminated"] > 0
    assert outputs[0].metrics["rollout/faults/sanity_check_failed"] == 0
