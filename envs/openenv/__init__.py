"""Environments of OpenEnv servers, over their WebSocket protocol and with the package websockets
alone.

In a game, a response that the server refuses changes nothing there: the default action is sent
instead or, without one, the last observation is shown again with the reason. Each refusal is a
turn. With tools, every call is a step on the server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from envs.base import (
    BaseInteractionEnv,
    Observation,
    StepInfo,
    closed_on_error,
    describe_task,
    read_env_settings,
)
from envs.errors import ConfigError, EnvironmentFault
from envs.json_text import short
from envs.openenv.actions import fields_of, make_reader, read_actions, read_image
from envs.openenv.protocol import CALL_TOOL, LIST_TOOLS, Outcome, RejectedError
from envs.openenv.session import Session, action_schema, check_unchanged, first_seen, open_session
from envs.openenv.settings import OpenEnvSettings
from envs.questions import Question
from envs.text_game import ANSWER_FORMAT, Frame, TextGame
from envs.tools.env import ToolEnv
from envs.tools.mcp.tools import read_schemas, tool_result
from envs.tools.results import ToolResult, ToolSpec, encodable, read_result
from envs.tools.settings import ToolSettings

PROMPT = Path(__file__).with_name("prompt.j2")
EMPTY = "The episode begins."
"""Shown where the first observation has no text."""
UNLIMITED_STEPS = 1000
"""Turns of an episode with `max_steps: null`."""
_WHAT = "tools"
"""What a server with tools must not change; `first_seen` keeps it."""
_UNUSED = ("actions", "default_action", "vlm", "binary_reward", "show_time_left", "shaping")
"""Settings that do not apply to a server with tools."""


class OpenEnvGame(TextGame):
    """One episode on a server."""

    template_path = PROMPT
    settings: OpenEnvSettings

    def __init__(
        self, schema: Mapping[str, Any], settings: OpenEnvSettings, task: str, seed: int
    ) -> None:
        super().__init__(settings)
        self.task = task
        self.seed = seed
        self.deterministic = settings.deterministic
        self._mapping = read_actions(settings, schema)
        self.actions = self._mapping.names
        self._sends_default = settings.default_action is not None or bool(self.actions)
        self.default_action = settings.default_action or next(iter(self.actions), "nothing")
        if not self.actions:
            what = "a JSON object" if self._mapping.fields else "what you do"
            self.answer_format = ANSWER_FORMAT.replace("one allowed action", what)
        self._read = make_reader(settings)
        self._session: Session | None = None

    def start(self) -> Frame:
        self.close()
        self._return = 0.0
        self._session, outcome = open_session(
            self.settings, self.seed, lambda session: session.reset(self.seed)
        )
        with closed_on_error(self):  # so that its place on the server is free
            return self._frame(outcome)

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        with closed_on_error(self):
            reply = super().step(response_text)
        if not self._running:
            self.close()
        return reply

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        try:
            action = self.translate(candidate)
            if action is None:
                raise RejectedError("the answer is none of the allowed actions")
            return action, self._send(action)
        except RejectedError as why:
            if self._sends_default:
                return None, self.play(self.default_action)
            shown = f"Nothing was done: {why}.\n{self._last.long_term}"
            return None, replace(self._last, long_term=shown, reward=0.0)

    def play(self, action: str) -> Frame:
        try:
            return self._send(action)
        except RejectedError as error:
            raise EnvironmentFault(
                f"the server refuses env.default_action {action!r}: {error}"
            ) from error

    def translate(self, candidate: str) -> str | None:
        if not self.actions:
            return encodable(candidate)
        wanted = candidate.strip().lower()
        return next((name for name in self.actions if name.lower() == wanted), None)

    def prompt_variables(self) -> dict[str, Any]:
        variables = {
            "instruction": self.settings.instruction or "",
            "fields": list(self._mapping.fields),
        }
        return {**super().prompt_variables(), **variables}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        self._running = False

    def _send(self, action: str) -> Frame:
        assert self._session is not None
        outcome = self._session.step(self._mapping.read(action))
        self._return += outcome.reward
        return self._frame(outcome)

    def _frame(self, outcome: Outcome) -> Frame:
        settings = self.settings
        long_term, short_term = self._read(outcome.observation)
        self._last = Frame(
            long_term,
            short_term,
            outcome.reward,
            terminated=outcome.done and settings.done_is == "terminated",
            truncated=outcome.done and settings.done_is == "truncated",
            progression=min(max(self._return, 0.0), 1.0),
            image=read_image(outcome.observation, settings.picture or "") if settings.vlm else None,
        )
        return self._last


class _ServerTool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


_TOOLS = TypeAdapter(Annotated[list[_ServerTool], Field(min_length=1)])


class OpenEnvTools(ToolEnv):
    """One episode on a server. It ends when the server says so, or with an answer that calls no
    tool."""

    def __init__(self, settings: OpenEnvSettings, task: str, seed: int) -> None:
        useless = [key for key in _UNUSED if getattr(settings, key)]
        if useless:
            raise ConfigError(
                f"env.{useless[0]}: the server offers tools, which it does not apply to; remove it"
            )
        self._server = settings
        self._game: Session | None = None
        self._ended = False
        self._read = make_reader(settings)
        known = first_seen(_WHAT, settings)
        if known is None:
            session, known = open_session(
                settings, seed, lambda session: _list_tools(session, settings)
            )
            session.close()
        label = f"the OpenEnv server {settings.urls[0]}"
        schemas = read_schemas(known, label)
        specs = [
            ToolSpec(schema, partial(self._call, name), source=label)
            for name, schema in schemas.items()
        ]
        # The session's own time-out comes first, since it is a fault.
        call_s = settings.step_timeout_s + 5.0
        tool_settings = ToolSettings(
            instruction=settings.instruction,
            prompt_template=settings.prompt_template,
            tools_in=settings.tools_in,
            max_steps=settings.max_steps or UNLIMITED_STEPS,
            max_calls=settings.max_calls,
            timeout_s=call_s,
            turn_timeout_s=call_s * settings.max_calls,
            format_penalty=settings.format_penalty,
            deterministic=settings.deterministic,
        )
        super().__init__(Question(""), specs, tool_settings, task, seed)

    def reset(self) -> Observation:
        self.close()
        session, outcome = open_session(self._server, self.seed, self._begin)
        self._ended = False
        with closed_on_error(session):
            text = "\n".join(filter(None, self._read(outcome.observation))) or EMPTY
            self.question = Question(text)
            self.mission = text
            observation = super().reset()
        self._game = session
        return observation

    def _begin(self, session: Session) -> Outcome:
        _list_tools(session, self._server)
        return session.reset(self.seed)

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        observation, done, info = super().step(response_text)
        if self._ended and self._server.done_is == "truncated":
            info["terminated"] = False
            info["truncated"] = True
        return observation, done, info

    def over(self) -> bool:
        return self._ended

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None
        super().close()

    def _call(self, tool: str, /, **arguments: Any) -> ToolResult:
        if self._ended:
            return _failed("the episode is over, so the tool was not called")
        assert self._game is not None
        try:
            outcome = self._game.step(
                {"type": CALL_TOOL, "tool_name": tool, "arguments": arguments}
            )
        except RejectedError as error:
            return _failed(str(error))
        self._ended = outcome.done
        observation = outcome.observation
        reward = outcome.reward
        error = observation.get("error")
        result = observation.get("result")
        if error:
            return _failed(
                str(error.get("message") if isinstance(error, Mapping) else error), reward
            )
        if isinstance(result, Mapping) and isinstance(result.get("content"), list):
            try:
                return replace(tool_result(result), reward=reward)
            except (KeyError, TypeError, AttributeError) as problem:
                raise EnvironmentFault(
                    f"the server sent a result that is not MCP's: {short(result)}"
                ) from problem
        if "result" not in observation:
            return ToolResult("\n".join(filter(None, self._read(observation))), reward=reward)
        return replace(read_result(result, self.settings), reward=reward)


def _failed(why: str, reward: float = 0.0) -> ToolResult:
    return ToolResult(f"error: {why}", reward=reward, failed=True)


def _list_tools(session: Session, settings: OpenEnvSettings) -> Sequence[Mapping[str, Any]]:
    """List the tools before the reset, so that it does not count as a step; raises EnvironmentFault
    if it fails."""
    tools: Any = session.first("step", {"type": LIST_TOOLS}).observation.get("tools")
    try:
        _TOOLS.validate_python(tools)
    except ValidationError as error:
        what = f"{session.label} was asked for its tools and sent {short(tools)}"
        raise EnvironmentFault(what) from error
    check_unchanged(_WHAT, tools, settings, session.url)
    return tools


SETTINGS = OpenEnvSettings
DEFAULT_TASK = "default"


def build_env(sample: Any, args: Any) -> BaseInteractionEnv:
    """Build the environment for the task and seed in `sample.metadata`, with the settings in
    `args.env`.

    Asks a server for its schema, which decides whether the model acts or calls tools; raises
    EnvironmentFault if none answers, or if the schema has changed since the first episode of this
    process.
    """
    task, seed = describe_task(sample)
    settings = read_env_settings(OpenEnvSettings, args)
    schema = action_schema(settings, seed)
    fields = fields_of(schema)
    calls_tools = not fields or (
        "tool_name" in fields and "type" in fields and fields["type"].constant == CALL_TOOL
    )
    if settings.action == "tools" or (settings.action == "auto" and calls_tools):
        return OpenEnvTools(settings, task, seed)
    return OpenEnvGame(schema, settings, task, seed)
