"""The tools of one episode: they begin with it, run its calls, pay and are released."""

import copy
import inspect
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.base import timed
from envs.calls import Call, Calls
from envs.errors import EnvironmentFault, ToolError
from envs.images import ImageError
from envs.json_text import short
from envs.tools.execution import ToolPlace, ToolTimeout
from envs.tools.results import Tool, ToolEpisode, ToolResult, ToolSpec, read_result
from envs.tools.settings import ToolSettings


class ToolSession:
    """One episode's tools. `counts` holds the number of failures of each kind."""

    def __init__(self, specs: Sequence[ToolSpec], settings: ToolSettings) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._specs = {spec.name: spec for spec in specs}
        self._live: dict[str, Tool] = {}
        self.place = ToolPlace()

    def create(self, episode: ToolEpisode) -> list[ToolResult]:
        """Make the stateful tools, return their greetings; raises EnvironmentFault if one fails,
        and releases all."""
        greetings = []
        for name, spec in self._specs.items():
            if not spec.stateful:
                continue
            seconds = spec.create_timeout_s or self._timeout(name)
            try:
                self._live[name] = spec.target(copy.deepcopy(dict(spec.config)))
                value = self._run(name, self._live[name].create, {"episode": episode}, seconds)
                if value is not None:
                    greetings.append(read_result(value, self.settings))
            except Exception as error:
                self.release()
                raise EnvironmentFault(
                    f"the tool {name} could not begin the episode: {error}"
                ) from error
        return greetings

    def check(self, found: Calls) -> tuple[list[Call], list[str]]:
        """Return the calls, with arguments converted to the schema's types, and all errors."""
        errors = list(found.errors)
        if found.cut:
            errors.append(f"an answer may hold at most {self.settings.max_calls} calls")
        calls = []
        for call in found.calls:
            spec = self._specs.get(call.name)
            if spec is None:
                errors.append(
                    f"there is no tool {short(call.name)}; there are {', '.join(self._specs)}"
                )
                continue
            arguments = spec.check.convert(call.arguments) if call.as_text else dict(call.arguments)
            if wrong := spec.check(arguments):
                errors.append(wrong)
            calls.append(replace(call, arguments=arguments))
        return calls, errors

    def run(self, call: Call, deadline: float) -> ToolResult:
        """Run a checked call until `deadline`, in `time.monotonic` seconds; passes on
        EnvironmentFault."""
        seconds = min(self._timeout(call.name), deadline - time.monotonic())
        live = self._live.get(call.name)
        function = live.execute if live is not None else self._specs[call.name].target
        try:
            if seconds <= 0:
                raise ToolTimeout(
                    "not run: the calls of this turn took longer than they may together"
                )
            with timed(f"tool {call.name}"):
                value = self._run(call.name, function, call.arguments, seconds)
            result = read_result(value, self.settings)
            if result.failed:
                self.counts["tool_errors"] += 1
            return result
        except (ToolError, ImageError) as error:
            self.counts["tool_errors"] += 1
            self.counts["tool_timeouts"] += isinstance(error, ToolTimeout)
            return read_result(ToolResult(f"error: {error}", failed=True), self.settings)

    def reward(self) -> float:
        """Return the stateful tools' rewards for the episode in total; a tool whose `calc_reward`
        fails counts as 0."""
        total = 0.0
        for name, tool in self._live.items():
            try:
                value = self._run(name, tool.calc_reward, {}, self._timeout(name))
                total += read_result((None, value, {}), self.settings).reward
            except ToolError:
                self.counts["tool_errors"] += 1
        return total

    def release(self) -> None:
        """Free the stateful tools; calling it twice is fine."""
        while self._live:
            name, tool = self._live.popitem()
            try:
                self._run(name, tool.release, {}, self._timeout(name))
            except ToolError:
                self.counts["tool_release_errors"] += 1
        self.place.end()

    def _run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        timeout_s: float,
    ) -> Any:
        """Run a method of a tool, on the event loop if any of its methods is async: its state
        belongs to one thread."""
        if not self._specs[name].is_async:
            return self.place.run(name, function, arguments, timeout_s)

        async def on_loop() -> Any:
            value = function(**arguments)
            return await value if inspect.isawaitable(value) else value

        return self.place.run(name, on_loop, {}, timeout_s)

    def _timeout(self, name: str) -> float:
        return self._specs[name].timeout_s or self.settings.timeout_s
