"""Reads one request of an agent and one response of the model, independent of the API in which they
travel.

Bodies are read on a thread; what would take long or much memory is refused.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pydantic_core

from envs.agent import parts
from envs.agent.parts import Message, RequestError
from envs.base import text_of
from envs.call_form import CallForm
from envs.calls import Call, find_calls, reasoning_end
from envs.errors import MissingDependencyError, ToolError
from envs.images import ImageError, TooManyPixelsError, open_image
from envs.json_text import short
from envs.tools.results import encodable
from envs.tools.schema import Parameters

CHARS_PER_TOKEN = 4
"""For the token counts that clients expect. The environment does not see tokens."""
MAX_STOPS = 64


@dataclass(frozen=True)
class Request:
    """One request, in the form that chat templates take."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in OpenAI's form."""
    stops: tuple[str, ...] = ()
    """Texts before which the answer is cut."""
    model: str = ""
    streams: bool = False
    size: int = 0
    """Bytes of its body."""
    tokens: int = 0
    """Estimated length."""
    digest: str = ""
    """Equal for requests with the same content."""
    thread: str = ""
    """Equal for requests of the same thread."""
    compacts: bool = False
    """The agent says that it only summarises its own conversation, so nothing else moves."""
    items: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By name of the tool, what its calls say beside their arguments (Responses API)."""


@dataclass(frozen=True)
class Response:
    """The model's answer as the agent gets it."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()
    """Why calls in the text cannot be read; the agent then gets them as text."""
    stop: str = ""
    """The client's stop text at which the answer was cut."""
    span: tuple[int, int] | None = field(default=None, compare=False)
    """Characters [start, end) of the calls in the model's own text."""
    spelled: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    """The calls' arguments as the model spelled them: texts, such as `false` or `1.0`, if its calls
    are markup."""

    @property
    def written(self) -> str:
        """Return the answer without its reasoning, in one text."""
        bodies = (
            f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"
            for call in self.calls
        )
        return "\n".join(filter(None, [self.text, *bodies]))

    @property
    def tokens(self) -> int:
        """Return the estimated length in tokens."""
        calls = sum(len(call.name) + len(json.dumps(dict(call.arguments))) for call in self.calls)
        return (len(self.text) + len(self.reasoning) + calls) // CHARS_PER_TOKEN + 1


def read_response(
    text: str, request: Request, max_calls: int, form: CallForm | None = None
) -> Response:
    """Split the model's text into reasoning, text and, if the request offers tools, calls; `form`:
    as `find_calls`."""
    text = encodable(text)
    start = reasoning_end(text, form)
    start = len(text) if start is None else start
    reasoning = text[:start].strip().removeprefix("<think>").removesuffix("</think>").strip()
    stops = [
        (position, stop) for stop in request.stops if (position := text.find(stop, start)) >= 0
    ]
    end, stop = min(stops, default=(len(text), ""))
    kept = text[:end]
    if not request.tools:
        return Response(kept[start:].strip(), reasoning, stop=stop)
    found = find_calls(kept, max_calls, form)
    errors = (
        *found.errors,
        *([f"an answer may hold at most {max_calls} calls"] if found.cut else []),
    )
    if errors or found.span is None:
        return Response(kept[start:].strip(), reasoning, (), errors, stop, found.span)
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in request.tools
    }
    calls = []
    for call in found.calls:
        arguments = call.arguments
        if call.as_text:
            with contextlib.suppress(AttributeError, TypeError, ToolError):
                # Without a schema, the arguments stay text.
                arguments = Parameters(schemas.get(call.name, {})).convert(arguments)
        calls.append(Call(call.name, arguments))
    text = kept[start : found.span[0]].strip()
    return Response(
        text,
        reasoning,
        tuple(calls),
        (),
        stop,
        found.span,
        tuple(call.arguments for call in found.calls),
    )


def assistant_message(response: Response, number: int, spelled: bool = False) -> Message:
    """Write a response as the message that the agent sends back with its next request.

    With `spelled`, the arguments are texts where the model wrote texts, so that a template spells
    them as it did.
    """
    # The ids are nine letters and digits, as Mistral's chat template demands.
    calls = [
        parts.call(
            f"c{number:05d}{index:03d}",
            call.name,
            dict(response.spelled[index] if spelled else call.arguments),
        )
        for index, call in enumerate(response.calls)
    ]
    return parts.assistant(response.text, response.reasoning, calls)


def make_request(
    body: Mapping[str, Any],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    stops_key: str = "stop",
) -> Request:
    """Make a request of what an API's format has read; its system messages and tools identify its
    thread."""
    if not messages:
        raise RequestError("the request has no messages")
    stops = body.get(stops_key) or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list):
        raise RequestError(f"{stops_key} must be a text or a list of texts, got {short(stops)}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{stops_key} may hold at most {MAX_STOPS} texts, got {len(stops)}")
    thread = hashlib.blake2b(digest_size=16)
    for message in messages:
        if message["role"] == "system":
            thread.update(text_of(message).encode() + b"\0")
    for tool in tools:
        thread.update(b"\1" + tool["function"]["name"].encode())
    return Request(
        messages=tuple(messages),
        tools=tuple(tools),
        stops=tuple(parts.text(stop, stops_key) for stop in stops if stop != ""),
        model=parts.text(body.get("model"), "model"),
        streams=body.get("stream") is True,
        thread=thread.hexdigest(),
    )


BYTES_PER_VALUE = 32
"""A request of n bytes may hold n / 32 JSON values, because a value of three bytes takes 64 in
memory."""
PIXELS_PER_BYTE = 2
"""Pixels that the images of a request may have together, per byte of the longest request; a pixel
takes 4 bytes."""


def read_request(
    read: Callable[[Mapping[str, Any]], Request],
    path: str,
    raw: bytearray,
    thread: str,
    compacts: bool,
    max_bytes: int,
) -> Request:
    """Read a request from its body, which is emptied; raises RequestError if it is unusable or too
    large.

    Args:
        read: the API's function from a JSON object to a request.
        thread, compacts: what the headers say; `thread` is empty if the agent gives no name.
        max_bytes: the session's budget, from which those of values and pixels follow.
    """
    if sum(map(raw.count, (b"[", b"{", b","))) > max_bytes // BYTES_PER_VALUE:
        raise RequestError(
            f"the request has more than {max_bytes // BYTES_PER_VALUE} values (env.request_mb)", 413
        )
    try:
        body = pydantic_core.from_json(raw, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the request is not a JSON object")
    request = read(body)
    size = len(raw)
    digest = hashlib.blake2b(path.encode() + b"\0", digest_size=16)
    digest.update(raw)
    raw.clear()
    left = max_pixels = max_bytes * PIXELS_PER_BYTE
    for url in _images(request.messages):
        try:
            image = open_image(url, left)
        except TooManyPixelsError as error:
            limit = f"the pictures of a request may have {max_pixels} pixels together"
            raise RequestError(f"{error}; {limit} (env.request_mb)") from error
        except (ImageError, MissingDependencyError) as error:
            raise RequestError(str(error)) from error
        left -= image.width * image.height
    tokens = (size - sum(map(len, _images(request.messages)))) // CHARS_PER_TOKEN
    known = {"digest": digest.hexdigest(), "thread": thread or request.thread}
    return replace(request, size=size, tokens=tokens, compacts=compacts, **known)


def with_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with decoded images in place of data URIs."""
    decoded = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                part | {"image": open_image(part["image"])} if "image" in part else part
                for part in content
            ]
        decoded.append({**message, "content": content})
    return decoded


def _images(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part["image"] for part in message["content"] if part["type"] == "image")
