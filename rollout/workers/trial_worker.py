"""The worker's side of a trial: a worker with a time limit per command and one-sentence faults."""

import logging
import reprlib
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from envs import time_limit
from envs.errors import (
    EnvironmentFault,
    JudgeError,
    SlimeVerlogError,
    advice_about,
    describe,
    one_line,
    place_of,
    text_of,
)
from envs.loading import checked_text, finish, load_env_module
from envs.time_limit import TimeUp, limited
from rollout.workers import worker
from rollout.workers.hosts import start_thread


class _TooSlow(TimeUp):
    """The time limit was reached."""


@dataclass(frozen=True)
class Fault:
    """Why a command failed: the name of the error's class, and one sentence."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class Abilities:
    """What an environment offers."""

    actions: tuple[str, ...]
    """Its named actions."""
    has_expert: bool
    max_steps: int
    """Steps after which it truncates the episode; 0 for no limit."""
    warnings: tuple[str, ...] = ()
    """What the package's environments have warned of in this process."""


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class TrialHost(worker.EnvHost):
    """Runs commands of the form (method, limit in seconds, path of the environment, whether in a thread, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = start_thread()
        self._warnings = _Warnings()
        logging.getLogger("envs").addHandler(self._warnings)

    def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        limit_s, path, in_thread, *rest = arguments

        def play() -> tuple[bool, Any]:
            try:
                return True, getattr(self, method)(*rest)
            except BaseException as error:  # SystemExit and KeyboardInterrupt too must not end the worker
                return False, _fault(error, method, path, limit_s)

        try:
            with limited(limit_s, _TooSlow):
                return self._thread.submit(play).result() if in_thread else play()
        except _TooSlow as error:
            return False, _fault(error.with_traceback(self._stack()), method, path, limit_s)

    def _stack(self) -> TracebackType | None:
        """Return where the thread is now, as a traceback."""
        found = None
        for thread in self._thread._threads:
            frame = sys._current_frames().get(thread.ident or 0)
            while frame is not None:
                found, frame = TracebackType(found, frame, frame.f_lasti, frame.f_lineno), frame.f_back
        return found

    def abilities(self, key: int) -> Abilities:
        """What a built environment offers."""
        env, spec = self._envs[key]
        actions = env.actions
        listed = isinstance(actions, Mapping | Sequence) and not isinstance(actions, str)
        if not listed or not all(isinstance(action, str) for action in actions):
            raise EnvironmentFault(
                f"actions must be a list of texts, or map them to descriptions, got {reprlib.repr(actions)}"
            )
        expert = getattr(load_env_module(spec.env_path), "expert_action", None)
        said = tuple(dict.fromkeys(self._warnings.said))
        return Abilities(tuple(actions), expert is not None, env.max_steps or 0, said)

    def suggest(self, key: int, player: str, seed: int) -> str:
        """Ask for the expert's reasoning too, as imitation does, to find its mistakes."""
        answer, (env, spec) = super().suggest(key, player, seed), self._envs[key]
        explain = getattr(load_env_module(spec.env_path), "explain_action", None)
        if player == "expert" and explain is not None:
            checked_text(finish(explain(env)), explain)
        return answer

    def tools(self, key: int) -> list[tuple[str, bool, str]]:
        """Call each tool once and grade the reference answer, after a reset: names, whether it worked, what came."""
        env: Any = self._envs[key][0]
        if not hasattr(env, "call_once"):  # no ToolEnv; other environments need not import what tools need
            return []
        from envs.tools.tryout import try_tools

        return [(found.name, found.worked, found.detail) for found in try_tools(env)]

    def draw(self, key: int) -> str:
        """Draw the state as the viewer does; empty without `render`. Raises EnvironmentFault for another drawing."""
        render = getattr(self._envs[key][0], "render", None)
        if not callable(render):
            return ""
        drawn = finish(render())
        shape = getattr(drawn, "shape", ())
        if len(shape) != 3 or shape[2] != 3 or str(getattr(drawn, "dtype", "")) != "uint8":
            said = f"render returned {reprlib.repr(drawn)}"
            raise EnvironmentFault(f"{said}; return a uint8 array (height, width, 3), or leave render out")
        return f"draws {shape[1]} x {shape[0]} pixels"

    def threads(self, key: int) -> list[str]:
        """Names of the threads that run in this process, without those that limit its commands."""
        return [thread.name for thread in threading.enumerate() if thread.name != time_limit.THREAD]


def _fault(error: BaseException, method: str, path: str, limit_s: float) -> Fault:
    kind = "JudgeError" if _is_from_a_service(error) else type(error).__name__
    called = "build_env" if method == "build" else method
    place = place_of(error, path)
    match error:
        case SlimeVerlogError():
            sentence = one_line(text_of(error))
        case _TooSlow():
            sentence = f"{called} took longer than {limit_s:g} s and was stopped at {place}"
        case SystemExit():
            sentence = f"{called} ended the process at {place}; raise an error there, or return done"
        case _:
            sentence = f"{called} raised {describe(error, path)}; {advice_about(error, path)}"
    return Fault("TooSlow" if isinstance(error, _TooSlow) else kind, sentence)


def _is_from_a_service(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, JudgeError):
            return True
        error = error.__cause__
    return False


def main() -> None:
    """Entry of the process."""
    worker.main(TrialHost())
