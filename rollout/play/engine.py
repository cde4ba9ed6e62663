"""Client of SGLang's `/generate`: a prompt in, a checked generation out, with bounded retries."""

import asyncio
import json
import logging
import math
import random
import re
import reprlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import orjson

from rollout.bridge.settings import EngineSettings
from rollout.errors import EngineError
from rollout.play.clock import ActorWeights, numbered_versions
from rollout.tokens.token_prefix import TokenPrefix, token_prefix
from rollout.turn import FinishReason, Generation, Prompt
from rollout.workers.utilization import Utilization

logger = logging.getLogger(__name__)

MAX_TOKEN_ID = (1 << 31) - 1
"""A tokenizer cannot decode larger ids."""

T = TypeVar("T")
TOO_LONG = re.compile(
    r"context[ _]?(length|window)|exceeds? the (context|maximum)|longer than the model|too long|too many tokens",
    re.I,
)
"""How engines say that a prompt does not fit."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})
OTHER_WEIGHTS = "other_weights"
"""Kind of the fault that an engine answered which has not got the actor's weights yet."""
MIN_WEIGHTS_RETRIES = 16
"""At least so often is a request repeated after that fault. Such an engine answers at once, and
only a push helps."""
MIN_WEIGHTS_PAUSE_S = 0.25
MAX_WAIT_S = 60.0
"""Upper limit of the pause that a server asks for with `Retry-After`."""

GET_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
JSON = {"Content-Type": "application/json"}
PER_TOKEN_KEYS = frozenset({"output_token_logprobs", "input_token_logprobs", "output_top_logprobs"})


class EngineClient:
    """Talks to one router or engine; `faults` counts failed attempts by kind."""

    def __init__(
        self,
        url: str,
        settings: EngineSettings,
        *,
        max_connections: int = 1024,
        use_proxy: bool = False,
        version_names: Mapping[str, str] = NO_NAMES,
    ) -> None:
        """`use_proxy`: obey `HTTP_PROXY` and its kin, as servers on the internet may need.

        `version_names` renames weight versions of the engine.
        """
        self.url = url.rstrip("/")
        self._use_proxy = use_proxy
        self._version_names = version_names
        self.settings = settings
        self.weights = ActorWeights()
        self.faults: Counter[str] = Counter()
        self.utilization = Utilization()
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._jitter = random.Random()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Generate one response by the actor's weights, or an aborted one; `extra` is added to the
        request.

        Raises EngineError as `request`, also if engines without the actor's weights answered every
        attempt.
        """
        # A response in flight may still be by the weights from before a push.
        known = replace(self.weights)

        def parse(answer: Any) -> Generation:
            generation = parse_generation(answer, self._version_names)
            if generation.finish_reason is not FinishReason.ABORT:
                _refuse_other_weights(generation, known)
                self.weights.learn(generation)
            return generation

        return await self._send(
            "/generate", request_body(prompt, sampling_params, extra), parse, headers
        )

    async def request(
        self,
        path: str,
        payload: Mapping[str, Any],
        parse: Callable[[Any], T],
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Post `payload` and return the parsed reply.

        Raises:
            EngineError: all of `engine.max_retries` + 1 attempts failed, or the engine refused the
                request (4xx).
        """
        return await self._send(path, write_json(payload), parse, headers)

    async def _send(
        self, path: str, body: bytes, parse: Callable[[Any], T], headers: Mapping[str, str] | None
    ) -> T:
        attempts = Counter[bool]()
        while True:
            try:
                return parse(await self._post(path, body, {**JSON, **(headers or {})}))
            except EngineError as error:
                self.faults[error.kind] += 1
                if error.is_final:
                    text = f"{self.url}{path} refused the request: {error}"
                    raise EngineError(text, error.kind, too_long=error.too_long) from error
                not_loaded = error.kind == OTHER_WEIGHTS
                retries = max(self.settings.max_retries, MIN_WEIGHTS_RETRIES * not_loaded)
                if attempts[not_loaded] == retries:
                    raise EngineError(
                        f"{self.url}{path} failed {attempts.total() + 1} times; last: {error} "
                        "(engine.max_retries and engine.timeout_s set the limits)",
                        error.kind,
                    ) from error
                least = MIN_WEIGHTS_PAUSE_S if not_loaded else min(error.retry_after_s, MAX_WAIT_S)
                await asyncio.sleep(max(self._delay(attempts[not_loaded]), least))
                attempts[not_loaded] += 1

    def _delay(self, attempt: int) -> float:
        """Exponential backoff with jitter, which spreads the retries to a restarted engine over
        time."""
        ceiling = min(self.settings.backoff_max_s, self.settings.backoff_s * 2**attempt)
        return self._jitter.uniform(ceiling / 2, ceiling)

    async def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        session = self._connect()
        try:
            with self.utilization.request():
                async with session.post(self.url + path, data=body, headers=headers) as response:
                    answer = await response.read()
        except TimeoutError as error:
            raise EngineError(
                f"no answer within engine.timeout_s: {self.settings.timeout_s:g}", "timeout"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise EngineError(f"{type(error).__name__}: {error}", "refused") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{type(error).__name__}: {error}", "connection_lost") from error
        if response.status != 200:
            raise _refusal(response.status, answer, response.headers.get("Retry-After", ""))
        return read_json(answer)

    async def get(self, url: str) -> Any:
        """Return the JSON at this URL, asked once; raises EngineError."""
        try:
            async with self._connect().get(url, timeout=GET_TIMEOUT) as response:
                answer = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{type(error).__name__}: {error}", "connection_lost") from error
        if response.status != 200:
            raise _refusal(response.status, answer, "")
        return read_json(answer)

    def _connect(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s),
                trust_env=self._use_proxy,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _refuse_other_weights(generation: Generation, weights: ActorWeights) -> None:
    newest = max(numbered_versions(generation), default=0)
    if weights.first is None or newest >= weights.first:
        # Loops decide about responses that span an update.
        return
    versions = ", ".join(generation.weight_versions) or "none"
    raise EngineError(
        f"an engine answered that has not got the actor's weights (weight_version: {versions}), "
        "as after its restart",
        OTHER_WEIGHTS,
    )


def _refusal(status: int, body: bytes, retry_after: str) -> EngineError:
    words = _message(body)
    too_long = status in (400, 413, 422) and TOO_LONG.search(words) is not None
    error = EngineError(f"HTTP {status}: {words}", f"http_{status}", too_long=too_long)
    error.retry_after_s = float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0
    return error


def _message(body: bytes) -> str:
    """The text of an error's JSON, as SGLang, vLLM and OpenAI write it; the start of the body
    otherwise."""
    text = body.decode(errors="replace")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    for key in ("error", "message"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return (found if isinstance(found, str) else text)[:300]


def request_body(
    prompt: Prompt, sampling_params: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> bytes:
    """The JSON of a `/generate` request; with images, each is one unexpanded placeholder in
    `input_ids`."""
    others: dict[str, Any] = {
        "sampling_params": dict(sampling_params),
        "return_logprob": True,
        **(extra or {}),
    }
    if prompt.image_data:
        others["image_data"] = prompt.image_data
    ids = prompt.token_ids if prompt.engine_ids is None else prompt.engine_ids
    return token_prefix(ids).json(b'{"input_ids":[', b"]," + write_json(others)[1:])


def write_json(value: Any) -> bytes:
    """JSON as UTF-8. What orjson does not write, such as a lone surrogate in a text, the standard
    library does."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def read_json(body: bytes) -> Any:
    """Parse the response's JSON; raises EngineError if it is truncated, not JSON, or nested too
    deeply."""
    try:
        return orjson.loads(body)
    except ValueError:
        pass
    try:
        return json.loads(body)  # reads more, such as NaN
    except (ValueError, RecursionError) as error:
        raise EngineError(f"answer is not JSON ({error}): {body[:200]!r}") from error


def parse_generation(answer: Any, version_names: Mapping[str, str] = NO_NAMES) -> Generation:
    """Turn an engine's reply into a `Generation`; `version_names` renames its weight versions.

    Raises EngineError for missing, wrong or inconsistent fields.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise EngineError(f"answer has no meta_info: {reprlib.repr(answer)}")
    meta = answer["meta_info"]
    finish = meta.get("finish_reason")
    reason = finish.get("type") if isinstance(finish, dict) else finish
    if reason not in tuple(FinishReason):
        raise EngineError(
            f"finish_reason must be stop, length or abort, got {reprlib.repr(finish)}"
        )
    reason = FinishReason(reason)
    token_ids, log_probs = _tokens(meta, reason)
    text = answer.get("text")
    versions, ends = _versions(meta, version_names)
    return Generation(
        token_ids=TokenPrefix(token_ids),
        log_probs=array("f", log_probs),
        text=text if isinstance(text, str) else "",
        finish_reason=reason,
        stop_id=_stop_id(finish, token_ids) if reason is FinishReason.STOP else None,
        weight_versions=versions,
        version_ends=ends,
        meta_info={k: v for k, v in meta.items() if k not in PER_TOKEN_KEYS},
    )


def _stop_id(finish: Any, token_ids: Sequence[int]) -> int | None:
    """The last token, unless `matched` says that a text ended the response; the response holds its
    stop token."""
    matched = finish.get("matched") if isinstance(finish, dict) else None
    return token_ids[-1] if matched is None or matched == token_ids[-1] else None


def _versions(
    meta: Mapping[str, Any], rename: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the weight versions that produced the tokens, and the end of each version's tokens if
    SGLang says it."""
    several = meta.get("weight_versions")
    version = meta.get("weight_version")
    ends: list[Any] = [None]
    if isinstance(several, list) and several:
        found = [item.get("version") if isinstance(item, dict) else item for item in several]
        ends = [item.get("end") if isinstance(item, dict) else None for item in several]
    else:
        found = [] if version is None else [version]
    if not all(isinstance(item, str | int) for item in found):
        raise EngineError(f"weight versions must be names or numbers, got {reprlib.repr(found)}")
    names = tuple(rename.get(str(name), str(name)) for name in found)
    if all(type(end) is int for end in ends):
        return names, tuple(ends)
    return tuple(dict.fromkeys(names)), ()


def _tokens(meta: Mapping[str, Any], reason: FinishReason) -> tuple[list[int], list[float]]:
    entries = meta.get("output_token_logprobs")
    if entries is None and reason == FinishReason.ABORT:
        return [], []
    if not isinstance(entries, list):
        raise EngineError(
            "meta_info has no output_token_logprobs; the request asked for return_logprob"
        )
    token_ids: list[int] = []
    log_probs: list[float] = []
    for position, entry in enumerate(entries):
        try:
            log_prob = float(entry[0])
            token_id = entry[1]
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise EngineError(
                f"output_token_logprobs[{position}] is {reprlib.repr(entry)}, not [log_prob, token]"
            ) from error
        if not math.isfinite(log_prob) or log_prob > 1e-3:
            raise EngineError(f"output_token_logprobs[{position}] has log-prob {log_prob}")
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise EngineError(
                f"output_token_logprobs[{position}] has token id {reprlib.repr(token_id)}"
            )
        token_ids.append(token_id)
        log_probs.append(log_prob)
    count = meta.get("completion_tokens")
    if count is not None and count != len(token_ids) and reason != FinishReason.ABORT:
        raise EngineError(
            f"completion_tokens is {reprlib.repr(count)} but {len(token_ids)} log-probs came back"
        )
    if not token_ids and reason != FinishReason.ABORT:
        raise EngineError("the answer has no tokens")
    return token_ids, log_probs
