"""The tools of one episode: created, called, asked for their reward, released.

Invariant: what a tool does wrong while the model uses it is a result that the model is shown and the logs count;
only a tool that cannot begin its episode, or says itself that the machine is broken, is a fault.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from envs.errors import EnvironmentFault, ToolError
from envs.pictures import PictureError
from envs.tools.calls import Call, Calls, short
from envs.tools.execution import ToolTimeout, run_bounded
from envs.tools.registry import Tool, ToolEpisode, ToolSpec
from envs.tools.results import ToolResult, failure, read_result
from envs.tools.settings import ToolOptions


class ToolSession:
    """One episode's tools. `counts` holds what went wrong since it was last emptied."""

    def __init__(self, specs: Sequence[ToolSpec], options: ToolOptions) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self._specs = {spec.name: spec for spec in specs}
        self._live: dict[str, Tool] = {}

    def create(self, episode: ToolEpisode) -> list[ToolResult]:
        """Make the stateful tools; what their `create` returned is shown with the question.

        Raises:
            EnvironmentFault: one of them could not begin; those that had begun are released.
        """
        shown = []
        for name, spec in self._specs.items():
            if not spec.stateful:
                continue
            try:
                self._live[name] = spec.target(dict(spec.config))
                value = run_bounded(name, self._live[name].create, {"episode": episode}, self._timeout(name))
                shown += [] if value is None else [read_result(value, self.options.limits())]
            except Exception as error:
                self.release()
                raise EnvironmentFault(f"the tool {name} could not begin the episode: {error}") from error
        return shown

    def check(self, found: Calls) -> tuple[list[Call], list[str]]:
        """The calls with their arguments in the types of the schema, and everything that is wrong with them."""
        errors = list(found.errors)
        if found.cut:
            errors.append(f"an answer may hold at most {self.options.max_calls} calls")
        calls = []
        for call in found.calls:
            spec = self._specs.get(call.name)
            if spec is None:
                errors.append(f"there is no tool {short(call.name)}; there are {', '.join(self._specs)}")
                continue
            arguments = spec.check.convert(call.arguments) if call.as_text else dict(call.arguments)
            wrong = spec.check(arguments)
            errors += [] if wrong is None else [wrong]
            calls.append(Call(call.name, arguments))
        return calls, errors

    def run(self, call: Call, deadline: float) -> ToolResult:
        """Run one checked call; `deadline` is the turn's, in `time.monotonic` seconds.

        Raises:
            EnvironmentFault: the tool says that the machine is broken.
        """
        seconds = min(self._timeout(call.name), deadline - time.monotonic())
        live = self._live.get(call.name)
        function = live.execute if live is not None else self._specs[call.name].target
        try:
            if seconds <= 0:
                raise ToolTimeout("not run: the calls of this turn took longer than they may together")
            return read_result(run_bounded(call.name, function, call.arguments, seconds), self.options.limits())
        except (ToolError, PictureError) as error:
            self.counts["tool_errors"] += 1
            self.counts["tool_timeouts"] += isinstance(error, ToolTimeout)
            return failure(str(error), self.options.limits())

    def reward(self) -> float:
        """The sum of what the stateful tools pay for the episode; one that fails to say pays nothing."""
        total = 0.0
        for name, tool in self._live.items():
            try:
                value = run_bounded(name, tool.calc_reward, {}, self._timeout(name))
                total += read_result((None, value), self.options.limits()).reward
            except ToolError:
                self.counts["tool_errors"] += 1
        return total

    def release(self) -> None:
        """Free the stateful tools; calling it twice is fine."""
        while self._live:
            name, tool = self._live.popitem()
            try:
                run_bounded(name, tool.release, {}, self._timeout(name))
            except ToolError:
                self.counts["tool_release_errors"] += 1

    def _timeout(self, name: str) -> float:
        own = self._specs[name].timeout_s
        return own if own is not None else self.options.timeout_s
