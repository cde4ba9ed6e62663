"""Plays one ALFWorld game: commands in, text and the game's own verdicts out, with a planner that knows the way."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fast_downward  # noqa: F401 - textworld notices only later that it is missing
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv
from textworld.envs.pddl import textgen

_translating = threading.Lock()
# Each holds a copy of the planner's library; unloading one makes the interpreter crash at its exit, so that they
# are lent again instead.
_idle: list[PddlEnv] = []


def _remember(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Parse each piece of grammar once; what is made of it is written to, so everybody gets a copy."""
    known = functools.lru_cache(maxsize=4096)(parse)
    return lambda *texts, **settings: copy.deepcopy(known(*texts, **settings))


# The same few dozen pieces are parsed again for every command of every turn, which is half of a step's time.
if not hasattr(textgen, "_parse_once"):
    textgen._parse_once = textgen._parse_and_convert
    textgen._parse_and_convert = _remember(textgen._parse_once)


@dataclass(frozen=True)
class Moment:
    """What the game shows after a command; `commands` are those that it would accept next."""

    text: str
    won: bool
    commands: tuple[str, ...]


class Player:
    """One running game; `game` has the form of ALFWorld's `game.tw-pddl` files."""

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
        """Commands that win from here, by the planner that comes with textworld; empty if there is no way."""
        return self._pddl._pddl_state.replan(self._pddl._entity_infos)

    def close(self) -> None:
        if self._open:
            self._open = False
            _idle.append(self._pddl)


def _moment(state: Any) -> Moment:
    return Moment(state.feedback.strip(), bool(state.won), tuple(state.admissible_commands))


@contextlib.contextmanager
def _translator() -> Iterator[None]:
    """The planner's translator rewrites `sys.argv`, `sys.stdout` and its own globals: one thread at a time."""
    with _translating:
        arguments = sys.argv
        try:
            yield
        finally:
            sys.argv = arguments
