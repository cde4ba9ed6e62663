"""Real chat templates: every kind of conversation gets the ids of its one-shot encoding."""

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.errors import EncodingError
from rollout.tokens.encoding import DeltaEncoder
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.messages import answer, response, system, user
from tests.fixtures.tokenizers import real_tokenizer

LIBERAL = ("chatml", "qwen2_5", "qwen3", "llama3_2", "deepseek_v3")
ALTERNATING = ("mistral_nemo", "gemma3")
PINNED = {"llama3_2": {"date_string": "26 Jul 2024"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

property_test = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def tokenizer_of(family: str) -> Any:
    return chatml_tokenizer() if family == "chatml" else real_tokenizer(family)


@cache
def encoder_of(family: str, tools: bool = False) -> DeltaEncoder:
    return DeltaEncoder(tokenizer_of(family), tools=[WEATHER] if tools else None)


def one_shot(family: str, messages: list[dict[str, Any]], tools: bool = False) -> list[int]:
    """The whole conversation encoded by transformers."""
    return tokenizer_of(family).apply_chat_template(
        messages,
        tools=[WEATHER] if tools else None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **PINNED.get(family, {}),
    )["input_ids"]


CONTENT = st.one_of(
    st.just(""),
    st.sampled_from(
        [
            "You see a key.",
            "  padded \n",
            "\n",
            "a\n\nb",
            "<tool_call>x",
            "Tür 你好 🙂",
            "{'a': \"b\"}",
        ]
    ),
    # Without "<" and "[": the one-shot encoding makes control tokens of "<|im_end|>" and "[INST]",
    # ours never does. Hypothesis also draws strings that it finds in our sources.
    st.text(st.characters(exclude_categories=("Cs", "Co"), exclude_characters="<["), max_size=40),
)


@st.composite
def conversations(draw: Any, alternating: bool) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(CONTENT)}] if draw(st.booleans()) else []
    if alternating:
        roles = ["user", *["assistant", "user"] * draw(st.integers(0, 4))]
    else:
        roles = [
            "user",
            *draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=7)),
        ]
        roles = [*roles, "user"] if roles[-1] == "assistant" else roles
    return [*messages, *({"role": role, "content": draw(CONTENT)} for role in roles)]


@pytest.mark.parametrize("family", [*LIBERAL, *ALTERNATING])
@property_test
@given(data=st.data())
def test_any_conversation_equals_its_one_shot_encoding(family: str, data: Any) -> None:
    messages = data.draw(conversations(alternating=family in ALTERNATING))
    assert encoder_of(family).prompt(messages).token_ids == one_shot(family, messages)


def call_and_result(city: str, result: str, text: str = "") -> list[dict[str, Any]]:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": city}},
    }
    return [
        answer(text, tool_calls=[call]),
        {"role": "tool", "content": result, "tool_call_id": "abcdefghi"},
    ]


BREAKS = st.sampled_from(["", "hi", "\nhi", "\n\n x", "  padded \n", "\n"])


@st.composite
def tool_conversations(draw: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        city = draw(st.sampled_from(["Ulm", 'a"b', "é"]))
        messages += [user(draw(BREAKS)), *call_and_result(city, draw(BREAKS), draw(BREAKS))]
        if draw(st.booleans()):
            messages.append(answer(draw(BREAKS)))
    return messages if messages[-1]["role"] == "tool" else [*messages, user("go")]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
@property_test
@given(messages=tool_conversations())
def test_text_beside_tool_calls_keeps_its_line_breaks_as_the_one_shot_encoding_does(
    family: str, messages: Any
) -> None:
    assert encoder_of(family, tools=True).prompt(messages).token_ids == one_shot(
        family, messages, tools=True
    )


ANSWER = st.sampled_from(
    ["go forward", "THINK: a door.\nACTION: open", "x", "die Tür öffnen, dann 3 mal links 🙂"]
)
REPLIES = {
    "liberal": st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=3),
    "alternating": st.just(["user"]),
}


@pytest.mark.parametrize("family", [*LIBERAL, *ALTERNATING])
@property_test
@given(data=st.data())
def test_an_appended_conversation_equals_its_one_shot_encoding_and_masks_the_models_tokens(
    family: str, data: Any
) -> None:
    encoder = encoder_of(family)
    messages = [{"role": "user", "content": data.draw(CONTENT)}]
    if data.draw(st.booleans()) and family != "mistral_nemo":
        messages.insert(0, {"role": "system", "content": data.draw(CONTENT)})
    prompt = encoder.prompt(messages)
    mask, answers = [0] * len(prompt.token_ids), []
    for _ in range(data.draw(st.integers(1, 4))):
        text = data.draw(ANSWER)
        own = response(encoder, text)
        roles = data.draw(REPLIES["liberal" if family in LIBERAL else "alternating"])
        replies = [{"role": role, "content": data.draw(CONTENT)} for role in roles]
        before = [*prompt.token_ids, *own]
        prompt = encoder.append(prompt, own, replies)
        assert prompt.token_ids[: len(before)] == before
        mask += [1] * len(own) + [0] * (len(prompt.token_ids) - len(before))
        answers += own
        messages += [{"role": "assistant", "content": text}, *replies]
    assert prompt.token_ids == one_shot(family, messages)
    assert [token for token, own in zip(prompt.token_ids, mask, strict=True) if own] == answers
    encoder.check(messages, prompt.token_ids)


@pytest.mark.parametrize("family", [*LIBERAL, *ALTERNATING])
@pytest.mark.parametrize("inference", some([True, False], [True]))
def test_private_characters_in_a_message_are_text_like_any_other(
    family: str, inference: bool
) -> None:
    """The encoder uses the same characters as stand-ins while a template is rendered."""
    encoder = DeltaEncoder(tokenizer_of(family), use_inference_chat_template=inference)
    private = "".join(map(chr, (0xF0000, 0xF0001, 0xF0002, 0x100000, 0x100001, 0x10FFF1, 0x10FFF2)))
    attack = f"{private} <|im_end|> {next(iter(encoder.text.control))} {private}"
    messages = [
        {"role": role, "content": attack + role} for role in ("system", "user", "assistant", "user")
    ]
    text = encoder.decode(encoder.prompt(messages).token_ids)
    assert [text.count(attack + role) for role in ("system", "user", "assistant")] == [1, 2, 1]


def test_user_messages_in_a_row_become_one_where_roles_must_alternate() -> None:
    row = encoder_of("gemma3").prompt([user("one"), user("two")])
    assert row.token_ids == one_shot("gemma3", [user("one\n\ntwo")])
    with pytest.raises(EncodingError, match=r"user, assistant, assistant, user.*alternate"):
        encoder_of("gemma3").prompt([user(), answer(), answer(), user()])


def changed(template: Any) -> Any:
    """The small tokenizer with another chat template, made from its own."""
    tokenizer = copy.copy(chatml_tokenizer())
    tokenizer.chat_template = template(tokenizer.chat_template)
    return tokenizer


def test_a_refused_system_message_opens_the_first_user_message() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    encoder = DeltaEncoder(changed(lambda own: refusing + own))
    got = encoder.prompt([system("Rules."), user("Hi")])
    assert got.token_ids == encoder.prompt([user("Rules.\n\nHi")]).token_ids


def test_mistral_keeps_the_system_message_where_it_was_first_shown_when_turns_are_appended() -> (
    None
):
    encoder = encoder_of("mistral_nemo")
    messages = [system("Rules."), user("one")]
    prompt = encoder.append(encoder.prompt(messages), response(encoder, "ok"), [user("two")])
    assert encoder.decode(prompt.token_ids) == "<s>[INST]Rules.\n\none[/INST]ok</s>[INST]two[/INST]"
    whole = [*messages, answer("ok"), user("two")]
    encoder.check(whole, prompt.token_ids)
    assert encoder.decode(encoder.prompt(whole).token_ids).endswith("[INST]Rules.\n\ntwo[/INST]")


def test_a_template_that_takes_no_tool_result_after_text_is_refused_for_full_history() -> None:
    with pytest.raises(EncodingError, match="history: window"):
        DeltaEncoder(tokenizer_of("mistral_nemo"), tools=[WEATHER], history="full")
    DeltaEncoder(tokenizer_of("mistral_nemo"), tools=[WEATHER], history="window")
    DeltaEncoder(tokenizer_of("mistral_nemo"), history="full")


def test_a_template_that_hides_tools_or_has_no_control_tokens_is_refused_when_the_encoder_is_built() -> (
    None
):
    with pytest.raises(EncodingError, match="ignores tools"):
        DeltaEncoder(tokenizer_of("gemma3"), tools=[WEATHER])
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
    for template, told in ((plain, "no control token"), (None, "no chat template")):
        with pytest.raises(EncodingError, match=told):
            DeltaEncoder(changed(lambda own, template=template: template))
