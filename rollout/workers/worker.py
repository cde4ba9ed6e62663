"""The worker's side of the environment pool: hosts live environments, runs one command at a time.

A worker process serves length-prefixed pickles from its parent over an inherited socket (`main`), and ends when
the socket closes or the parent is gone. Pickles cross only this private socket.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import os
import pickle
import reprlib
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo
from envs.errors import EnvironmentFault
from rollout.spec import EnvSpec
from rollout.workers.observation_limits import ObservationLimits

HEADER = struct.Struct("!Q")


@dataclass(frozen=True)
class EnvReply:
    """What an environment shows after `reset` (info is None) or `step`, and what it cost in seconds."""

    observation: Observation
    messages: Sequence[Mapping[str, Any]]
    """The observation as the environment itself would put it into the conversation."""
    instruction_prompt: str
    answer_format: str
    default_action: str
    deterministic: bool
    tools: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    info: StepInfo | None = None
    seconds: float = 0.0
    left_out: int = 0
    """Texts that were cut and pictures that were left out, because the observation was too large."""


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


def check_reply(reply: EnvReply) -> None:
    """Hold an environment to its contract.

    Raises:
        EnvironmentFault: an observation or info that the rollout cannot use, with the field and its value.
    """
    if not isinstance(reply, EnvReply):
        raise EnvironmentFault(f"a reply must be an EnvReply, got {reprlib.repr(reply)}")
    observation = reply.observation
    text = observation.get("text") if isinstance(observation, Mapping) else None
    if not isinstance(text, Mapping):
        raise EnvironmentFault(f"observation['text'] needs two strings, got {reprlib.repr(text)}")
    for part in ("long_term_context", "short_term_context"):
        _check_text(f"observation['text']['{part}']", text.get(part))
    _check_text("observation['obs_str']", observation.get("obs_str"))
    pictures = observation.get("multi_modal_data") or {}
    if not isinstance(pictures, Mapping) or not all(
        isinstance(images, list | tuple) and all(hasattr(image, "tobytes") for image in images)
        for images in pictures.values()
    ):
        raise EnvironmentFault(f"multi_modal_data must map names to lists of pictures, got {reprlib.repr(pictures)}")
    for name in ("instruction_prompt", "answer_format", "default_action"):
        _check_text(name, getattr(reply, name))
    if not reply.messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in reply.messages):
        raise EnvironmentFault(f"messages must be mappings with a role, got {reprlib.repr(reply.messages)}")
    for message in reply.messages:
        _check_texts("messages", message)
    if reply.info is not None:
        _check_info(reply.info, reply.done)


def _check_info(info: Any, done: bool) -> None:
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a mapping, got {reprlib.repr(info)}")
    for name, kind in (("terminated", bool), ("truncated", bool), ("valid_action", bool), ("executed_action", str)):
        if not isinstance(info.get(name), kind):
            raise EnvironmentFault(f"info['{name}'] must be {kind.__name__}, got {reprlib.repr(info.get(name))}")
    _check_text("info['executed_action']", info["executed_action"])
    for name in ("reward", "progression"):
        if not _is_finite(info.get(name)):
            raise EnvironmentFault(f"info['{name}'] must be a finite number, got {reprlib.repr(info.get(name))}")
    if done is not (info["terminated"] or info["truncated"]):
        raise EnvironmentFault(
            f"done is {done!r} but terminated is {info['terminated']} and truncated {info['truncated']}"
        )
    if info.get("action") is not None and not isinstance(info["action"], str):
        raise EnvironmentFault(f"info['action'] must be a string or None, got {reprlib.repr(info['action'])}")
    span = info.get("action_span")
    if span is not None and not (isinstance(span, Sequence) and [type(edge) for edge in span] == [int, int]):
        raise EnvironmentFault(f"info['action_span'] must be two whole numbers or None, got {reprlib.repr(span)}")
    metrics = info.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(isinstance(k, str) and _is_finite(v) for k, v in metrics.items()):
        raise EnvironmentFault(f"info['metrics'] must map names to finite numbers, got {reprlib.repr(metrics)}")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _check_text(name: str, value: Any) -> None:
    """Text that no tokenizer could encode would stop the batch, so it is the environment's fault."""
    if not isinstance(value, str):
        raise EnvironmentFault(f"{name} must be a string, got {reprlib.repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(f"{name} holds half of a surrogate pair: {reprlib.repr(value)}") from error


def _check_texts(name: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_texts(name, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(name, item)


def digest(reply: EnvReply) -> str:
    """Fingerprint of what the agent would see and be paid, to tell a true replay from another episode."""
    hasher = hashlib.blake2b(digest_size=16)
    text = reply.observation["text"]
    parts = [text["long_term_context"], text["short_term_context"], reply.observation["obs_str"], str(reply.done)]
    if reply.info is not None:
        parts.append(repr(float(reply.info["reward"])))
    for part in parts:
        hasher.update(part.encode("utf-8", "surrogatepass") + b"\0")
    for images in (reply.observation.get("multi_modal_data") or {}).values():
        for image in images:
            hasher.update(image.tobytes())
    return hasher.hexdigest()


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
