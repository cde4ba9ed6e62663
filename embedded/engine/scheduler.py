"""Continuous batching: requests join and leave the running batch between two decode steps.

Invariants: only the worker thread uses the decoder; each request is answered exactly once; the
first `_written` tokens of each row are in the cache under the current weights, so later prompts can
share them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from embedded.engine.decoder import RowDecoder, Weights
from embedded.engine.sampling import SamplingParams, draw_uniforms, sample_tokens
from rollout.errors import ConfigError, EngineError

Update = tuple[Weights, str | None, Future[str]]
"""New weights, their version if given, and the future that receives the version served."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its response so far; `future` receives the request itself once `finish_reason`
    is set."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    uniforms: list[float] = field(default_factory=list)
    future: Future[Request] = field(default_factory=Future)
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Weight versions in the order in which they wrote the response, each with the number of tokens
    up to its last."""
    row: int = -1

    @property
    def tokens(self) -> list[int]:
        """The prompt and the response so far."""
        return [*self.prompt, *self.output]

    def wrote(self, version: str) -> None:
        """Note that the tokens since the last version are this one's."""
        if not self.versions or len(self.output) > self.versions[-1][1]:
            self.versions.append((version, len(self.output)))


class Scheduler:
    """Runs a decoder in one worker thread and answers requests through futures."""

    def __init__(self, decoder: RowDecoder, seed: int, shares_prefixes: bool) -> None:
        """Start the worker."""
        self.decoder = decoder
        self.weight_version = "default"
        """As SGLang names the weights of the checkpoint, until others are loaded under another
        name."""
        self._seed = seed
        self._shares_prefixes = shares_prefixes
        self._arrivals = itertools.count()
        self._tokens = np.zeros((decoder.rows, decoder.context_length), dtype=np.int64)
        self._written = np.zeros(decoder.rows, dtype=np.int64)
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._updates: deque[Update] = deque()
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        """What the worker does between two steps, holding the lock."""
        self._paused = self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="engine-compute", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request that `check` accepts; its future resolves when it ends. Raises
        EngineError if closed."""
        arrival = next(self._arrivals)
        params = request.params
        seed = (
            self._seed * 1_000_003 + arrival
            if params.sampling_seed is None
            else params.sampling_seed
        )
        request.uniforms = [] if params.greedy else draw_uniforms(seed, params.max_new_tokens)
        # A caller that disconnects must not cancel the future while the worker uses it.
        request.future.set_running_or_notify_cancel()
        with self._wake:
            if self._error is not None:
                raise EngineError(str(self._error)) from self._error
            self._waiting.append(request)
            self._wake.notify()

    def abort(self, chosen: Callable[[Request], bool] = lambda _: True) -> None:
        """Abort the chosen requests, by default all; they return their tokens so far."""

        def end_chosen() -> None:
            for request in [*self._running.values(), *self._waiting]:
                if chosen(request):
                    self._finish(request, {"type": "abort", "message": "aborted by request"})

        with self._wake:
            self._commands.append(end_chosen)
            self._wake.notify()

    def pause(self, mode: Literal["abort", "retract"]) -> None:
        """Stop generating. `abort` ends all requests; `retract` lets them wait and go on after
        `resume`.

        A retracted request computes its prompt and its response so far again, so its next tokens
        are those of the weights that are then loaded.
        """
        with self._wake:
            self._paused = True
            if mode == "abort":
                self.abort()
            else:
                self._commands.append(self._retract)
                self._wake.notify()

    def resume(self) -> None:
        """Generate again after `pause`."""
        with self._wake:
            self._paused = False
            self._wake.notify()

    def update_weights(self, state: Weights, version: str | None = None) -> Future[str]:
        """Replace the weights once no request is running; resolves to the version, which stays
        without a new one.

        Requests that wait, retracted ones too, go on with the new weights.
        """
        done: Future[str] = Future()
        done.set_running_or_notify_cancel()
        with self._wake:
            if self._error is not None:
                raise EngineError(str(self._error)) from self._error
            self._updates.append((state, version, done))
            self._wake.notify()
        return done

    def flush_cache(self) -> bool:
        """Forget shared prefixes; returns False while requests are in progress, as in SGLang.

        Requests that wait while the engine is paused do not count, because they need nothing in the
        cache.
        """
        with self._wake:
            if self._running or (self._waiting and not self._paused):
                return False
            self._written[:] = 0
            return True

    def load(self) -> dict[str, int]:
        """Count requests running and waiting, and tokens held in the cache."""
        with self._wake:
            return {
                "num_running_reqs": len(self._running),
                "num_waiting_reqs": len(self._waiting),
                "num_used_tokens": int(self._written.sum()),
            }

    @property
    def healthy(self) -> bool:
        return self._error is None and self._thread.is_alive()

    def close(self) -> None:
        """Abort all requests and end the worker."""
        with self._wake:
            self._closed = True
            self.abort()
        self._thread.join(timeout=60)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise ConfigError if prompt and response do not fit the context, or token ids are
        unknown."""
        limit = self.decoder.context_length
        vocab = self.decoder.vocab_size
        if not prompt:
            raise ConfigError("input_ids is empty; a prompt needs at least one token")
        if len(prompt) + params.max_new_tokens > limit:
            raise ConfigError(
                f"{len(prompt)} prompt tokens + max_new_tokens {params.max_new_tokens} exceed the "
                f"context of {limit}; shorten the prompt, ask for fewer tokens or start the engine "
                "with a longer --context-length"
            )
        biased = [int(token) for token in params.logit_bias or ()]
        for name, ids in (("input_ids", prompt), ("logit_bias", biased)):
            for token in ids:
                if not 0 <= token < vocab:
                    raise ConfigError(
                        f"{name} has token {token}; ids of this model are 0 to {vocab - 1}"
                    )

    def _work(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(self._has_work)
                    while self._commands:
                        self._commands.popleft()()
                    if self._closed:
                        self._fail(EngineError("the engine was closed"))
                        return
                    update = (
                        self._updates.popleft() if self._updates and not self._running else None
                    )
                    admitted = [] if self._paused or self._updates or update else self._admit()
                if update is not None:
                    self._load(*update)
                elif admitted:
                    self._prefill(admitted)
                elif self._running and not self._paused:
                    self._decode()
        except Exception as error:
            # This thread ends here, so all waiting callers must get the error.
            broken = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            broken.__cause__ = error
            with self._wake:
                self._fail(broken)

    def _has_work(self) -> bool:
        if self._closed or self._commands or self._updates:
            return True
        return not self._paused and bool(self._running or self._waiting)

    def _fail(self, error: EngineError) -> None:
        self._error = error
        for request in [*self._running.values(), *self._waiting]:
            request.future.set_exception(error)
        for _, _, done in self._updates:
            done.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._updates.clear()

    def _retract(self) -> None:
        """Put running requests back at the head of the queue, in order; their rows are free."""
        for request in self._running.values():
            request.row = -1
        self._waiting.extendleft(reversed(self._running.values()))
        self._running.clear()

    def _load(self, state: Weights, version: str | None, done: Future[str]) -> None:
        """Replace the weights. The lock is not held meanwhile, so new requests are accepted."""
        try:
            self.decoder.load_weights(state)
        except Exception as error:
            done.set_exception(error)
            if not isinstance(error, ConfigError):
                raise
            return
        with self._wake:
            self._written[:] = 0
            for request in self._waiting:
                if request.output:
                    request.wrote(self.weight_version)
            self.weight_version = version or self.weight_version
        done.set_result(self.weight_version)

    def _admit(self) -> list[Request]:
        """Give rows to waiting requests; each reuses the longest cached prefix, in place or as a
        copy."""
        admitted: list[Request] = []
        budget = 4096  # prompt tokens in one step; this bounds the delay of running requests
        while self._waiting and len(self._running) < self.decoder.rows and budget > 0:
            request = self._waiting.popleft()
            tokens = np.asarray(request.tokens)
            shared = self._shared_prefixes(tokens)
            free = [row for row in range(self.decoder.rows) if row not in self._running]
            best = int(shared.argmax())
            length = int(shared[best])
            # Take over a free row if the prefix is most of it; otherwise take the emptiest row.
            mostly = length > self._written[best] // 2
            row = (
                best if best in free and mostly else min(free, key=lambda r: (self._written[r], r))
            )
            self.decoder.open_row(row, request.prompt)
            self.decoder.copy_prefix(best, row, length)
            self._tokens[row, : len(tokens)] = tokens
            self._written[row] = length
            request.row = row
            request.cached_tokens = length if not request.output else request.cached_tokens
            self._running[row] = request
            admitted.append(request)
            budget -= len(tokens) - length
        return admitted

    def _shared_prefixes(self, tokens: np.ndarray) -> np.ndarray:
        """Measure each row's cached prefix of `tokens`, at most all but the last token, which must
        be computed."""
        if not self._shares_prefixes or not self._written.any():
            return np.zeros(self.decoder.rows, dtype=np.int64)
        agree = self._tokens[:, : len(tokens)] == tokens
        agree[:, -1] = False
        return np.minimum(agree.argmin(1), self._written)

    def _prefill(self, requests: list[Request]) -> None:
        rows = [request.row for request in requests]
        starts = self._written[rows].tolist()
        totals = [len(request.tokens) for request in requests]
        spans = zip(rows, starts, totals, strict=True)
        tokens = [self._tokens[row, start:total] for row, start, total in spans]
        logits = self.decoder.prefill(rows, starts, tokens)
        self._written[rows] = totals
        self._extend(requests, logits)

    def _decode(self) -> None:
        requests = list(self._running.values())
        rows = np.array([r.row for r in requests])
        positions = self._written[rows]
        logits = self.decoder.decode(rows, positions, self._tokens[rows, positions])
        self._written[rows] += 1
        self._extend(requests, logits)

    def _extend(self, requests: list[Request], logits: Tensor) -> None:
        """Draw a token for each request, and finish the requests that are done."""
        params = [request.params for request in requests]
        uniforms = [
            request.uniforms[len(request.output)] if request.uniforms else 0.0
            for request in requests
        ]
        tokens, log_probs = sample_tokens(logits, params, uniforms)
        for request, token, log_prob in zip(requests, tokens, log_probs, strict=True):
            request.output.append(token)
            request.log_probs.append(log_prob)
            if (reason := self._finish_reason(request, token)) is None:
                self._tokens[request.row, self._written[request.row]] = token
                continue
            with self._wake:
                self._finish(request, reason)

    def _finish_reason(self, request: Request, token: int) -> dict[str, Any] | None:
        if token in request.stop_ids:
            return {"type": "stop", "matched": token}
        if len(request.output) >= request.params.max_new_tokens:
            return {"type": "length", "length": request.params.max_new_tokens}
        return None

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        """Answer a request and free its row; the row's tokens stay in the cache for later
        prompts."""
        request.finish_reason = reason
        request.wrote(self.weight_version)
        if request.row >= 0:
            del self._running[request.row]
        elif request in self._waiting:
            self._waiting.remove(request)
        request.future.set_result(request)
