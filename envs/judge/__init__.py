"""A language model as judge: reward and feedback around any environment.

The score becomes reward, the comment feedback. The judge is asked through OpenAI's chat API, with a
cache, retries and a deadline. The cache is a SQLite file that workers and runs share. In the YAML:
`env: {inner: envs.tools, options: {...}, judge: {url: ..., rubric: rubric.yaml}}`.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import aiohttp

from envs.base import BaseInteractionEnv, Observation, StepInfo, read_env_settings, text_of, timed
from envs.errors import ConfigError, EnvironmentFault, JudgeError
from envs.judge.rubric import (
    JudgedSettings,
    JudgeSettings,
    Rubric,
    Verdict,
    broken,
    quoted,
    read_rubric,
    read_verdict,
)
from envs.loading import load_env_module
from envs.tools.execution import background_loop
from envs.tools.results import clip, encodable

logger = logging.getLogger(__name__)
T = TypeVar("T")
Messages = Sequence[dict[str, str]]
SETTINGS = JudgedSettings
_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT)"
"""Statement that makes the cache's only table: the judge's answers by the hash of what it was
asked."""
_SHOWN_CHARS = 1000
"""Characters of an unusable verdict that are sent back to the judge."""
BACKOFF_S = 0.5
"""Pause after the first failed request, in seconds; it doubles with every attempt."""
TURNS_SHOWN = 16
"""Latest turns that the judge sees at the end of an episode."""
TEXT_CHARS = 4000
"""Characters of each observation and answer that the judge sees."""
_ENDPOINT = "/v1/chat/completions"
_DESCRIPTION = (
    "mission",
    "instruction_prompt",
    "answer_format",
    "actions",
    "default_action",
    "max_steps",
    "tools",
)
"""Attributes of the inner environment that the judged one takes over."""


class VerdictCache:
    """A SQLite file of verdicts that opens one connection per use, so that threads and processes
    can share it.

    If it cannot be used later, because it is locked for too long or damaged, a warning is logged
    and the judge asked. Raises ConfigError if the file can be neither opened nor created.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._execute("SELECT key, text FROM verdicts LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            advice = "delete it if it is damaged, or name another file"
            raise ConfigError(
                f"env.judge.cache: {path} cannot be used: {error}; {advice}"
            ) from error

    def get(self, key: str) -> str | None:
        """Return the judge's answer under this key, or None."""
        row = self._attempt("SELECT text FROM verdicts WHERE key = ?", key)
        return row[0] if row and isinstance(row[0], str) else None

    def put(self, key: str, text: str) -> None:
        """Store an answer, in place of any earlier one."""
        self._attempt("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", key, text)

    def _attempt(self, statement: str, *values: str) -> Any:
        try:
            return self._execute(statement, *values)
        except (OSError, sqlite3.Error) as error:
            logger.warning("the judge's cache %s cannot be used: %s", self._path, error)
            return None

    def _execute(self, statement: str, *values: str) -> Any:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
            connection.execute(_TABLE)
            return connection.execute(statement, values).fetchone()


class _Refused(JudgeError):
    """The server refused the request, so repeating it is useless."""


class JudgeClient:
    """Asks one judge. `retried` counts repeated requests."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.retried = 0
        self._cache = VerdictCache(settings.cache) if settings.cache else None

    def ask(self, messages: Messages, read: Callable[[str], T], about: Any = None) -> T:
        """Return the judge's answer, read by `read`; raises JudgeError, with the last reason, if no
        retry gives one.

        Args:
            read: raises JudgeError if an answer cannot be used. The judge is then told why and
                asked again.
            about: what a cached answer depends on besides the conversation, as JSON.
        """
        key = self._key(messages, about) if self._cache else ""
        known = self._cache.get(key) if self._cache else None
        if known is not None:
            with contextlib.suppress(JudgeError):
                # A cached answer that cannot be read is asked for again.
                return read(known)
        asking = asyncio.run_coroutine_threadsafe(
            self._try(list(messages), read), background_loop()
        )
        text, value = asking.result()
        if self._cache:
            self._cache.put(key, text)
        return value

    async def _try(self, messages: list[dict[str, str]], read: Callable[[str], T]) -> tuple[str, T]:
        """Return the text of the first usable answer, and what `read` made of it."""
        settings = self.settings
        began = time.monotonic()
        last: JudgeError | None = None
        conversation = messages
        attempt = 0
        for attempt in range(settings.max_retries + 1):
            seconds = min(settings.timeout_s, settings.deadline_s - (time.monotonic() - began))
            if seconds <= 0:
                break
            self.retried += attempt > 0
            try:
                text = await self._post(conversation, seconds)
            except _Refused:
                raise
            except JudgeError as error:
                last = error
                pause = min(BACKOFF_S * 2**attempt, seconds)
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
                continue
            try:
                return text, read(text)
            except JudgeError as error:
                last = error
                again = f"That cannot be used: {error}. Answer again, with the JSON object only."
                bad = {"role": "assistant", "content": broken(text[:_SHOWN_CHARS])}
                conversation = [*messages, bad, {"role": "user", "content": broken(again)}]
        took = time.monotonic() - began
        raise JudgeError(
            f"{settings.url} gave no usable answer in {attempt + 1} attempts and {took:.0f} s; "
            f"last: {last} (env.judge.max_retries, timeout_s and deadline_s bound this)"
        ) from last

    async def _post(self, messages: Messages, seconds: float) -> str:
        """Send one request, return the judge's text; raises JudgeError for a failure or an unknown
        form."""
        settings = self.settings
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        payload = {"model": settings.model, "messages": list(messages), **limits}
        base = settings.url.rstrip("/").removesuffix("/v1")
        key = settings.api_key_env
        headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(base + _ENDPOINT, json=payload) as response,
            ):
                body = await response.text(errors="replace")
                if response.status in (400, 401, 403, 404, 422):
                    raise _Refused(
                        f"{settings.url} refuses the request: HTTP {response.status}: {body[:300]}"
                    )
                if response.status != 200:
                    raise JudgeError(f"HTTP {response.status}: {body[:300]}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise JudgeError(f"{type(error).__name__}: {error}") from error
        try:
            text = json.loads(body)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise JudgeError(f"the answer is not what {_ENDPOINT} returns: {body[:200]}") from error
        if not isinstance(text, str):
            raise JudgeError(f"the answer holds no text, got {text!r:.100}")
        return text

    def _key(self, messages: Messages, about: Any) -> str:
        judge = self.settings
        request = [
            judge.url,
            judge.model,
            judge.temperature,
            judge.max_tokens,
            list(messages),
            about,
        ]
        return hashlib.sha256(json.dumps(request).encode()).hexdigest()


class JudgedEnv(BaseInteractionEnv):
    """The inner environment with the judge's reward, feedback and metrics added."""

    def __init__(self, inner: BaseInteractionEnv, settings: JudgeSettings, task: str = "") -> None:
        self.inner = inner
        self.settings = settings
        self._task = task
        self.rubric = (
            settings.rubric if isinstance(settings.rubric, Rubric) else read_rubric(settings.rubric)
        )
        self.client = JudgeClient(settings)
        self.deterministic = inner.deterministic and settings.cache is not None
        self.whole_prompts = inner.whole_prompts
        self.facts = inner.facts
        self.render = getattr(inner, "render", None)
        self._copy_description()
        self._turns: list[dict[str, Any]] = []
        self._failures = 0
        self._feedback = self._shown = ""

    def _copy_description(self) -> None:
        """Take over the attributes that describe the inner environment's task; they may change
        during an episode."""
        for name in _DESCRIPTION:
            setattr(self, name, getattr(self.inner, name))
        if not (self.settings.feedback and self.settings.when == "every"):
            # The agent does not send feedback back, so later prompts lack it.
            self.continues = self.inner.continues

    def reset(self) -> Observation:
        self.inner.call_form = self.call_form
        observation = self.inner.reset()
        self._copy_description()
        self._turns = []
        self._failures = 0
        self._feedback = ""
        self._shown = observation["obs_str"]
        return observation

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        inner, done, info = self.inner.step(response_text)
        observation: Observation = {**inner}
        self._copy_description()
        turn = {"shown": self._shown, "answer": response_text, "executed": info["executed_action"]}
        turn["outcome"] = observation["obs_str"]
        self._turns.append({part: clip(text, TEXT_CHARS) for part, text in turn.items()})
        self._shown = observation["obs_str"]
        self._feedback = ""
        reward = info["reward"] * self.settings.env_weight
        metrics = dict(info.get("metrics") or {})
        if (done or self.settings.when == "every") and (verdict := self._verdict(done)) is not None:
            reward += self.settings.weight * verdict.score
            metrics |= {"judge/score": verdict.score}
            metrics |= {f"judge/{name}": score for name, score in verdict.scores.items()}
            self._feedback = (
                encodable(verdict.feedback) if self.settings.feedback and not done else ""
            )
        metrics |= {
            "judge/failures": float(self._failures),
            "judge/retries": float(self.client.retried),
        }
        if self._feedback:
            said = self._said()
            text = observation["text"]
            observation["obs_str"] += f"\n\n{said}"
            observation["text"] = {
                **text,
                "long_term_context": f"{text['long_term_context']}\n\n{said}",
            }
        return observation, done, {**info, "reward": float(reward), "metrics": metrics}

    def _verdict(self, done: bool) -> Verdict | None:
        """Return the verdict; without one, None or an EnvironmentFault, as `on_failure` says."""
        turns = self._turns[-TURNS_SHOWN:] if done else self._turns[-1:]
        question = {
            "task": clip(self.mission or self.instruction_prompt, TEXT_CHARS),
            "turns_left_out": len(self._turns) - len(turns),
            "turns": turns,
            "finished": done,
        }
        messages = [
            {"role": "system", "content": self.rubric.system_prompt()},
            # JSON quotes what the agent wrote, so it cannot pose as part of the question.
            {"role": "user", "content": quoted(question)},
        ]
        about = {
            "task": [self._task, self.mission, self.instruction_prompt],
            "rubric": self.rubric.model_dump(),
        }
        try:
            with timed("judge"):
                return self.client.ask(
                    messages, lambda text: read_verdict(text, self.rubric), about
                )
        except JudgeError as error:
            if self.settings.on_failure == "fault":
                raise EnvironmentFault(f"no verdict: {error}") from error
            self._failures += 1
            return None

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:
        """Return the inner environment's messages, and one more with the judge's feedback if they
        do not show it."""
        formatted = self.inner.format_observation(observation)
        messages = [formatted] if isinstance(formatted, Mapping) else list(formatted)
        said = self._said()
        if self._feedback and not any(said in text_of(message) for message in messages):
            messages.append({"role": "user", "content": said})
        return messages

    def _said(self) -> str:
        return f"A judge says: {self._feedback}"

    def close(self) -> None:
        self.inner.close()


def build_env(sample: Any, args: Any) -> JudgedEnv:
    """Return the judged environment of a sample; `sample` is passed on to the inner environment."""
    settings = read_env_settings(JudgedSettings, args)
    inner_args = SimpleNamespace(
        env=dict(settings.options), max_turns=getattr(args, "max_turns", None)
    )
    task = str((getattr(sample, "metadata", None) or {}).get("task", ""))
    return JudgedEnv(
        load_env_module(settings.inner).build_env(sample, inner_args), settings.judge, task
    )
