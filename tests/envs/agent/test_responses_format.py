"""The Responses API: items become messages, and responses are stored as far as there is room."""

from dataclasses import replace
from typing import Any

import pytest

from envs.agent.request import RequestError, Response
from envs.agent.responses_format import read, reply
from envs.agent.session import Session
from envs.calls import Call

USER = {"role": "user", "content": "go"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I go."}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def roles(*items: Any, **more: Any) -> list[str]:
    return [message["role"] for message in read({"model": "m", "input": list(items), **more}, {}).messages]


def test_what_the_model_generated_in_one_response_is_one_message() -> None:
    calls = [CALL, {**CALL, "call_id": "c2"}]
    results = [{"type": "function_call_output", "call_id": name, "output": "1"} for name in ("c1", "c2")]
    request = read({"model": "m", "input": [USER, THOUGHT, TEXT, *calls, *results], "instructions": "Be brief."}, {})
    system, user, said, *rest = request.messages
    assert system == {"role": "system", "content": "Be brief."} and user == USER
    assert (said["content"], said["reasoning_content"]) == ("I go.", "hm")
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert [(one["role"], one["tool_call_id"]) for one in rest] == [("tool", "c1"), ("tool", "c2")]
    assert roles(USER, TEXT, TEXT) == ["user", "assistant", "assistant"]
    assert roles(USER, CALL, TEXT) == ["user", "assistant", "assistant"]


def test_tools_of_a_namespace_have_its_name_for_the_model_and_the_clients_form_for_the_client() -> None:
    inner = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
    body = {"model": "m", "input": "go", "tools": [{"type": "namespace", "name": "team", "tools": [inner]}]}
    request = read(body, {})
    assert [tool["function"]["name"] for tool in request.tools] == ["team.close"]
    (item,) = reply(Response("", calls=(Call("team.close", {"a": 1}),)), request, 0)["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "team", "close")
    (_, said) = read({**body, "input": [USER, item]}, {}).messages
    assert said["tool_calls"][0]["function"] == {"name": "team.close", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "hi", "background": True}, "background is not supported"),
        (
            {"input": "hi", "previous_response_id": "resp_9"},
            r"'resp_9' is not stored here \(any more\); send its items",
        ),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not supported"),
        ({"input": 7}, "input must be a list of objects, got 7"),
        ({"input": [{**CALL, "arguments": 1}]}, "the arguments of a tool call must be text, got 1"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_one_sentence(body: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read({"model": "m", **body}, {})


async def test_responses_are_stored_without_instructions_until_there_is_no_more_room() -> None:
    session = Session(["m"], max_bytes=1000)
    answer = Response("I go.", calls=(Call("f", {"a": 1}),))

    async def ask(**body: Any) -> None:
        request = read({"model": "m", "input": "go", "instructions": "Be brief.", **body}, session.stored)
        session.arrive(replace(request, size=400, digest=str(session.counts["requests"])))
        if session.current is None:
            await session.next(1)
        await session.exchange(answer, 0)

    await ask()
    (said,) = session.stored.values()
    assert [message["role"] for message in said] == ["user", "assistant"]
    assert said[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    await ask(previous_response_id="resp_0")
    assert list(session.stored) == ["resp_1"], "400 and 800 bytes together have no room"
    assert len(session.stored["resp_1"]) == 4
    await ask(store=False)
    assert list(session.stored) == ["resp_1"]
    await ask(previous_response_id="resp_1")
    assert list(session.stored) == [], "the chain alone has more than may be kept"
    with pytest.raises(RequestError, match="is not stored here"):
        await ask(previous_response_id="resp_3")
