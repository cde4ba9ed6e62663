"""The timing of an SGLang engine as a discrete-event model: places, prefill, decode and a prefix
cache.

The numbers are a roofline of Qwen2.5-7B in bf16 on one H100 SXM, from NVIDIA's data sheet (3.35
TB/s, 989 TFLOP/s) and the model's `config.json` (7.6e9 parameters, 28 layers, 4 key-value heads of
128):

- one decode step reads the weights (15.2 GB: 4.5 ms) and the cached keys and values of all running
  requests (57 KB per token: 17 ns), and takes 3 ms of scheduling and launches;
- prefill computes 15.2 GFLOP per token at half of the peak: 31 us;
- the prefix cache holds what 50 GB hold: 870,000 tokens.

The 3 ms and the share of the peak are assumptions. As in SGLang's default scheduler, waiting
requests are prefilled before running ones go on. Loading weights takes no time.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BLOCK = 16  # tokens per block of the prefix cache


@dataclass(frozen=True)
class Timing:
    """Seconds of the engine's work, and its sizes."""

    places: int = 96
    """Requests that run at once (`--max-running-requests`)."""
    step_s: float = 4.5e-3 + 3e-3
    cached_token_s: float = 17e-9
    """Added to a decode step per token of prompt or response that is held for a running request."""
    prefill_s: float = 3e-3
    prefill_token_s: float = 31e-6
    prefill_tokens: int = 8192
    """Most new tokens in one prefill (`--chunked-prefill-size`); a longer prompt is prefilled
    alone."""
    cache_tokens: int = 870_000


@dataclass(eq=False)
class Request:
    """One prompt, and the number of tokens that its response is going to have."""

    prompt: np.ndarray
    """Token ids, int32."""
    length: int
    done: int = 0
    """Tokens of the response so far."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Weight versions before the current one, each with the tokens up to its last."""


class PrefixCache:
    """Remembers which prefixes were computed, in blocks; the least recently used ones go first."""

    def __init__(self, tokens: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._most = tokens // BLOCK

    def take(self, ids: np.ndarray) -> int:
        """Count the tokens at the beginning of `ids` that are held already, and hold all of
        them."""
        held = 0
        hit = True
        key = 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, ids[start : start + BLOCK].tobytes()))
            hit = hit and key in self._blocks
            held += BLOCK * hit
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return min(held, len(ids) - 1)

    def clear(self) -> None:
        self._blocks.clear()


@dataclass
class Engine:
    """One engine. `submit` and `abort` say when something happens; `advance` goes to `next_event`
    and no further."""

    timing: Timing = field(default_factory=Timing)
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    tokens: int = 0
    """Tokens generated, also those of aborted responses."""
    paused: bool = False

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.timing.cache_tokens)
        self.next_event = math.inf
        self._began = 0.0
        self._step_s = 0.0
        self._steps = 0
        self._prefilled: list[Request] = []

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. A decode run that is under way ends with its current step if a place is
        free."""
        self.waiting.append(request)
        if self.next_event == math.inf:
            self._schedule(now)
        elif self._steps and len(self.running) < self.timing.places:
            self._steps = min(self._steps, max(1, math.ceil((now - self._began) / self._step_s)))
            self.next_event = self._began + self._steps * self._step_s

    def advance(self) -> list[Request]:
        """Go to the next event; returns the requests that it finishes."""
        now = self.next_event
        for request in self._prefilled or self.running:
            request.done += self._steps or 1
        self.tokens += (self._steps or 1) * len(self._prefilled or self.running)
        finished = [request for request in self.running if request.done >= request.length]
        self.running = [request for request in self.running if request.done < request.length]
        self._schedule(now)
        return finished

    def abort(self, now: float) -> list[Request]:
        """Stop all requests; returns them with the tokens that they have so far."""
        if self._steps:
            done = min(self._steps, int((now - self._began) / self._step_s))
            for request in self.running:
                request.done += done
            self.tokens += done * len(self.running)
        stopped = [*self.running, *self.waiting]
        self.running = []
        self.waiting = deque()
        self._schedule(now)
        return stopped

    def retract(self, now: float) -> list[Request]:
        """Let all requests wait, those that ran at the front; returns the latter."""
        ran = len(self.running)
        stopped = self.abort(now)
        self.waiting = deque(stopped)
        return stopped[:ran]

    def resume(self, now: float) -> None:
        """Continue after `paused` was set."""
        self.paused = False
        if self.next_event == math.inf:
            self._schedule(now)

    def _schedule(self, now: float) -> None:
        """Begin the next prefill or the decode steps up to the next response's end."""
        self._began = now
        self._steps = 0
        self._prefilled = []
        timing = self.timing
        new = 0
        while self.waiting and len(self.running) < timing.places and not self.paused:
            tokens = len(self.waiting[0].prompt) + self.waiting[0].done
            if self._prefilled and new + tokens > timing.prefill_tokens:
                break
            request = self.waiting.popleft()
            new += tokens - self.cache.take(request.prompt)
            self._prefilled.append(request)
            self.running.append(request)
        if self._prefilled:
            self.next_event = now + timing.prefill_s + new * timing.prefill_token_s
        elif self.running:
            held = sum(len(request.prompt) + request.done for request in self.running)
            self._step_s = timing.step_s + held * timing.cached_token_s
            self._steps = min(request.length - request.done for request in self.running)
            self.next_event = now + self._steps * self._step_s
        else:
            self.next_event = math.inf


def saturated(
    timing: Timing, work: Sequence[tuple[np.ndarray, int]], every: int = 0, mode: str = "abort"
) -> tuple[float, float]:
    """Compute tokens and responses per second of one engine whose queue is never empty, over these
    (prompt, length).

    New weights come after `every` responses (0: never). The cache is empty then, and running
    requests start again (`abort`) or go on once prompt and response so far are computed again
    (`retract`).
    """
    engine = Engine(timing)
    todo = iter(work)
    now = 0.0
    began = 0.0
    tokens = 0
    finished = 0
    total = 0

    def refill() -> None:
        while engine.load < 2 * timing.places and (item := next(todo, None)) is not None:
            engine.submit(Request(*item), now)

    refill()
    while engine.waiting:
        now = engine.next_event
        for request in engine.advance():
            total += 1
            if total <= timing.places:  # until every place has had a request, the engine warms up
                began = now
                continue
            tokens = tokens + request.length
            finished = finished + 1
            if every and finished % every == 0:
                engine.paused = True
                stopped = engine.retract(now) if mode == "retract" else engine.abort(now)
                engine.cache.clear()
                engine.resume(now)
                for request in stopped if mode == "abort" else ():
                    engine.submit(Request(request.prompt, request.length), now)
        refill()
    return tokens / (now - began), finished / (now - began)
