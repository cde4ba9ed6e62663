"""The Responses API: items become messages, and responses become items."""

from typing import Any

from envs.agent.request import Response
from envs.agent.responses_format import read, reply
from envs.calls import Call

USER = {"role": "user", "content": "go"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
TEXT = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I go."}],
}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def roles(*items: Any, **more: Any) -> list[str]:
    return [
        message["role"] for message in read({"model": "m", "input": list(items), **more}).messages
    ]


def test_what_the_model_generated_in_one_response_is_one_message() -> None:
    calls = [CALL, {**CALL, "call_id": "c2"}]
    results = [
        {"type": "function_call_output", "call_id": name, "output": "1"} for name in ("c1", "c2")
    ]
    request = read(
        {
            "model": "m",
            "input": [USER, THOUGHT, TEXT, *calls, *results],
            "instructions": "Be brief.",
        }
    )
    system, user, said, *rest = request.messages
    assert system == {"role": "system", "content": "Be brief."} and user == USER
    assert (said["content"], said["reasoning_content"]) == ("I go.", "hm")
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert [(one["role"], one["tool_call_id"]) for one in rest] == [("tool", "c1"), ("tool", "c2")]
    assert roles(USER, TEXT, TEXT) == ["user", "assistant", "assistant"]
    assert roles(USER, CALL, TEXT) == ["user", "assistant", "assistant"]


def test_tools_of_a_namespace_have_its_name_for_the_model_and_the_clients_form_for_the_client() -> (
    None
):
    inner = {
        "type": "function",
        "name": "close",
        "parameters": {"type": "object", "properties": {}},
    }
    body = {
        "model": "m",
        "input": "go",
        "tools": [{"type": "namespace", "name": "team", "tools": [inner]}],
    }
    request = read(body)
    assert [tool["function"]["name"] for tool in request.tools] == ["team.close"]
    (item,) = reply(Response("", calls=(Call("team.close", {"a": 1}),)), request, 0)["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "team", "close")
    (_, said) = read({**body, "input": [USER, item]}).messages
    assert said["tool_calls"][0]["function"] == {"name": "team.close", "arguments": {"a": 1}}
