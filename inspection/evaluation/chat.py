"""Asks an OpenAI-compatible endpoint: messages in, one answer out."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError, EngineError
from rollout.play.engine import EngineClient
from rollout.play.memory import Message
from rollout.tokens.pictures import data_uri, read_image
from rollout.workers.pool import EnvSession

LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
"""Names of the answer's longest length. Every server knows the first, except OpenAI's for newer models."""


class ChatPlayer:
    """A `Player` behind `/chat/completions`. Sends the messages as they are, with pictures as `data:` URIs."""

    def __init__(
        self, client: EngineClient, model: str, key_variable: str, temperature: float, max_tokens: int
    ) -> None:
        """`key_variable` names the environment variable with the key; without it, no key is sent."""
        key = os.environ.get(key_variable)
        self._client = client
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._key_variable = key_variable
        self._body = {"model": model, "temperature": temperature}
        self._max_tokens = max_tokens
        self._length_key = LENGTH_KEYS[0]

    async def __call__(self, session: EnvSession, messages: Sequence[Message], index: int) -> str:
        """The model's answer.

        Raises:
            ConfigError: the environment offers tools.
            EngineError: no usable answer within the allowed retries, or the endpoint refused the request.
        """
        if session.reply is not None and session.reply.tools:
            raise ConfigError(
                f"{session.spec.env_path} offers tools, whose calls are part of the answer's text; serve the model "
                "with SGLang, and give its address with --tokenizer"
            )
        try:
            return await self._ask(messages)
        except EngineError as error:
            if LENGTH_KEYS[1] in str(error) and self._length_key == LENGTH_KEYS[0]:
                self._length_key = LENGTH_KEYS[1]
                return await self._ask(messages)
            if error.kind == "http_401" and not self._headers:
                raise EngineError(f"{error} (no key was sent: {self._key_variable} is not set)", error.kind) from error
            raise

    async def _ask(self, messages: Sequence[Message]) -> str:
        body = {
            **self._body,
            self._length_key: self._max_tokens,
            "messages": [_openai_message(message) for message in messages],
        }
        return await self._client.request("/chat/completions", body, parse_answer, self._headers)


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    return {**message, "content": [_openai_part(part) for part in content]}


def _openai_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "image":
        return part
    return {"type": "image_url", "image_url": {"url": data_uri(read_image(part["image"]))}}


def parse_answer(answer: Any) -> str:
    """The text of a chat completion; empty if the model wrote none.

    Raises:
        EngineError: the answer has another shape.
    """
    try:
        message = answer["choices"][0]["message"]
        text = message["content"] or message.get("refusal") or ""
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineError(f"answer has no choices[0].message.content: {reprlib.repr(answer)}") from error
    if not isinstance(text, str):
        raise EngineError(f"the answer's content must be text, got {reprlib.repr(text)}")
    return text
