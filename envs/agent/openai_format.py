"""OpenAI's `/v1/chat/completions`: requests in, responses out, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from envs.agent import parts
from envs.agent.parts import Message, RequestError
from envs.agent.request import Request, Response, assistant_message, make_request
from envs.json_text import short

PING = b": the model is busy\n\n"
"""Sent to a client that waits for a stream; a comment, which clients skip."""


def read(body: Mapping[str, Any]) -> Request:
    """Read the request in a body; raises `RequestError` if it cannot be answered."""
    if body.get("n", 1) not in (1, None):
        raise RequestError(f"one answer per request is supported, but n is {short(body['n'])}")
    if body.get("functions"):
        raise RequestError("functions are not supported; use tools")
    messages = [_message(message) for message in parts.objects(body.get("messages"), "messages")]
    return make_request(body, messages, [_tool(tool) for tool in parts.offered(body)])


def _message(message: Mapping[str, Any]) -> Message:
    role = parts.role(message, "system", "developer", "user", "assistant", "tool")
    read: Message = {"role": role, "content": parts.content(message.get("content"), "content")}
    if calls := parts.objects(message.get("tool_calls"), "tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key):
            read[key] = parts.text(message[key], key)
    return read


def _call(call: Mapping[str, Any]) -> Message:
    """Read an earlier call."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"a tool call has no function: {short(call)}")
    return parts.call(
        call.get("id"), function.get("name"), parts.arguments(function.get("arguments"))
    )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(
            f"a tool of type {short(tool.get('type'))} is not supported; use functions"
        )
    return parts.tool(function.get("name"), function.get("description"), function.get("parameters"))


def reply(response: Response, request: Request, number: int) -> dict[str, Any]:
    """Return the body of a whole response; `number` counts the episode's responses."""
    message: dict[str, Any] = assistant_message(response, number)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        message["content"] = response.text or None
    reason = "tool_calls" if response.calls else "stop"
    sent = request.tokens
    said = response.tokens
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": sent, "completion_tokens": said, "total_tokens": sent + said},
    }


def events(response: Response, request: Request, number: int) -> Iterator[bytes]:
    """Yield the events of a streamed response: all of it in one, and the end."""
    body = reply(response, request, number)
    (choice,) = body["choices"]
    delta = choice.pop("message")
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    choice["delta"] = delta
    body["object"] += ".chunk"
    yield f"data: {json.dumps(body)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def refusal(error: RequestError) -> dict[str, Any]:
    """Return the body of a refusal."""
    return {
        "error": {
            "message": str(error),
            "type": error.kind("server_error"),
            "param": None,
            "code": None,
        }
    }
