"""An environment with one action per turn.

A response that the server refuses changes nothing there: the default action is sent instead or, without one, the last
observation is shown again with the reason. Each refusal is a turn.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from envs.errors import EnvironmentFault
from envs.loading import load_attribute
from envs.openenv.actions import call_user_function, make_reader, read_actions, read_image
from envs.openenv.protocol import Outcome
from envs.openenv.session import RejectedError, Session, open_session
from envs.openenv.settings import OpenEnvSettings
from envs.text_game import ANSWER_FORMAT, Frame, TextGame
from envs.tools.calls import short
from envs.tools.results import encodable

PROMPT = Path(__file__).with_name("prompt.j2")
Ending = Literal["terminated", "truncated"]


class OpenEnvGame(TextGame):
    """One episode on a server."""

    template_path = PROMPT
    settings: OpenEnvSettings

    def __init__(self, schema: Mapping[str, Any], settings: OpenEnvSettings, task: str, seed: int) -> None:
        super().__init__(settings)
        self.task, self.seed, self.deterministic = task, seed, settings.deterministic
        self._mapping = read_actions(settings, schema)
        self.actions = self._mapping.names
        self._sends_default = settings.default_action is not None or bool(self.actions)
        self.default_action = settings.default_action or next(iter(self.actions), "nothing")
        if not self.actions:
            what = "a JSON object" if self._mapping.fields else "what you do"
            self.answer_format = ANSWER_FORMAT.replace("one allowed action", what)
        self.max_steps = settings.max_steps or 0
        self._read = make_reader(settings)
        self._ending = read_ending(settings)
        self._session: Session | None = None

    def start(self) -> Frame:
        self.close()
        self._steps, self._return = 0, 0.0
        self._session, outcome = open_session(self.settings, self.seed, lambda session: session.reset(self.seed))
        with self._ended_by_errors():
            return self._frame(outcome)

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        self._steps += 1
        with self._ended_by_errors():
            try:
                action = self.translate(candidate)
                if action is None:
                    raise RejectedError("the answer is none of the allowed actions")
                return action, self._send(action)
            except RejectedError as why:
                if self._sends_default:
                    return None, self.play(self.default_action)
                if late := 0 < self.max_steps <= self._steps:
                    self.close()
                shown = f"Nothing was done: {why}.\n{self._last.long_term}"
                return None, replace(self._last, long_term=shown, reward=0.0, truncated=late)

    def play(self, action: str) -> Frame:
        try:
            return self._send(action)
        except RejectedError as error:
            raise EnvironmentFault(f"the server refuses env.default_action {action!r}: {error}") from error

    def translate(self, candidate: str) -> str | None:
        if not self.actions:
            return encodable(candidate)
        return next((name for name in self.actions if name.lower() == candidate.strip().lower()), None)

    def prompt_variables(self) -> dict[str, Any]:
        variables = {"instruction": self.settings.instruction or "", "fields": list(self._mapping.fields)}
        return {**super().prompt_variables(), **variables}

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._running = None, False

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """End the session if anything is raised, so that its place on the server is free."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _send(self, action: str) -> Frame:
        assert self._session is not None
        outcome = self._session.step(self._mapping.read(action))
        self._return += outcome.reward
        return self._frame(outcome)

    def _frame(self, outcome: Outcome) -> Frame:
        """Return the frame of a reply; ends the session with the episode."""
        ending = self._ending(outcome) if outcome.done else None
        out_of_time = 0 < self.max_steps <= self._steps
        if ending or out_of_time:
            self.close()
        long_term, short_term = self._read(outcome.observation)
        key = self.settings.picture
        self._last = Frame(
            long_term,
            short_term,
            outcome.reward,
            terminated=ending == "terminated",
            truncated=ending == "truncated" or (ending is None and out_of_time),
            progression=min(max(self._return, 0.0), 1.0),
            image=read_image(outcome.observation, key) if key and self.settings.vlm else None,
        )
        return self._last


def read_ending(settings: OpenEnvSettings) -> Callable[[Outcome], Ending]:
    """Return what `done` means; raises ConfigError if the import path leads nowhere."""
    given = settings.done_is
    if given in ("terminated", "truncated"):
        return lambda _: given
    function = load_attribute(given, "env.done_is")

    def ending(outcome: Outcome) -> Ending:
        found = call_user_function(function, f"env.done_is: {given}", outcome.observation, outcome.reward)
        if found not in ("terminated", "truncated"):
            raise EnvironmentFault(f"env.done_is: {given} returned {short(found)}, not 'terminated' or 'truncated'")
        return found

    return ending
