"""Asks a judge over HTTP: OpenAI's chat API or SGLang's own, cached, with retries inside one deadline."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from envs.errors import ConfigError, JudgeError, MissingDependencyError
from envs.judge.cache import VerdictCache
from envs.judge.material import broken
from envs.judge.tokens import load_tokenizer, served_model, served_tokenizer
from envs.tools.execution import background_loop

T = TypeVar("T")
Messages = Sequence[dict[str, str]]
_MOST_SHOWN = 1000
"""Characters of a bad verdict that the judge is shown again."""
_GRACE_S = 5.0
"""Seconds past the deadline after which an unanswered question means that the event loop itself hangs."""
_PATHS = {"openai": "/v1/chat/completions", "sglang": "/generate"}


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Where the judge is and how hard to try."""

    url: str
    """`http://host:port`, with or without `/v1`."""
    api: Literal["openai", "sglang"] = "openai"
    model: str = "default"
    tokenizer: str | None = None
    """`sglang` only: folder of the judge's tokenizer, whose chat template is applied; asked of the server if None."""
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    temperature: float = 0.0
    max_tokens: int = 1024
    timeout_s: float = 20.0
    """Of one attempt."""
    deadline_s: float = 50.0
    """Of all attempts of one question together; keep it below env_step_timeout_s."""
    max_retries: int = 4
    backoff_s: float = 0.5
    cache: str | None = None
    """SQLite file that keeps verdicts, shared by all workers and runs."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"env.judge.url must begin with http:// or https://, got {self.url!r}")
        for key in ("timeout_s", "deadline_s", "max_tokens"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"env.judge.{key} must be above 0, got {getattr(self, key)}")
        if self.max_retries < 0 or self.backoff_s < 0 or self.temperature < 0:
            raise ConfigError("env.judge: max_retries, backoff_s and temperature must not be negative")
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ConfigError(f"env.judge.api_key_env: the environment has no variable {self.api_key_env}")


class JudgeClient:
    """Asks one endpoint. `asked`, `retried` and `cached` count what it cost."""

    def __init__(self, options: EndpointOptions) -> None:
        self.options = options
        self.asked = self.retried = self.cached = 0
        self._kept = VerdictCache(options.cache) if options.cache else None

    def ask(self, messages: Messages, read: Callable[[str], T], about: Any = None) -> T:
        """The judge's answer to a conversation, as `read` understands it.

        `read` raises JudgeError for an answer that cannot be used; the judge is then told why and asked again. Such
        answers are not kept. `about` is what a kept answer depends on besides the conversation, as JSON.

        Raises:
            JudgeError: no usable answer within the retries and the deadline; the text holds the last reason.
        """
        key = self._key(messages, about) if self._kept else ""
        known = self._kept.get(key) if self._kept else None
        if known is not None:
            # An answer that can no longer be read is asked for again.
            with contextlib.suppress(JudgeError):
                value = read(known)
                self.cached += 1
                return value
        asking = asyncio.run_coroutine_threadsafe(self._try(list(messages), read), background_loop())
        try:
            text, value = asking.result(self.options.deadline_s + _GRACE_S)
        except TimeoutError as error:
            asking.cancel()
            raise JudgeError(f"{self.options.url}: the event loop is blocked, so the deadline passed unseen") from error
        if self._kept:
            self._kept.put(key, text)
        return value

    async def _try(self, messages: list[dict[str, str]], read: Callable[[str], T]) -> tuple[str, T]:
        options, began = self.options, time.monotonic()
        last: JudgeError | None = None
        conversation = messages
        for attempt in range(options.max_retries + 1):
            seconds = min(options.timeout_s, options.deadline_s - (time.monotonic() - began))
            if seconds <= 0:
                break
            self.asked += 1
            self.retried += attempt > 0
            try:
                text = await self._post(conversation, seconds)
            except _Refused:
                raise
            except JudgeError as error:
                last = error
                await asyncio.sleep(random.uniform(0.5, 1.0) * min(options.backoff_s * 2**attempt, seconds))
                continue
            try:
                return text, read(text)
            except JudgeError as error:
                last = error
                bad = {"role": "assistant", "content": broken(text[:_MOST_SHOWN])}
                conversation = [*messages, bad, {"role": "user", "content": broken(_again(error))}]
        raise JudgeError(
            f"{options.url} gave no usable answer in {attempt + 1} attempts and {time.monotonic() - began:.0f} s; "
            f"last: {last} (env.judge.max_retries, timeout_s and deadline_s bound this)"
        ) from last

    async def _post(self, messages: Messages, seconds: float) -> str:
        """One request.

        Raises:
            JudgeError: it failed in a way that may pass, or came back in another form.
        """
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise MissingDependencyError("the judge needs aiohttp; install it with: pip install aiohttp") from error
        payload = await asyncio.to_thread(self._payload, messages)
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session,
                session.post(self._base() + _PATHS[self.options.api], json=payload) as response,
            ):
                body = await response.text(errors="replace")
                if response.status in (400, 401, 403, 404, 422):
                    raise _Refused(f"{self.options.url} refuses the request: HTTP {response.status}: {body[:300]}")
                if response.status != 200:
                    raise JudgeError(f"HTTP {response.status}: {body[:300]}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise JudgeError(f"{type(error).__name__}: {error}") from error
        return _text_of(body, self.options.api)

    def _base(self) -> str:
        return self.options.url.rstrip("/").removesuffix("/v1")

    def _payload(self, messages: Messages) -> dict[str, Any]:
        options = self.options
        if options.api == "openai":
            limits = {"temperature": options.temperature, "max_tokens": options.max_tokens}
            return {"model": options.model, "messages": list(messages), **limits}
        limits = {"temperature": options.temperature, "max_new_tokens": options.max_tokens}
        ids = load_tokenizer(options.tokenizer or served_tokenizer(self._base())).encode(messages)
        return {"input_ids": ids, "sampling_params": {**limits, "skip_special_tokens": True}}

    def _headers(self) -> dict[str, str]:
        key = self.options.api_key_env
        return {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}

    def _key(self, messages: Messages, about: Any) -> str:
        options = self.options
        facts = [options.url, options.api, self._model, options.temperature, options.max_tokens, list(messages), about]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @functools.cached_property
    def _model(self) -> str:
        """The model that answers. The name `default` says nothing, so the server is asked."""
        options = self.options
        if options.model != "default":
            return options.model
        seconds = min(options.timeout_s, 5.0)
        return served_model(self._base(), options.api, self._headers(), seconds) or options.model


class _Refused(JudgeError):
    """The request itself is wrong, so that asking again is of no use."""


def _again(error: JudgeError) -> str:
    return f"That cannot be used: {error}. Answer again, with the JSON object only."


def _text_of(body: str, api: str) -> str:
    try:
        answer = json.loads(body)
        text = answer["text"] if api == "sglang" else answer["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise JudgeError(f"the answer is not what {_PATHS[api]} returns: {body[:200]}") from error
    if not isinstance(text, str):
        raise JudgeError(f"the answer holds no text, got {text!r:.100}")
    return text
