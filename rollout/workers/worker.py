"""The worker's side of the environment pool: hosts live environments, runs one command at a time.

A worker process serves length-prefixed pickles from its parent over an inherited socket (`main`), and ends when
the socket closes or the parent is gone. Pickles cross only this private socket.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo
from rollout.spec import EnvSpec
from rollout.workers.observation_limits import ObservationLimits
from rollout.workers.reply import EnvReply, check_reply, digest

HEADER = struct.Struct("!Q")


class EnvHost:
    """Holds environments by key. Every method returns a reply or raises; `handle` never raises."""

    def __init__(self) -> None:
        self._envs: dict[int, tuple[BaseInteractionEnv, ObservationLimits | None]] = {}

    def start(self, key: int, spec: EnvSpec) -> EnvReply:
        self.close(key)
        began = time.perf_counter()
        env = spec.build()
        self._envs[key] = env, spec.limits
        return _within(_reply(env, env.reset(), began), spec.limits)

    def step(self, key: int, response_text: str) -> EnvReply:
        env, limits = self._envs[key]
        began = time.perf_counter()
        observation, done, info = env.step(response_text)
        return _within(_reply(env, observation, began, done, info), limits)

    def replay(self, key: int, spec: EnvSpec, responses: Sequence[str]) -> tuple[EnvReply, list[str]]:
        """Start the episode again and give it the same answers; digests are those of every reply."""
        reply = self.start(key, spec)
        digests = [digest(reply)]
        for text in responses:
            reply = self.step(key, text)
            digests.append(digest(reply))
        return reply, digests

    def close(self, key: int) -> None:
        env, _ = self._envs.pop(key, (None, None))
        if env is not None:
            env.close()

    def close_all(self) -> None:
        for key in list(self._envs):
            self.close(key)

    def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Run one command: (True, result) or (False, what broke, as text for people)."""
        try:
            return True, getattr(self, method)(*arguments)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and the like must not reach the event loop
            where = traceback.format_exc(limit=-4)
            return False, f"{type(error).__name__}: {_words(error)}\n{where}"


def _words(error: BaseException) -> str:
    """The error's text, or a note where the error cannot be shown."""
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
        done=bool(done),
        info=info,
        seconds=seconds,
    )
    check_reply(reply)
    return reply


def _within(reply: EnvReply, limits: ObservationLimits | None) -> EnvReply:
    """The reply with its observation cut to the limits, in both of its forms."""
    if limits is None:
        return reply
    observation, left_out = limits.cut_observation(reply.observation)
    messages = limits.cut_messages(reply.messages)
    left_out = left_out or int(messages is not reply.messages)
    return replace(reply, observation=observation, messages=messages, left_out=left_out) if left_out else reply


def write_frame(value: Any) -> bytes:
    """A length, then the pickle."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = connection.recv(min(1 << 20, count - len(chunks)))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def _die_with(parent: int) -> None:
    """A hung environment never reads the closed socket, so a thread watches for the parent's end."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def serve(connection: socket.socket) -> None:
    """Answer commands until the parent closes the socket."""
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    host = EnvHost()
    while (header := _read_exactly(connection, HEADER.size)) is not None:
        body = _read_exactly(connection, HEADER.unpack(header)[0])
        if body is None:
            break
        ticket, method, arguments = pickle.loads(body)
        connection.sendall(answer_frame(ticket, host.handle(method, *arguments)))
    host.close_all()


def answer_frame(ticket: Any, outcome: tuple[bool, Any]) -> bytes:
    """The frame that answers command `ticket`; an outcome that cannot be sent is a fault in words."""
    try:
        return write_frame((ticket, outcome))
    except Exception as error:
        return write_frame((ticket, (False, f"what the environment returned cannot be pickled: {error}")))


def main() -> None:
    """Entry of a worker process: `sys.argv[1]` is the inherited socket, which no process of the environment gets."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    serve(connection)
