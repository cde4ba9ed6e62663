"""Reads the parts of a request's body that OpenAI's and Anthropic's APIs share, and refuses what
cannot be read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from envs.json_text import short

Message = dict[str, Any]


class RequestError(Exception):
    """A request that cannot be answered; the text tells the agent why. It is data, not a fault."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status

    def kind(self, of_server: str) -> str:
        """Return the error's type in OpenAI's and Anthropic's APIs, which differ in that of a
        server's error."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else of_server)


def text(value: Any, what: str) -> str:
    """Refuse what is not text."""
    if not isinstance(value, str):
        raise RequestError(f"{what} must be text, got {short(value)}")
    return value


def objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Refuse what is not a list of mappings; None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise RequestError(f"{what} must be a list of objects, got {short(value)}")
    return value


def offered(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools of a request, as its API writes them; none if `tool_choice` is `none`."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return [] if kind == "none" else objects(body.get("tools"), "tools")


def role(message: Mapping[str, Any], *known: str) -> str:
    """Return a message's role for the chat template, in which a developer is the system; refuse one
    not in `known`."""
    found = message.get("role")
    if not isinstance(found, str) or found not in known:
        raise RequestError(
            f"a message has the role {short(found)}; supported are {', '.join(known)}"
        )
    return "system" if found == "developer" else found


def content(value: Any, what: str) -> str | list[Message]:
    """Read a text, or a list of content parts, which become one text unless one of them is an
    image."""
    if isinstance(value, str):
        return value
    parts = [_part(part) for part in objects(value, what)]
    return (
        parts
        if any(part["type"] == "image" for part in parts)
        else "".join(part["text"] for part in parts)
    )


def _part(part: Mapping[str, Any]) -> Message:
    """Read a content part of any of the three APIs. An image's data URI is not decoded yet."""
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return {"type": "text", "text": text(part.get("text"), "text")}
        case "refusal":
            return {"type": "text", "text": text(part.get("refusal"), "refusal")}
        case "image_url" | "input_image":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
        case "image":
            url = source = part.get("source")
            if isinstance(source, Mapping) and source.get("type") == "base64":
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        case kind:
            raise RequestError(
                f"content of type {short(kind)} is not supported; send text and images"
            )
    if not isinstance(url, str) or not url.startswith("data:"):
        raise RequestError(
            f"images must be sent as base64 or data: URIs, got {short(url)}; addresses are not "
            "fetched"
        )
    return {"type": "image", "image": url}


def assistant(text: str, thought: str = "", calls: Sequence[Message] = ()) -> Message:
    """Write what the model generated in one response as chat templates expect it."""
    message: Message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(identity: Any, name: Any, arguments: Any) -> Message:
    """Write a tool call as chat templates expect it."""
    function = {"name": text(name, "the name of a tool call"), "arguments": arguments}
    return {
        "id": text(identity or "", "the id of a tool call"),
        "type": "function",
        "function": function,
    }


def result(identity: Any, value: Any) -> Message:
    """Write the result of a tool call as chat templates expect it."""
    found = content(value, "the result of a tool call")
    return {
        "role": "tool",
        "content": found,
        "tool_call_id": text(identity or "", "the id of a tool call"),
    }


def event(kind: str, **data: Any) -> bytes:
    """Write an event of a stream that has a type."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def arguments(value: Any) -> Any:
    """Parse the arguments of an earlier call, as chat templates expect; text that is not JSON stays
    as it is."""
    written = text(value or "{}", "the arguments of a tool call")
    try:
        return pydantic_core.from_json(written)
    except ValueError:
        return written


def tool(name: Any, description: Any, parameters: Any) -> Mapping[str, Any]:
    """Describe a tool in OpenAI's form; refuse it without a name, or if its parameters are not an
    object."""
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"the parameters of a tool must be a JSON schema, got {short(parameters)}"
        )
    function = {
        "name": text(name, "a tool's name"),
        "description": text(description or "", "a tool's description"),
        "parameters": dict(parameters or {"type": "object", "properties": {}}),
    }
    return {"type": "function", "function": function}
