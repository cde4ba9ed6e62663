"""The worker's side of the environment pool: holds live environments and runs one command at a time.

A worker process reads pickled commands from its parent over an inherited socket (`main`). It ends when the socket
closes. Pickles cross only this private socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo
from rollout.spec import EnvSpec
from rollout.workers.observation_limits import ObservationLimits
from rollout.workers.players import PLAYERS
from rollout.workers.reply import EnvReply, check_info, check_reply, digest

HEADER = struct.Struct("!Q")
"""Precedes every reply: the number of bytes in its pickle."""


class EnvHost:
    """Holds environments by key. A command returns its result or raises; `handle` never raises."""

    def __init__(self) -> None:
        self._envs: dict[int, tuple[BaseInteractionEnv, EnvSpec]] = {}

    def start(self, key: int, spec: EnvSpec) -> EnvReply:
        self.close(key)
        began = time.perf_counter()
        env = spec.build()
        self._envs[key] = env, spec
        return _within(_reply(env, env.reset(), began), spec.limits)

    def step(self, key: int, response_text: str) -> EnvReply:
        env, spec = self._envs[key]
        began = time.perf_counter()
        observation, done, info = env.step(response_text)
        check_info(info, bool(done))
        return _within(_reply(env, observation, began, bool(done), info), spec.limits)

    def replay(self, key: int, spec: EnvSpec, responses: Sequence[str]) -> tuple[EnvReply, list[str]]:
        """Start the episode again and give it the same answers; returns the last reply and the digests of all."""
        reply = self.start(key, spec)
        digests = [digest(reply)]
        for text in responses:
            reply = self.step(key, text)
            digests.append(digest(reply))
        return reply, digests

    def suggest(self, key: int, player: str, seed: int) -> str:
        """The next answer of a scripted player; the environment is not stepped."""
        env, spec = self._envs[key]
        return PLAYERS[player](env, spec.env_path, seed)

    def close(self, key: int) -> None:
        env, _ = self._envs.pop(key, (None, None))
        if env is not None:
            env.close()

    def close_all(self) -> None:
        for key in list(self._envs):
            self.close(key)

    def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Run one command: (True, result), or (False, the error's type, text and traceback)."""
        try:
            return True, getattr(self, method)(*arguments)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too must not end the worker
            where = traceback.format_exc(limit=-4)
            return False, f"{type(error).__name__}: {_text_of(error)}\n{where}"


def _text_of(error: BaseException) -> str:
    """The error's text, or a note if its `__str__` raises."""
    try:
        return str(error)
    except BaseException as second:
        return f"(its text cannot be shown: {type(second).__name__})"


def _reply(
    env: BaseInteractionEnv, observation: Observation, began: float, done: bool = False, info: StepInfo | None = None
) -> EnvReply:
    seconds = time.perf_counter() - began
    message = env.format_observation(observation)
    reply = EnvReply(
        observation=observation,
        messages=[message] if isinstance(message, Mapping) else list(message),
        instruction_prompt=env.instruction_prompt,
        answer_format=env.answer_format,
        default_action=env.default_action,
        deterministic=env.deterministic,
        tools=env.tools,
        max_steps=getattr(env, "max_steps", 0) or 0,
        done=done,
        info=info,
        seconds=seconds,
    )
    check_reply(reply)
    return reply


def _within(reply: EnvReply, limits: ObservationLimits | None) -> EnvReply:
    """The reply with its observation and its messages cut to the limits."""
    if limits is None:
        return reply
    observation, messages = limits.cut_observation(reply.observation), limits.cut_messages(reply.messages)
    if observation is reply.observation and messages is reply.messages:
        return reply
    return replace(reply, observation=observation, messages=messages, was_cut=True)


def serve(connection: socket.socket) -> None:
    """Run commands until the parent closes the socket."""
    host = EnvHost()
    with connection.makefile("rb") as commands:
        while commands.peek(1):
            ticket, method, arguments = pickle.load(commands)
            connection.sendall(pack_answer(ticket, host.handle(method, *arguments)))
    host.close_all()


def pack_answer(ticket: int, answer: tuple[bool, Any]) -> bytes:
    """The bytes that answer command `ticket`; an answer that cannot be pickled becomes a fault."""
    try:
        return pack((ticket, answer))
    except Exception as error:
        return pack((ticket, (False, f"what the environment returned cannot be pickled: {error}")))


def pack(value: Any) -> bytes:
    """The value's pickle after its length."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main() -> None:
    """Entry of a worker process: `sys.argv[1]` is its socket, which the environment's own processes do not inherit."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    serve(connection)
