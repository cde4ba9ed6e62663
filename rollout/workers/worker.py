"""The worker's side of the environment pool: holds live environments and runs one command at a
time.

A worker process reads pickled commands over a private socket, and ends when it closes.
"""

import asyncio
import contextlib
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from envs.base import BaseInteractionEnv, Observation, StepInfo, collect
from envs.errors import (
    EnvironmentFault,
    JudgeError,
    SlimeVerlogError,
    advice_about,
    describe,
    one_line,
    place_of,
    place_of_method,
    text_of,
)
from envs.loading import finish, thread_loop
from envs.time_limit import TimeUp, limited
from rollout.errors import EncodingError, WorkerFault
from rollout.spec import EnvSpec, ObservationLimits
from rollout.tokens.image_files import read_image
from rollout.turn import EnvReply
from rollout.workers.child import HEADER
from rollout.workers.reply import (
    check_observation,
    check_reply,
    cut_messages,
    cut_observation,
    read_step,
)


class TooSlow(TimeUp):
    """A command reached its time limit."""


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
                reply = replace(
                    reply, parts=[(name, start - began, end - began) for name, start, end in parts]
                )
            _ = reply.digest  # here, because hashing images would delay the trainer
            return reply

    def start(
        self, key: int, spec: EnvSpec, responses: Sequence[str]
    ) -> tuple[EnvReply, list[str]]:
        """Build and reset an environment and give it the responses; returns the last reply and the
        digests of all."""
        began = time.perf_counter()
        self.build(key, spec)
        reply = self.reset(key)
        reply = replace(reply, seconds=time.perf_counter() - began)
        digests = [reply.digest]
        for text in responses:
            reply = self.step(key, text)
            digests.append(reply.digest)
        return reply, digests

    def ask(self, key: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of `rollout/workers/abilities.py` with environment and spec, None if it
        is closed."""
        return function(*self._envs.get(key, (None, None)), *arguments)

    def timed(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """Run another command in the main thread, and interrupt it after `limit_s`."""
        with limited(limit_s, TooSlow):
            ok, value = self.handle(method, *arguments)
        if ok:
            return value
        raise value

    def close(self, key: int) -> None:
        env, _ = self._envs.pop(key, (None, None))
        if env is not None:
            finish(env.close())

    def close_all(self) -> None:
        for key in list(self._envs):
            self.close(key)

    def handle(self, method: str, *arguments: Any) -> tuple[bool, Any]:
        """Run one command: (True, result), or (False, WorkerFault)."""
        try:
            return True, getattr(self, method)(*arguments)
        except WorkerFault as fault:
            return False, fault
        except BaseException as error:
            # SystemExit and KeyboardInterrupt too must not end the worker.
            key, *rest = arguments
            env_and_spec = self._envs.get(key, rest)
            spec = next((part for part in env_and_spec if isinstance(part, EnvSpec)), None)
            called = rest[0].__name__ if method == "ask" else method
            return False, _fault(error, called, spec.env_path if spec is not None else "")


AUTHORS_NAMES = {"build": "build_env", "suggest": "expert_action or actions", "draw": "render"}
"""What the author of an environment wrote, for functions that call it."""


def _fault(error: BaseException, method: str, path: str) -> WorkerFault:
    called = AUTHORS_NAMES.get(method, method)
    place = place_of(error, path)
    match error:
        case SlimeVerlogError():
            sentence = one_line(text_of(error))
        case TooSlow():
            sentence = f"{called} was stopped at {place}"
        case SystemExit():
            sentence = (
                f"{called} ended the process at {place}; raise an error there, or return done"
            )
        case _:
            sentence = f"{called} raised {describe(error, path)}; {advice_about(error, path)}"
    kind = "JudgeError" if _is_from_a_service(error) else type(error).__name__
    return WorkerFault(sentence, kind, traceback.format_exc(limit=-4))


def _is_from_a_service(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, JudgeError):
        error = error.__cause__
    return error is not None


@contextlib.contextmanager
def _placed(env: BaseInteractionEnv, method: str) -> Iterator[None]:
    """Adds the method's place in the user's code to what the contract check finds wrong."""
    try:
        yield
    except EnvironmentFault as error:
        place = place_of_method(env, method)
        raise EnvironmentFault(
            f"{error} (returned by {method}{f', {place}' if place else ''})"
        ) from error


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
        name: [
            _own_image(image, f"multi_modal_data[{name!r}][{i}]", known)
            for i, image in enumerate(images)
        ]
        for name, images in (observation.get("multi_modal_data") or {}).items()
    }
    own = {**observation, "text": dict(observation["text"])} | (
        {"multi_modal_data": pictures} if pictures else {}
    )
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
    """Copy messages (level 0), parts of their content (1) or what is inside: an environment may
    change them later."""
    if isinstance(value, Mapping):
        if level == 1 and value.get("type") == "image" and value.get("image") is not None:
            return {**value, "image": _own_image(value["image"], "an image of a message", known)}
        return {
            k: _copied(v, known, 1 if (level, k) == (0, "content") else 2) for k, v in value.items()
        }
    return (
        [_copied(inner, known, level) for inner in value]
        if isinstance(value, list | tuple)
        else value
    )


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
    """The reply with its observation and its messages cut to the limits; whole prompts are never
    cut."""
    if limits is None or reply.whole_prompts:
        return reply
    observation = cut_observation(reply.observation, limits)
    messages = cut_messages(reply.messages, limits)
    if observation is reply.observation and messages is reply.messages:
        return reply
    return replace(reply, observation=observation, messages=messages, was_cut=True)


def serve(connection: socket.socket, host: EnvHost) -> None:
    """Run commands until the parent closes the socket, which it may do while a command runs."""
    with (
        connection.makefile("rb") as commands,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        while header := commands.read(HEADER.size):
            number, method, arguments = pickle.loads(commands.read(*HEADER.unpack(header)))
            connection.sendall(pack_reply(number, *host.handle(method, *arguments)))
    host.close_all()


def pack_reply(number: int, ok: bool, value: Any) -> bytes:
    """The message that replies to a command; a value that cannot be pickled becomes a fault."""
    try:
        return pack((number, ok, value))
    except Exception as error:
        return pack(
            (
                number,
                False,
                WorkerFault(f"what the environment returned cannot be pickled: {error}"),
            )
        )


def pack(value: Any) -> bytes:
    """The value's pickle after its length."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main() -> None:
    """Entry of a worker process: `sys.argv[1]` is its socket, which the environment's own processes
    do not inherit."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    serve(connection, EnvHost())


def main_in_thread() -> None:
    """Entry of a worker process whose environments run in a thread, as with `env_backend:
    inline`."""
    set_loop = lambda: asyncio.set_event_loop(thread_loop())
    with ThreadPoolExecutor(max_workers=1, initializer=set_loop) as thread:
        thread.submit(main).result()
