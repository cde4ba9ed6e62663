"""Anthropic's `/v1/messages`: requests in, responses out, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from envs.agent import parts
from envs.agent.parts import Message, RequestError
from envs.agent.request import Request, Response, make_request
from envs.json_text import short

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Sent to a client that waits for a stream."""


def read(body: Mapping[str, Any]) -> Request:
    """Read the request in a body; raises `RequestError` if it cannot be answered."""
    system = body.get("system") or ""
    if not isinstance(system, str):  # a list of blocks
        system = "\n\n".join(
            parts.text(block.get("text"), "system") for block in parts.objects(system, "system")
        )
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in parts.objects(body.get("messages"), "messages"):
        messages += _messages(message)
    return make_request(
        body, messages, [_tool(tool) for tool in parts.offered(body)], "stop_sequences"
    )


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """Return one message as several: each tool result becomes a separate message, before the
    rest."""
    role = parts.role(message, "user", "assistant", "system")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = parts.objects(content, "content")
    if role == "assistant":
        return [_assistant(blocks)]
    results: list[Message] = []
    others = []
    for block in blocks:
        if block.get("type") != "tool_result":
            others.append(block)
            continue
        results.append(parts.result(block.get("tool_use_id"), block.get("content")))
    if others or not results:
        results.append({"role": role, "content": parts.content(others, "content")})
    return results


def _assistant(blocks: list[Mapping[str, Any]]) -> Message:
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(parts.text(block.get("text"), "text"))
            case "thinking":
                thoughts.append(parts.text(block.get("thinking"), "thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = block.get("input") or {}
                if not isinstance(arguments, Mapping):
                    raise RequestError(
                        f"the input of a tool_use must be an object, got {short(arguments)}"
                    )
                calls.append(parts.call(block.get("id"), block.get("name"), dict(arguments)))
            case kind:
                raise RequestError(f"content of type {short(kind)} is not supported in an answer")
    return parts.assistant("".join(texts), "\n".join(thoughts), calls)


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise RequestError(
            f"a tool of type {short(tool['type'])} is not supported; use tools with an input_schema"
        )
    return parts.tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def reply(response: Response, request: Request, number: int) -> dict[str, Any]:
    """Return the body of a whole response; `number` counts the episode's responses."""
    usage = {"input_tokens": request.tokens, "output_tokens": response.tokens}
    return {
        **_head(request, number),
        "content": _blocks(response, number),
        **_ending(response),
        "usage": usage,
    }


def events(response: Response, request: Request, number: int) -> Iterator[bytes]:
    """Yield the events of a streamed response."""
    usage = {"input_tokens": request.tokens, "output_tokens": 1}
    head = {
        **_head(request, number),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield parts.event("message_start", message=head)
    for index, block in enumerate(_blocks(response, number)):
        if block["type"] == "tool_use":
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            key = block["type"]  # "thinking" or "text", which is also the key of its text
            start = {**block, key: ""}
            delta = {"type": f"{key}_delta", key: block[key]}
        yield parts.event("content_block_start", index=index, content_block=start)
        yield parts.event("content_block_delta", index=index, delta=delta)
        yield parts.event("content_block_stop", index=index)
    yield parts.event(
        "message_delta", delta=_ending(response), usage={"output_tokens": response.tokens}
    )
    yield parts.event("message_stop")


def refusal(error: RequestError) -> dict[str, Any]:
    """Return the body of a refusal."""
    return {"type": "error", "error": {"type": error.kind("api_error"), "message": str(error)}}


def _blocks(response: Response, number: int) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if response.reasoning:
        blocks.append({"type": "thinking", "thinking": response.reasoning, "signature": ""})
    if response.text or not response.calls:
        blocks.append({"type": "text", "text": response.text})
    for index, call in enumerate(response.calls):
        identity = f"toolu_{number:05d}{index:03d}"
        blocks.append(
            {"type": "tool_use", "id": identity, "name": call.name, "input": dict(call.arguments)}
        )
    return blocks


def _head(request: Request, number: int) -> dict[str, Any]:
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": request.model}


def _ending(response: Response) -> dict[str, Any]:
    reason = "tool_use" if response.calls else "stop_sequence" if response.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": response.stop or None}
