"""The worker's side of the environment pool: holds live environments and runs one command at a time.

A worker process reads pickled commands over a private socket, and ends when it closes.
"""

import contextlib
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from envs.base import BaseInteractionEnv, Observation, StepInfo, collect
from envs.errors import (
    ConfigError,
    EnvironmentFault,
    SlimeVerlogError,
    describe,
    place_of_method,
    text_of,
    thread_advice,
)
from envs.loading import checked_text, finish, load_env_module
from rollout.errors import EncodingError
from rollout.spec import EnvSpec, ObservationLimits
from rollout.tokens.image_files import read_image
from rollout.turn import EnvReply
from rollout.workers.reply import HEADER, check_observation, check_reply, cut_messages, cut_observation, read_step

WORDS = ("left", "go", "yes", "stop", "42", "open the door", "I do not know", "look")
"""Responses of the random player where an environment names no actions."""


class EnvHost:
    """Holds environments by key. A command returns its result or raises; `handle` never raises."""

    def __init__(self) -> None:
        self._envs: dict[int, tuple[BaseInteractionEnv, EnvSpec]] = {}

    def build(self, key: int, spec: EnvSpec) -> None:
        self.close(key)
        self._envs[key] = spec.build(), spec

    def reset(self, key: int) -> EnvReply:
        env, spec = self._envs[key]
        began = time.perf_counter()
        observation = env.reset()
        seconds = time.perf_counter() - began
        with _placed(env, "reset"):
            return _within(make_reply(env, observation, seconds), spec.limits)

    def start(self, key: int, spec: EnvSpec) -> EnvReply:
        began = time.perf_counter()
        self.build(key, spec)
        return replace(self.reset(key), seconds=time.perf_counter() - began)

    def step(self, key: int, response_text: str) -> EnvReply:
        env, spec = self._envs[key]
        parts = collect()
        began = time.perf_counter()
        answer = env.step(response_text)
        seconds = time.perf_counter() - began
        with _placed(env, "step"):
            observation, done, info = read_step(answer)
            reply = _within(make_reply(env, observation, seconds, done, info), spec.limits)
            if parts:
                reply = replace(reply, parts=[(name, start - began, end - began) for name, start, end in parts])
            _ = reply.digest  # here, because hashing images would delay the trainer
            return reply

    def replay(self, key: int, spec: EnvSpec, responses: Sequence[str]) -> tuple[EnvReply, list[str]]:
        """Start the episode again and give it the same responses; returns the last reply and the digests of all."""
        reply = self.start(key, spec)
        digests = [reply.digest]
        for text in responses:
            reply = self.step(key, text)
            digests.append(reply.digest)
        return reply, digests

    def suggest(self, key: int, player: str, seed: int) -> str:
        """Return the next response of the player `random` or `expert`; raises ConfigError without an expert."""
        env, spec = self._envs[key]
        if player == "random":
            return random.Random(seed).choice(list(env.actions) or list(WORDS))
        expert = getattr(load_env_module(spec.env_path), "expert_action", None)
        if expert is None:
            raise ConfigError(f"{spec.env_path} has no function expert_action(env), so there is no expert to play it")
        return checked_text(finish(expert(env)), expert)

    def close(self, key: int) -> None:
        env, _ = self._envs.pop(key, (None, None))
        if env is not None:
            finish(env.close())

    def close_all(self) -> None:
        for key in list(self._envs):
            self.close(key)

    def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Run one command: (True, result), or (False, the error's type, text and traceback)."""
        try:
            return True, getattr(self, method)(*arguments)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too must not end the worker
            known = isinstance(error, SlimeVerlogError)
            text = f"{type(error).__name__}: {text_of(error)}" if known else self._described(error, *arguments)
            return False, f"{text}\n{traceback.format_exc(limit=-4)}"

    def _described(self, error: BaseException, key: int = -1, *rest: Any) -> str:
        path = self._envs[key][1].env_path if key in self._envs else ""
        advice = thread_advice(error)
        return describe(error, path) + (f"; {advice}" if advice else "")


@contextlib.contextmanager
def _placed(env: BaseInteractionEnv, method: str) -> Iterator[None]:
    """Adds the method's place in the user's code to what the contract check finds wrong."""
    try:
        yield
    except EnvironmentFault as error:
        place = place_of_method(env, method)
        raise EnvironmentFault(f"{error} (returned by {method}{f', {place}' if place else ''})") from error


def make_reply(
    env: BaseInteractionEnv,
    observation: Observation,
    seconds: float = 0.0,
    done: bool = False,
    info: StepInfo | None = None,
) -> EnvReply:
    """Collect what the environment shows now; raises EnvironmentFault if it breaks its contract."""
    check_observation(observation)
    message = env.format_observation(observation)
    known: dict[int, Any] = {}
    pictures = {
        name: [_own_image(image, f"multi_modal_data[{name!r}][{i}]", known) for i, image in enumerate(images)]
        for name, images in (observation.get("multi_modal_data") or {}).items()
    }
    own = {**observation, "text": dict(observation["text"])} | ({"multi_modal_data": pictures} if pictures else {})
    reply = EnvReply(
        observation=cast(Observation, own),
        messages=_copied([message] if isinstance(message, Mapping) else list(message), known),
        instruction_prompt=env.instruction_prompt,
        answer_format=env.answer_format,
        default_action=env.default_action,
        deterministic=env.deterministic,
        tools=env.tools,
        max_steps=getattr(env, "max_steps", 0) or 0,
        whole_prompts=getattr(env, "whole_prompts", False),
        continues=getattr(env, "continues", None),
        done=done,
        info=info,
        seconds=seconds,
        facts=getattr(env, "facts", tuple)(),
    )
    check_reply(reply)
    return reply


def _copied(value: Any, known: dict[int, Any], level: int = 0) -> Any:
    """Copy messages (level 0), parts of their content (1) or what is inside: an environment may change them later."""
    if isinstance(value, Mapping):
        if level == 1 and value.get("type") == "image" and value.get("image") is not None:
            return {**value, "image": _own_image(value["image"], "an image of a message", known)}
        return {k: _copied(v, known, 1 if (level, k) == (0, "content") else 2) for k, v in value.items()}
    return [_copied(inner, known, level) for inner in value] if isinstance(value, list | tuple) else value


def _own_image(image: Any, place: str, known: dict[int, Any]) -> Any:
    """An RGB PIL image that the environment does not hold, one for each image of the reply."""
    try:
        if id(image) not in known:
            opened = read_image(image)
            known[id(image)] = image, opened.copy() if opened is image else opened
        return known[id(image)][1]
    except EncodingError as error:
        raise EnvironmentFault(f"{place}: {error}") from error


def _within(reply: EnvReply, limits: ObservationLimits | None) -> EnvReply:
    """The reply with its observation and its messages cut to the limits; whole prompts are never cut."""
    if limits is None or reply.whole_prompts:
        return reply
    observation, messages = cut_observation(reply.observation, limits), cut_messages(reply.messages, limits)
    if observation is reply.observation and messages is reply.messages:
        return reply
    return replace(reply, observation=observation, messages=messages, was_cut=True)


def serve(connection: socket.socket, host: EnvHost) -> None:
    """Run commands until the parent closes the socket, which it may do while a command runs."""
    with connection.makefile("rb") as commands, contextlib.suppress(BrokenPipeError, ConnectionResetError):
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


def main(host: EnvHost | None = None) -> None:
    """Entry of a worker process: `sys.argv[1]` is its socket, which the environment's own processes do not inherit."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    serve(connection, host or EnvHost())
