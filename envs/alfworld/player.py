"""Plays one ALFWorld game: sends commands, returns text and outcome, and plans with the game's
planner."""

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fast_downward  # noqa: F401 - fails here if missing; textworld would fail only later
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv
from textworld.envs.pddl import textgen

_translating = threading.Lock()
# Each holds a copy of the planner's library. Unloading one crashes the interpreter at exit, so they
# are reused.
_idle: list[PddlEnv] = []


def _cached(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Parse each piece of grammar once, and return a copy, since callers modify the result."""
    parsed = functools.lru_cache(maxsize=4096)(parse)
    return functools.wraps(parse)(
        lambda *texts, **options: copy.deepcopy(parsed(*texts, **options))
    )


# textworld parses the same few dozen pieces again for every command, which takes half of a step's
# time.
if not hasattr(textgen._parse_and_convert, "__wrapped__"):
    textgen._parse_and_convert = _cached(textgen._parse_and_convert)


@dataclass(frozen=True)
class Moment:
    """The game's unchanged reply to a command; `commands` are those that it would accept next."""

    text: str
    won: bool
    commands: tuple[str, ...]


class Player:
    """One running game; `game` has the format of ALFWorld's `game.tw-pddl` files."""

    def __init__(self, game: Mapping[str, Any]) -> None:
        try:
            self._pddl = _idle.pop()
        except IndexError:
            self._pddl = PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))
        self._env = AlfredDemangler(self._pddl)
        with _translator():
            self._env.load(game)
        self._open = True

    def reset(self) -> Moment:
        with _translator():
            return _moment(self._env.reset())

    def send(self, command: str) -> Moment:
        return _moment(self._env.step(command)[0])

    def plan(self) -> list[str]:
        """Return commands that win from here, found by textworld's planner; empty if there are
        none."""
        return self._pddl._pddl_state.replan(self._pddl._entity_infos)

    def close(self) -> None:
        if self._open:
            self._open = False
            _idle.append(self._pddl)


def _moment(state: Any) -> Moment:
    return Moment(state.feedback, bool(state.won), tuple(state.admissible_commands))


@contextlib.contextmanager
def _translator() -> Iterator[None]:
    """Lock the planner's translator, which changes `sys.argv`, `sys.stdout` and its own globals."""
    with _translating:
        arguments = sys.argv
        try:
            yield
        finally:
            sys.argv = arguments
