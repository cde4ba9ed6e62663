"""Tells what `--player` names: a scripted player, a model's folder, an SGLang address or an
OpenAI-compatible one."""

import difflib
import enum
import hashlib
import itertools
import json
import os
import re
import reprlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from envs.calls import CLOSE, OPEN, find_calls
from envs.loading import load_env_module
from inspection.records import Record
from rollout.errors import ConfigError, EngineError
from rollout.play.engine import EngineClient
from rollout.play.memory import Message
from rollout.tokens.image_files import data_uri, read_image
from rollout.workers.pool import EnvSession

SCRIPTED = ("random", "expert")
CHAT = "/chat/completions"


class Kind(enum.StrEnum):
    """How a player is asked."""

    SCRIPTED = "scripted"
    """Beside the environment, without a model."""
    FOLDER = "folder"
    """The embedded engine serves a Hugging Face folder on this machine."""
    SGLANG = "sglang"
    """`/generate` of an engine or router."""
    CHAT = "chat"
    """`/chat/completions` of an OpenAI-compatible endpoint."""


@dataclass(frozen=True)
class PlayerSpec:
    """The player of a run."""

    kind: Kind
    name: str
    """As the records show it."""
    source: str
    """Name of a scripted player, folder or address."""
    tokenizer: str = ""
    """Folder with the tokenizer, unless the player reads messages."""

    def identity(self, options: Namespace) -> Record:
        """Return what must be equal for two runs to have the same player."""
        source = re.sub("//[^/@]*@", "//", self.source)  # without a password
        found: Record = {"kind": str(self.kind), "name": self.name, "source": source}
        if self.kind is not Kind.SCRIPTED:
            found |= {
                "temperature": options.temperature,
                "max_response_len": options.max_response_len,
            }
        if self.kind in (Kind.FOLDER, Kind.SGLANG):
            found |= {"max_context_len": options.max_context_len, "tokenizer": self.tokenizer}
        if self.kind is Kind.FOLDER:
            files = sorted(path for path in Path(self.source).iterdir() if path.is_file())
            stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
            weights = hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()
            found |= {"seed": options.seed, "weights": weights}
        return found


def read_player(options: Namespace) -> PlayerSpec:
    """Return the player that `--player` names; raises ConfigError if there is none, or if it lacks
    an option."""
    given = options.player
    if given in SCRIPTED:
        return PlayerSpec(Kind.SCRIPTED, given, given)
    if "://" in given:
        return _at_address(given, options)
    folder = Path(given).expanduser()
    if not folder.is_dir():
        near = difflib.get_close_matches(given, SCRIPTED, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--player must be random, expert, a model's folder or an address, got {given!r}{hint}"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--player {given} is not a Hugging Face folder: it has no config.json")
    name = folder.resolve().name
    return PlayerSpec(Kind.FOLDER, name, str(folder.resolve()), str(folder))


def _at_address(given: str, options: Namespace) -> PlayerSpec:
    address = urlparse(given)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(
            f"--player must look like http://HOST:PORT or https://HOST/v1, got {given!r}"
        )
    url = given.rstrip("/")
    if url.endswith(("/v1", CHAT)):
        if not options.model:
            raise ConfigError(
                "an OpenAI-compatible address needs the model's name: give --model NAME with "
                f"{given}"
            )
        return PlayerSpec(Kind.CHAT, options.model, url.removesuffix(CHAT))
    if not options.tokenizer:
        needed = f"{given} is asked with token ids (/generate): give --tokenizer FOLDER with the model's tokenizer"
        raise ConfigError(
            f"{needed}. An OpenAI-compatible address must end in /v1 or /chat/completions"
        )
    name = options.model or address.netloc.rpartition("@")[2]
    return PlayerSpec(Kind.SGLANG, name, url, str(Path(options.tokenizer).expanduser()))


def check_experts(env_paths: Iterable[str]) -> None:
    """Raise ConfigError, with the module's name, if an environment has no scripted expert."""
    for path in env_paths:
        if not hasattr(load_env_module(path), "expert_action"):
            raise ConfigError(
                f"{path} has no function expert_action(env), so there is no expert to play it"
            )


LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
"""Names of the response's longest length. Every server knows the first, except OpenAI's for newer
models."""


class ChatPlayer:
    """Asks `/chat/completions`; sends images as `data:` URIs, tools and calls in the endpoint's
    form."""

    def __init__(
        self,
        client: EngineClient,
        model: str,
        key_variable: str,
        temperature: float,
        max_tokens: int,
    ) -> None:
        """`key_variable` names the environment variable with the key; without it, no key is
        sent."""
        key = os.environ.get(key_variable)
        self._client = client
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._key_variable = key_variable
        self._body = {"model": model, "temperature": temperature}
        self._max_tokens = max_tokens
        self._length_key = LENGTH_KEYS[0]

    async def respond(
        self, used: Counter[str], session: EnvSession, messages: Sequence[Message], index: int
    ) -> str:
        """Ask for the response, with its tool calls as text; raises EngineError if the endpoint
        fails.

        Adds to `used`: answers, empty ones, and tokens as the endpoint counts them.
        """
        tools = list(session.reply.tools) if session.reply is not None else []
        body = {
            **self._body,
            "messages": openai_messages(messages),
            **({"tools": tools} if tools else {}),
        }
        tried = self._length_key
        try:
            completion, text = await self._ask(body)
        except EngineError as error:
            # Other episodes ask meanwhile, and may have changed the name already.
            if LENGTH_KEYS[1] in str(error) and tried == LENGTH_KEYS[0]:
                self._length_key = LENGTH_KEYS[1]
                completion, text = await self._ask(body)
            elif error.kind == "http_401" and not self._headers:
                raise EngineError(
                    f"{error} (no key was sent: {self._key_variable} is not set)", error.kind
                ) from error
            else:
                raise
        usage = completion.get("usage") or {}
        names = ("prompt_tokens", "completion_tokens")
        tokens = {name: count for name in names if isinstance(count := usage.get(name), int)}
        used.update(answers=1, empty=int(not text.strip()), **tokens)
        return text

    async def _ask(self, body: Record) -> tuple[Any, str]:
        given = {**body, self._length_key: self._max_tokens}
        return await self._client.request(
            CHAT, given, lambda found: (found, parse_completion(found)), self._headers
        )


def openai_messages(messages: Sequence[Message]) -> list[Record]:
    """Return the messages as an endpoint takes them.

    Images become `data:` URIs. An answer whose calls were run becomes one with `tool_calls`, under
    the ids of the results that follow it; the calls that an agent's program sends back keep theirs.
    """
    sent = [{**message, "content": _openai_content(message["content"])} for message in messages]
    for place, message in enumerate(sent):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_as_openai(call["id"], **call["function"]) for call in calls]
            continue
        results = itertools.takewhile(lambda after: after["role"] == "tool", sent[place + 1 :])
        ids = [result.get("tool_call_id", "") for result in results]
        content = message["content"]
        if message["role"] == "assistant" and ids and isinstance(content, str):
            found = find_calls(content, len(ids))
            if found.span is None or len(found.calls) != len(ids):
                continue  # not the results of this answer's calls, which is the endpoint's to refuse
            message["content"] = content[: found.span[0]].rstrip()
            named = zip(ids, found.calls, strict=True)
            message["tool_calls"] = [
                _as_openai(key, call.name, dict(call.arguments)) for key, call in named
            ]
    return sent


def _as_openai(key: str, name: str, arguments: Any) -> Record:
    return {
        "id": key,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def _openai_content(content: str | Sequence[Record]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    url = lambda part: {"url": data_uri(read_image(part["image"]))}
    return [
        {"type": "image_url", "image_url": url(part)} if part["type"] == "image" else part
        for part in content
    ]


def parse_completion(completion: Any) -> str:
    """Return the text of a chat completion, tool calls included; raises EngineError for another
    shape.

    Calls are written as Hermes and Qwen do, which environments read. Arguments stay as they are:
    whether they are JSON that fits the schema is the environment's to judge.
    """
    try:
        message = completion["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        # Some endpoints leave out the content of an answer that only calls.
        text = (
            (message.get("content") if functions else message["content"])
            or message.get("refusal")
            or ""
        )
        calls = [
            f'{{"name": {json.dumps(f["name"])}, "arguments": {f["arguments"] or "{}"}}}'
            for f in functions
        ]
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineError(
            f"answer has no choices[0].message.content: {reprlib.repr(completion)}"
        ) from error
    if not isinstance(text, str):
        raise EngineError(f"the answer's content must be text, got {reprlib.repr(text)}")
    return "\n".join([*filter(None, [text]), *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)])
