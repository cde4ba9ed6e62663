"""OpenEnv's WebSocket protocol, as a client speaks it: addresses, frames and error codes.

One WebSocket at `/ws` is one session with its own environment. The client sends one request and
waits for its reply:

    {"type": "reset", "data": {"seed": 7}}    {"type": "observation", "data": {OBSERVATION}}
    {"type": "step", "data": {ACTION}}        {"type": "observation", "data": {OBSERVATION}}
    {"type": "state"}                         {"type": "state", "data": {...}}
    {"type": "close"}                         no reply; the server ends the session
    {"type": "mcp", "data": {JSON-RPC}}       {"type": "mcp", "data": {JSON-RPC}}

OBSERVATION is `"observation": {...}, "reward": 0.0, "done": false`.

A request that fails gets `{"type": "error", "data": {"message": ..., "code": ...}}`. After
`CAPACITY_REACHED`, which a full server sends before any request, and after `FACTORY_ERROR` and
`SESSION_ERROR`, the server closes the socket. Source: `openenv/core/env_server` (`types.py`,
`http_server.py`, `mcp_types.py`) of the package openenv 0.10.0.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

LIST_TOOLS = "list_tools"
"""The action `{"type": "list_tools"}` of MCP environments: the observation's `tools` have `name`,
`description` and `input_schema`."""
CALL_TOOL = "call_tool"
"""The action `{"type": "call_tool", "tool_name": ..., "arguments": {...}}`: the observation has
`tool_name`, and `result` or `error` (`{"error_type": ..., "message": ...}`)."""
VALIDATION_ERROR = "VALIDATION_ERROR"
"""Code of an error frame: the action does not fit the server's schema; it was not executed."""
EXECUTION_ERROR = "EXECUTION_ERROR"
"""The environment raised an exception."""
CAPACITY_REACHED = "CAPACITY_REACHED"
"""All sessions of the server are taken."""
_MAX_MESSAGE = 500


class MalformedFrameError(ValueError):
    """A frame breaks the protocol; the text says how, in words that follow "the server sent"."""


class RejectedError(Exception):
    """The answer is not a valid action; the text says why, for the model."""


class ErrorReply(Exception):
    """The server answered with an error frame of this code, one of the above or another text."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
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


class _Detail(BaseModel):
    loc: list[Any] = []
    msg: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.loc))}: {self.msg}"


class _Error(BaseModel):
    code: str = "UNKNOWN"
    message: str = "no message"
    errors: list[_Detail] | None = None
    """After a validation error, what is wrong with which field."""


class _ObservationFrame(BaseModel):
    type: Literal["observation"]
    data: Outcome


class _ErrorFrame(BaseModel):
    type: Literal["error"]
    data: _Error


_FRAMES: TypeAdapter[_ObservationFrame | _ErrorFrame] = TypeAdapter(
    Annotated[_ObservationFrame | _ErrorFrame, Field(discriminator="type")]
)


def write_frame(kind: str, data: Mapping[str, Any]) -> str:
    """Return a request as the text of its frame."""
    return json.dumps({"type": kind, "data": data})


def read_outcome(frame: str | bytes) -> Outcome:
    """Read the reply to `reset` or `step`.

    Raises:
        ErrorReply: it is an error frame.
        MalformedFrameError: it is neither an observation nor an error, or a part has the wrong
            type.
    """
    try:
        reply = _FRAMES.validate_json(frame)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"][1:])) or "a frame"
        raise MalformedFrameError(f"{place} {wrong['input']!r:.60}: {wrong['msg']}") from error
    if isinstance(reply, _ObservationFrame):
        return reply.data
    details = "; ".join(map(str, reply.data.errors or ()))
    raise ErrorReply(reply.data.code, (details or reply.data.message)[:_MAX_MESSAGE])
