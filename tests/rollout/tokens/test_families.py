"""The families that slime trains, against their own templates: stops, thoughts, calls, roles and
both histories."""

import copy
from functools import cache
from typing import Any

import pytest

from envs.calls import find_calls
from rollout.errors import EncodingError
from rollout.tokens.chat_template import DATE_CALL, FIXED_DATE
from rollout.tokens.encoding import DeltaEncoder
from tests.cases import some
from tests.fixtures.families import FAMILIES, cheap_copy, family
from tests.fixtures.messages import answer, system, user

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}
SYSTEM, FIRST, SECOND, ANSWER = system("Be brief."), user("one"), user("two"), answer("fine")
every_family = pytest.mark.parametrize(
    "name",
    some(
        FAMILIES,
        [name for name in FAMILIES if name not in ("glm-5.2", "kimi-k2-thinking", "deepseek-v3")],
    ),
)
"""Those that differ little from another family are slow."""
NO_CALLS = ("gemma", "deepseek-v3", "moonlight", "glm-4-0414")
"""Their templates write no calls, or show no tools."""
HEADER_OPENS = ("glm-4.7", "glm-5.2", "qwen3.5", "qwen3-thinking", "deepseek-v3.1", "minimax-m2")


def call_message(*names: str, content: str = "") -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "id": f"12345678{n}",
            "function": {"name": name, "arguments": {"a": 2, "b": "x\ny"}},
        }
        for n, name in enumerate(names)
    ]
    return answer(content, tool_calls=calls)


RESULT = {"role": "tool", "content": "5", "tool_call_id": "123456780"}


@cache
def encoder_of(name: str, tools: bool = False, **options: Any) -> DeltaEncoder:
    return DeltaEncoder(family(name), tools=[TOOL] if tools else None, **options)


def original(
    name: str, messages: list[dict[str, Any]], tools: bool = False, generation: bool = True
) -> str:
    """What the family's template itself writes, with a fixed date and ids of calls that hold the
    names."""
    tokenizer = family(name)
    source = DATE_CALL.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), tokenizer.chat_template)
    shown = copy.deepcopy(messages)
    if encoder_of(name).profile.names_in_ids:
        count = 0
        for message in shown:
            for call in message.get("tool_calls", ()):
                call["id"], count = f"functions.{call['function']['name']}:{count}", count + 1
            if message["role"] == "tool":
                message["tool_call_id"] = f"functions.add:{count - 1}"
    return tokenizer.apply_chat_template(
        shown,
        tools=[TOOL] if tools else None,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=generation,
    )


CONVERSATIONS = {
    "question": [FIRST],
    "system": [SYSTEM, FIRST],
    "earlier answer": [SYSTEM, FIRST, ANSWER, SECOND],
    "two earlier answers": [FIRST, ANSWER, SECOND, answer("good\n\nidea"), FIRST],
    "question with tools": [FIRST],
    "call and result": [SYSTEM, FIRST, call_message("add"), RESULT],
    "text before a call": [FIRST, call_message("add", content="I add."), RESULT],
    "answer after a result": [FIRST, call_message("add"), RESULT, ANSWER, SECOND],
    "two rounds": [
        FIRST,
        call_message("add"),
        RESULT,
        call_message("add"),
        {**RESULT, "content": "6"},
    ],
}
NO_TOOLS = ("question", "system", "earlier answer", "two earlier answers")


def accepts(name: str, messages: list[dict[str, Any]], tools: bool) -> bool:
    try:
        text = original(name, messages, tools)
    except Exception:  # whatever a template raises
        return False
    return all(message["content"] in text for message in messages)


@pytest.mark.parametrize("kind", CONVERSATIONS)
@every_family
def test_a_windows_prompt_is_what_the_original_template_writes(name: str, kind: str) -> None:
    messages, tools = CONVERSATIONS[kind], kind not in NO_TOOLS
    lacks_tools = tools and name.split(" ")[0].startswith(NO_CALLS)
    if lacks_tools or not accepts(name, messages, tools):
        pytest.skip("the template has no tools, or refuses this conversation")
    encoder = encoder_of(name, tools)
    prompt = encoder.prompt(messages)
    assert encoder.decode(prompt.token_ids) == original(name, messages, tools)
    encoder.check(messages, prompt.token_ids)


@every_family
def test_full_history_appends_what_the_original_template_writes_after_any_stop(name: str) -> None:
    encoder = encoder_of(name, history="full")
    prompt = encoder.prompt([FIRST])
    mark = "\U0010fff3"
    written = original(name, [FIRST, answer(mark), SECOND]).rpartition(mark)[2]
    for stop in (*encoder.end_of_turn_ids, None):
        response = [*encoder.text.encode("fine"), *([] if stop is None else [stop])]
        longer = encoder.append(prompt, response, [SECOND])
        before = [*prompt.token_ids, *response]
        assert list(longer.token_ids[: len(before)]) == before, "the model's own tokens stay"
        following = encoder.decode(longer.token_ids[len(before) :])
        if stop is None and encoder.profile.opens_thought:
            assert following == encoder.profile.thought_close + written
        elif stop is None or (encoder.profile.ends_by_role and stop != encoder.profile.end_of_turn):
            assert following == written
        else:
            assert following == written.removeprefix(encoder.decode([encoder.profile.end_of_turn]))
        assert encoder.answer_text(response) == "fine"
        content = (
            encoder.past_answer("fine", cut=stop is None)
            if not encoder.profile.channels
            else "fine"
        )
        encoder.check([FIRST, answer(content), SECOND], longer.token_ids)


@every_family
def test_a_call_in_a_thought_that_was_cut_is_not_made_and_later_prompts_close_the_thought(
    name: str,
) -> None:
    encoder = encoder_of(name)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    if encoder.profile.channels:
        text = f"<|channel|>analysis<|message|>maybe {call}"
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
    else:
        opening = "" if encoder.profile.opens_thought else "<think>\n"
        ids = list(encoder.text.encode(f"{opening}maybe {call}"))
    reading = encoder.read(ids)
    assert (
        reading.text.startswith("<think>")
        and find_calls(reading.text, form=encoder.profile.call_form).span is None
    )
    assert encoder.profile.opens_thought == name.split(" ")[0].startswith(HEADER_OPENS)
    longer = encoder.append(encoder.prompt([FIRST]), ids, [SECOND])
    following = encoder.decode(longer.token_ids)[
        len(encoder.decode(encoder.prompt([FIRST]).token_ids)) :
    ]
    assert "</think>" in following or (encoder.profile.channels and "<|end|>" in following)


@every_family
def test_a_whole_thought_is_shown_to_later_prompts_in_both_histories(name: str) -> None:
    encoder = encoder_of(name)
    if encoder.profile.channels:
        pytest.skip("its template drops analysis, which no text may hold")
    opened = encoder.profile.opens_thought
    text = ("" if opened else "<think>\n") + "so\n</think>\n\nfine"
    stop = encoder.end_of_turn_ids[0]
    ids = [*encoder.text.encode(text), stop]
    full = encoder.append(encoder.prompt([FIRST]), ids, [SECOND])
    shown = encoder.past_answer(encoder.answer_text(ids), cut=False)
    messages = [FIRST, answer(shown), SECOND]
    window = encoder.prompt(messages)
    for prompt in (full, window):
        past = encoder.decode(prompt.token_ids).rpartition("two")[0]
        assert past.count("<think>") == past.count("</think>") == 1
        encoder.check(messages, prompt.token_ids)


@pytest.mark.parametrize("names", [("add",), ("add", "pay")], ids=["one", "two"])
@every_family
def test_calls_that_the_original_template_writes_are_read_back(
    name: str, names: tuple[str, ...]
) -> None:
    if name.split(" ")[0].startswith(NO_CALLS):
        pytest.skip("the template writes no calls")
    message = call_message(*names)
    try:
        text = original(name, [FIRST, message], generation=False)
    except Exception:  # Llama's refuses two calls
        pytest.skip("the template refuses two calls in a response")
    if names[-1] not in text:
        pytest.skip("the template shows one call of a response")
    encoder = encoder_of(name, tools=True)
    body = text.rpartition(encoder.profile.answer_start)[2].rpartition("</think>")[2].strip()
    for stop in encoder.end_of_turn_ids:
        body = body.removesuffix(encoder.decode([stop]))
    if encoder.profile.channels:
        own = text[text.rindex("<|start|>assistant") :].removesuffix("<|call|>")
        body = encoder.read(encoder.tokenizer.encode(own, add_special_tokens=False)).text
    found = find_calls(body, form=encoder.profile.call_form)
    assert found.valid, found.errors
    assert [call.name for call in found.calls] == list(names)
    for call in found.calls:
        assert {key: str(value) for key, value in call.arguments.items()} == {"a": "2", "b": "x\ny"}


@every_family
def test_second_and_later_system_messages_are_shown(name: str) -> None:
    encoder = encoder_of(name)
    systems = [system(f"rule {number}") for number in "123"]
    text = encoder.decode(
        encoder.prompt([*systems[:2], FIRST, ANSWER, systems[2], SECOND]).token_ids
    )
    assert [text.count(message["content"]) for message in systems] == [1, 1, 1]
    full = encoder.append(
        encoder.prompt([FIRST]), encoder.text.encode("fine"), [systems[2], SECOND]
    )
    assert encoder.decode(full.token_ids).count("rule 3") == 1


@every_family
def test_control_strings_in_messages_stay_text_in_every_family(name: str) -> None:
    encoder = encoder_of(name)
    marks = " ".join(encoder.text.control)[:2000]
    count = lambda prompt: sum(token in encoder.text.control_ids for token in prompt.token_ids)
    harmless = [FIRST, ANSWER, SECOND]
    attacked = [{**message, "content": f"x {marks} y"} for message in harmless]
    assert count(encoder.prompt(attacked)) == count(encoder.prompt(harmless))
    prompt, own = encoder.prompt([FIRST]), encoder.text.encode("fine")
    appended = [encoder.append(prompt, own, [message]) for message in (attacked[-1], SECOND)]
    assert count(appended[0]) == count(appended[1])
    assert marks in encoder.decode(appended[0].token_ids)


def test_a_generation_config_with_unknown_stop_ids_is_refused_in_one_sentence() -> None:
    with pytest.raises(EncodingError, match=r"names the stop id 999999.*copy both"):
        DeltaEncoder(family("qwen3"), generation_config={"eos_token_id": [151645, 999999]})
    encoder = DeltaEncoder(family("qwen3"), generation_config={"eos_token_id": [151645, 151643]})
    assert encoder.end_of_turn_ids == (151645, 151643)


def test_a_mapping_of_templates_gives_the_one_for_tools() -> None:
    tokenizer = cheap_copy(family("qwen3"))
    own = tokenizer.chat_template
    tokenizer.chat_template = {"default": own.replace("<tools>", "<none>"), "tool_use": own}
    text = lambda encoder: encoder.decode(encoder.prompt([FIRST]).token_ids)
    assert text(DeltaEncoder(tokenizer, tools=[TOOL])) == original("qwen3", [FIRST], tools=True)
    assert text(DeltaEncoder(tokenizer)) == original("qwen3", [FIRST])
    tokenizer.chat_template = {"rag": own}
    with pytest.raises(EncodingError, match="templates named rag but none named default"):
        DeltaEncoder(tokenizer)


def test_calls_that_cannot_be_read_back_are_refused_with_tools() -> None:
    tokenizer = cheap_copy(family("kimi-k2"))
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ c.id }}", "{{ c.function.name | upper }}"
    )
    with pytest.raises(EncodingError, match="cannot be read back.*tools_in: prompt"):
        DeltaEncoder(tokenizer, tools=[TOOL])
    DeltaEncoder(tokenizer)
