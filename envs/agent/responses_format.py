"""OpenAI's `/v1/responses`: requests in, responses out, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from envs.agent import parts
from envs.agent.openai_format import PING as PING
from envs.agent.openai_format import refusal as refusal
from envs.agent.parts import Message, RequestError
from envs.agent.request import Request, Response, assistant_message, make_request
from envs.json_text import short

REFUSED = ("background", "conversation", "previous_response_id", "prompt")
_CALL_KINDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""For each kind of call, the key of its arguments, and the name of the events with them."""
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool, which takes one text."""


def read(body: Mapping[str, Any]) -> Request:
    """Read the request in a body; raises `RequestError` if it cannot be answered."""
    for key in REFUSED:
        if body.get(key):
            raise RequestError(f"{key} is not supported; send the whole conversation as input")
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else parts.objects(given, "input")
    )
    messages: list[Message] = []
    for item in items:
        _add(messages, item)
    instructions = parts.text(body.get("instructions") or "", "instructions")
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    tools = [pair for tool in parts.offered(body) for pair in _tools(tool)]
    request = make_request(body, [*system, *messages], [schema for schema, _ in tools])
    return replace(request, items={schema["function"]["name"]: call for schema, call in tools})


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Add an item. What the model generated in one response becomes one message, as chat templates
    expect."""
    message: Message
    match item.get("type", "message"):
        case "message":
            role = parts.role(item, "system", "developer", "user", "assistant")
            message = {"role": role, "content": parts.content(item.get("content"), "content")}
        case "reasoning":
            texts = [
                *parts.objects(item.get("summary"), "summary"),
                *parts.objects(item.get("content"), "content"),
            ]
            message = parts.assistant(
                "", "\n".join(parts.text(part.get("text"), "text") for part in texts)
            )
        case "function_call" | "custom_tool_call" as kind:
            message = parts.assistant("", calls=[_call(item, kind)])
        case "function_call_output" | "custom_tool_call_output":
            message = parts.result(item.get("call_id"), item.get("output"))
        case kind:
            raise RequestError(
                f"an item of type {short(kind)} is not supported; send messages, reasoning and "
                "calls"
            )
    last: Message = messages[-1] if messages else {"role": ""}
    is_same = last["role"] == message["role"] == "assistant"
    if not is_same or (message["content"] and (last["content"] or "tool_calls" in last)):
        messages.append(message)
        return
    last["content"] = last["content"] or message["content"]
    if "reasoning_content" in message:
        last["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _call(item: Mapping[str, Any], kind: str) -> Message:
    """Read an earlier call."""
    if kind == "custom_tool_call":
        arguments: Any = {"input": parts.text(item.get("input"), "input")}
    else:
        arguments = parts.arguments(item.get("arguments"))
    return parts.call(item.get("call_id"), _full_name(item), arguments)


def _tools(
    tool: Mapping[str, Any], space: str = ""
) -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
    """Yield the schemas of a tool or of a namespace of tools, each with what its calls say beside
    their arguments."""
    kind = tool.get("type")
    name = parts.text(tool.get("name") or "", "a tool's name")
    if kind == "namespace" and not space:
        for inner in parts.objects(tool.get("tools"), "the tools of a namespace"):
            yield from _tools(inner, name)
    elif kind in ("function", "custom"):
        call = {"type": "custom_tool_call" if kind == "custom" else "function_call", "name": name}
        call.update({"namespace": space} if space else {})
        parameters = TEXT_INPUT if kind == "custom" else tool.get("parameters")
        yield parts.tool(_full_name(call), tool.get("description"), parameters), call
    else:
        raise RequestError(
            f"a tool of type {short(kind)} is not supported; use functions and custom tools"
        )


def _full_name(call: Mapping[str, Any]) -> str:
    """Return the name by which the model knows the tool of a call."""
    name = parts.text(call.get("name"), "a tool's name")
    space = call.get("namespace")
    return f"{parts.text(space, 'namespace')}.{name}" if space else name


def reply(response: Response, request: Request, number: int) -> dict[str, Any]:
    """Return the body of a whole response; `number` counts the episode's responses."""
    sent = request.tokens
    said = response.tokens
    usage = {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sent + said,
    }
    output = _items(response, request, number)
    return {**_head(request, number), "status": "completed", "output": output, "usage": usage}


def events(response: Response, request: Request, number: int) -> Iterator[bytes]:
    """Yield the events of a streamed response."""
    for count, (kind, data) in enumerate(_events(response, request, number)):
        yield parts.event(f"response.{kind}", sequence_number=count, **data)


def _events(
    response: Response, request: Request, number: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**_head(request, number), "status": "in_progress", "output": [], "usage": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(_items(response, request, number)):
        at: dict[str, Any] = {"output_index": index, "item_id": item["id"]}
        if "content" in item:
            (part,) = item["content"]
            at["content_index"] = 0
            if part["type"] == "output_text":
                at["logprobs"] = []
            yield (
                "output_item.added",
                {**at, "item": {**item, "content": [], "status": "in_progress"}},
            )
            yield "content_part.added", {**at, "part": {**part, "text": ""}}
            yield f"{part['type']}.delta", {**at, "delta": part["text"]}
            yield f"{part['type']}.done", {**at, "text": part["text"]}
            yield "content_part.done", {**at, "part": part}
        else:
            key, kind = _CALL_KINDS[item["type"]]
            yield "output_item.added", {**at, "item": {**item, key: "", "status": "in_progress"}}
            yield f"{kind}.delta", {**at, "delta": item[key]}
            yield f"{kind}.done", {**at, "name": item["name"], key: item[key]}
        yield "output_item.done", {**at, "item": item}
    yield "completed", {"response": reply(response, request, number)}


def _head(request: Request, number: int) -> dict[str, Any]:
    empty = (
        "error",
        "incomplete_details",
        "instructions",
        "previous_response_id",
        "temperature",
        "top_p",
    )
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": request.model,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        **dict.fromkeys(empty),
    }


def _items(response: Response, request: Request, number: int) -> list[dict[str, Any]]:
    """Write the response as output items."""
    message = assistant_message(response, number)
    done = {"status": "completed"}
    items: list[dict[str, Any]] = []
    if response.reasoning:
        thought = {"type": "reasoning_text", "text": response.reasoning}
        items.append(
            {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [thought], **done}
        )
    if response.text or not response.calls:
        text = {"type": "output_text", "text": response.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{number}",
                "type": "message",
                "role": "assistant",
                "content": [text],
                **done,
            }
        )
    for index, call in enumerate(message.get("tool_calls", ())):
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"id": f"fc_{number}_{index}", "call_id": call["id"], **done}
        item |= request.items.get(name, {"type": "function_call", "name": name})
        said: Any = json.dumps(arguments, ensure_ascii=False)
        if item["type"] == "custom_tool_call" and isinstance(arguments.get("input"), str):
            said = arguments["input"]
        key, _ = _CALL_KINDS[item["type"]]
        items.append({**item, key: said})
    return items
