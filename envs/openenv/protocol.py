"""OpenEnv's WebSocket protocol, as a client speaks it: addresses, frames and error codes.

One WebSocket at `/ws` is one session with its own environment. The client sends one request and waits for its reply:

    {"type": "reset", "data": {"seed": 7}}    {"type": "observation", "data": {"observation": {...}, "reward": 0.0,
    {"type": "step", "data": {ACTION}}                                         "done": false}}
    {"type": "state"}                         {"type": "state", "data": {...}}
    {"type": "close"}                         no reply; the server ends the session
    {"type": "mcp", "data": {JSON-RPC}}       {"type": "mcp", "data": {JSON-RPC}}

A request that fails gets `{"type": "error", "data": {"message": ..., "code": ...}}`. After `CAPACITY_REACHED`, which a
full server sends before any request, and after `FACTORY_ERROR` and `SESSION_ERROR`, the server closes the socket.
Source: `openenv/core/env_server` (`types.py`, `http_server.py`, `mcp_types.py`) of the package openenv 0.10.0.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, Field, ValidationError, field_validator

SOCKET_PATH = "/ws"
SCHEMA_PATH = "/schema"
"""HTTP GET; `{"action": JSON schema, "observation": JSON schema, "state": JSON schema}`."""

LIST_TOOLS = "list_tools"
"""The action `{"type": "list_tools"}` of MCP environments: the observation's `tools` have `name`, `description` and
`input_schema`."""
CALL_TOOL = "call_tool"
"""The action `{"type": "call_tool", "tool_name": ..., "arguments": {...}}`: the observation has `tool_name`, and
`result` or `error` (`{"error_type": ..., "message": ...}`)."""


_MAX_MESSAGE = 500


Request = Literal["reset", "step", "state", "close"]
VALIDATION_ERROR = "VALIDATION_ERROR"
"""Code of an error frame: the action does not fit the server's schema; it was not executed."""
EXECUTION_ERROR = "EXECUTION_ERROR"
"""The environment raised an exception."""
CAPACITY_REACHED = "CAPACITY_REACHED"
"""All sessions of the server are taken; `data` has `active_sessions` and `max_sessions`."""


class MalformedFrameError(ValueError):
    """A frame breaks the protocol; the text says how, in words that follow "the server sent"."""


class RejectedError(Exception):
    """The answer is not a valid action; the text says why, for the model."""


class ErrorReply(Exception):
    """The server answered with an error frame."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """The server's, as above or another text."""
        self.message = message


class Outcome(BaseModel):
    """The data of an observation frame: what `reset` and `step` return."""

    observation: dict[str, Any]
    reward: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 0.0
    """0 where the server sent null."""
    done: Annotated[bool, Field(strict=True)] = False

    @field_validator("reward", mode="before")
    @classmethod
    def _as_number(cls, reward: Any) -> Any:
        return float(reward or 0) if isinstance(reward, bool | None) else reward


def write_frame(kind: Request, data: Mapping[str, Any] | None = None) -> str:
    """Return a request as the text of its frame; the requests `state` and `close` have no data."""
    return json.dumps({"type": kind} if data is None else {"type": kind, "data": data})


def read_outcome(frame: str | bytes) -> Outcome:
    """Read the reply to `reset` or `step`.

    Raises:
        ErrorReply: it is an error frame.
        MalformedFrameError: it is neither an observation nor an error, or a part has the wrong type.
    """
    kind, data = read_frame(frame)
    if kind == "error":
        details = data.get("errors")  # after a validation error, what is wrong with which field
        found = []
        for part in details if isinstance(details, list) else ():
            if isinstance(part, Mapping) and isinstance(part.get("loc"), list | None):
                place = ".".join(map(str, part.get("loc") or ()))
                found.append(f"{place}: {part.get('msg')}")
        message = "; ".join(found) or str(data.get("message", "no message"))
        raise ErrorReply(str(data.get("code", "UNKNOWN")), message[:_MAX_MESSAGE])
    if kind != "observation":
        raise MalformedFrameError(f"a frame of type {kind!r:.60} where an observation was expected")
    try:
        return Outcome.model_validate(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise MalformedFrameError(f"an observation whose {place} is {wrong['input']!r:.60}: {wrong['msg']}") from error


class _Frame(BaseModel):
    type: Any = None
    data: dict[str, Any] = {}


def read_frame(frame: str | bytes) -> tuple[Any, Mapping[str, Any]]:
    """Return the type and data of a frame; no data is an empty mapping. Raises MalformedFrameError for another form."""
    try:
        message = _Frame.model_validate_json(frame)
    except ValidationError as error:
        raise MalformedFrameError(f"a frame that is not JSON with a type and data: {frame[:60]!r}") from error
    return message.type, message.data


def server_address(url: str) -> tuple[str, str]:
    """Return `(http://host[/path], ws://host[/path]/ws)` from a server's URL; raises ValueError if it is not one."""
    parts = urlsplit(url.strip())
    schemes = {"http": ("http", "ws"), "ws": ("http", "ws"), "https": ("https", "wss"), "wss": ("https", "wss")}
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix(SOCKET_PATH)
    web, socket = schemes[parts.scheme]
    return urlunsplit((web, parts.netloc, path, "", "")), urlunsplit((socket, parts.netloc, path + SOCKET_PATH, "", ""))
