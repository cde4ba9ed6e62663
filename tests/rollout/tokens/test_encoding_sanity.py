"""The sanity check names the first difference; smaller guarantees of the encoder."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.errors import EncodingError
from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import CHAT_TEMPLATE, CORPUS, SPECIAL_TOKENS, chatml_tokenizer
from tests.fixtures.playing import play_batches
from tests.fixtures.tokenizers import real_tokenizer

USER, ANSWER = {"role": "user", "content": "Observation: a red key"}, {"role": "assistant", "content": "ACTION: left"}


@pytest.fixture(scope="module")
def encoder() -> DeltaEncoder:
    return DeltaEncoder(chatml_tokenizer())


@cache
def encoder_of(family: str) -> DeltaEncoder:
    return DeltaEncoder(chatml_tokenizer() if family == "chatml" else real_tokenizer(family))


def ids_of(encoder: DeltaEncoder, messages: list[dict[str, Any]]) -> list[int]:
    return encoder.prompt(messages).token_ids


def test_the_check_names_the_first_differing_token_in_its_context(encoder: DeltaEncoder) -> None:
    messages = [USER, ANSWER, USER]
    ids = ids_of(encoder, messages)
    lost = ids.index(encoder.end_of_turn_ids[0]) + 1
    with pytest.raises(EncodingError) as caught:
        encoder.check(messages, ids[:lost] + ids[lost + 1 :])
    text = str(caught.value)
    assert f"position {lost}" in text and repr("\n") in text and "<|im_start|>" in text and "a red key" in text


def test_white_space_is_ignored_only_in_the_mode_for_it(encoder: DeltaEncoder) -> None:
    messages = [USER, ANSWER, USER]
    ids = ids_of(encoder, messages)
    lost = ids.index(encoder.end_of_turn_ids[0]) + 1
    without_newline = ids[:lost] + ids[lost + 1 :]
    lenient = DeltaEncoder(chatml_tokenizer(), sanity_check="ignore_strippable")
    lenient.check(messages, without_newline)
    with pytest.raises(EncodingError):
        lenient.check([USER, {**ANSWER, "content": "ACTION: right"}, USER], without_newline)
    DeltaEncoder(chatml_tokenizer(), sanity_check="disable").check(messages, [1, 2, 3])


def test_an_answer_may_be_split_into_other_tokens_but_an_observation_may_not(encoder: DeltaEncoder) -> None:
    def spelled(text: str) -> list[int]:
        return [token for letter in text for token in encoder.text.encode(letter)]

    messages = [USER, ANSWER, USER]
    ids = ids_of(encoder, messages)
    for content, allowed in (("ACTION: left", True), ("a red key", False)):
        piece = list(encoder.text.encode(" " + content if not allowed else content))
        at = next(k for k in range(len(ids)) if ids[k : k + len(piece)] == piece)
        other = ids[:at] + spelled(encoder.decode(piece)) + ids[at + len(piece) :]
        assert other != ids and encoder.decode(other) == encoder.decode(ids)
        if allowed:
            encoder.check(messages, other)
        else:
            with pytest.raises(EncodingError):
                encoder.check(messages, other)


@pytest.mark.parametrize("closed", [True, False])
def test_a_conversation_may_end_with_an_answer(encoder: DeltaEncoder, closed: bool) -> None:
    ids = ids_of(encoder, [USER]) + list(encoder.text.encode("ACTION: left"))
    encoder.check([USER, ANSWER], [*ids, encoder.end_of_turn_ids[0]] if closed else ids)
    with pytest.raises(EncodingError):
        encoder.check([USER, ANSWER], ids[:-1])


@pytest.mark.parametrize("text", ["  padded \n", "left<|im_start|>user\nobey", "", "\n\nx", "Tür 🙂 <|endoftext|>"])
def test_text_that_the_model_wrote_is_never_a_difference(encoder: DeltaEncoder, text: str) -> None:
    """The model's own white space and control tokens stay unchanged and pass the check."""
    response = [*encoder.tokenizer.encode(text, add_special_tokens=False), encoder.end_of_turn_ids[0]]
    prompt = encoder.append(encoder.prompt([USER]), response, [USER])
    messages = [USER, {"role": "assistant", "content": encoder.answer_text(response)}, USER]
    encoder.check(messages, prompt.token_ids)
    with pytest.raises(EncodingError):
        encoder.check([USER, {"role": "assistant", "content": "right"}, USER], prompt.token_ids)


def test_a_missing_or_added_ending_is_a_difference(encoder: DeltaEncoder) -> None:
    ids = ids_of(encoder, [USER])
    for wrong in (ids[:-1], ids[:-3], [*ids, *ids[-3:]]):
        with pytest.raises(EncodingError):
            encoder.check([USER], wrong)


def test_repeated_texts_are_encoded_once_and_the_cache_is_bounded(encoder: DeltaEncoder) -> None:
    fresh = DeltaEncoder(chatml_tokenizer())
    for k in range(5000):
        fresh.prompt([{"role": "user", "content": f"turn {k}"}])
    info = fresh.text._cached.cache_info()
    assert info.currsize <= info.maxsize == 2048
    for _ in range(10):
        fresh.prompt([{"role": "user", "content": "turn 4999"}])
    assert fresh.text._cached.cache_info().misses == info.misses


def test_a_known_kind_of_conversation_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = DeltaEncoder(chatml_tokenizer())
    messages = [{"role": "system", "content": "Play."}, USER, ANSWER, USER]
    prompt = fresh.prompt(messages)
    fresh.append(prompt, [5, fresh.end_of_turn_ids[0]], [USER])
    monkeypatch.setattr(type(fresh.template), "render", None)
    other = [{**m, "content": m["content"] + " again"} for m in messages]
    fresh.append(fresh.prompt(other), [5, fresh.end_of_turn_ids[0]], [other[-1]])


def test_padding_and_truncation_of_the_tokenizer_do_not_affect_encoding() -> None:
    tokenizer = chatml_tokenizer()
    encoder = DeltaEncoder(tokenizer)
    expected = ids_of(encoder, [USER])
    tokenizer(["x", "x y z"], truncation=True, max_length=2, padding=True)
    try:
        assert ids_of(DeltaEncoder(tokenizer), [USER]) == expected
        assert ids_of(DeltaEncoder(tokenizer), [{"role": "user", "content": "long " * 50}])[-3:] == expected[-3:]
    finally:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()


def test_an_action_is_found_among_the_answers_tokens(encoder: DeltaEncoder) -> None:
    text = "THINK: the Tür 🙂 is open.\nACTION: go forward"
    ids = [*encoder.text.encode(text), encoder.end_of_turn_ids[0]]
    assert encoder.answer_text(ids) == text
    first = text.index("go forward")
    span = encoder.token_span(ids, (first, len(text)))
    assert span is not None
    start, end = span
    assert encoder.decode(ids[start:end]).strip() == "go forward"
    assert encoder.token_span(ids, None) is None


@pytest.mark.parametrize("family", ["chatml", "qwen2_5", "gemma3"])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from(["go", " left", "\n", " é", "Tür", " ", "<tool_call>", "汉"])), data=st.data())
def test_every_span_of_an_answer_is_found_among_its_tokens(family: str, words: list[str], data: Any) -> None:
    encoder, text = encoder_of(family), "".join(words)
    ids = [*encoder.text.encode(text), encoder.end_of_turn_ids[0]]
    last = data.draw(st.integers(0, len(text)))
    first = data.draw(st.integers(0, last))
    chars = [len(encoder.decode(ids[:n])) for n in range(len(ids) + 1)]
    start, end = (max(n for n, length in enumerate(chars) if length <= limit) for limit in (first, last))
    end += chars[end] < last
    assert encoder.token_span(ids, (first, last)) == ((start, end) if first < last and start < end else None)


def test_no_messages_or_a_picture_without_a_processor_are_named(encoder: DeltaEncoder) -> None:
    with pytest.raises(EncodingError, match="at least one message"):
        encoder.prompt([])
    tokenizer = copy.deepcopy(chatml_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE.replace("content is string", "content.strip()")
    for one in (encoder, DeltaEncoder(tokenizer)):  # the second template fails on lists
        with pytest.raises(EncodingError, match="no image processor"):
            one.prompt([{"role": "user", "content": [{"type": "image", "image": object()}]}])


def test_text_parts_and_a_string_are_the_same_message(encoder: DeltaEncoder) -> None:
    parts = [{"type": "text", "text": "Observation:"}, {"type": "text", "text": " a red key"}]
    assert ids_of(encoder, [{"role": "user", "content": parts}]) == ids_of(encoder, [USER])


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("swallows", [True, False])
def test_sentencepiece_spaces_and_greedy_control_tokens_follow_the_tokenizer(scheme: str, swallows: bool) -> None:
    """Llama-2 style prefix spaces, and control tokens that swallow the white space after them (Phi-3)."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"]))
    core.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=swallows) for t in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE, unk_token="<unk>"
    )
    encoder = DeltaEncoder(tokenizer)
    for content in ("a red key", "  a red key", "\n wall", ""):
        messages = [{"role": "system", "content": content}, {**USER, "content": content}, ANSWER, USER]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert encoder.prompt(messages).token_ids == expected


@pytest.mark.parametrize("history", ["full", "window"])
async def test_the_check_of_a_finished_episode_counts_its_last_response(tmp_path: Path, history: str) -> None:
    outputs, _ = await play_batches(tmp_path, 1, lambda number: 0.0, history=history)
    assert outputs[0].metrics["rollout/stop/terminated"] > 0
    assert outputs[0].metrics["rollout/faults/sanity_check_failed"] == 0
