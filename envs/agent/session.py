"""The requests of one episode's program, in order of arrival, and the answers that it gets.

Everything here runs on the event loop of the server. A request waits until the model has answered
those before it.
"""

import asyncio
import fnmatch
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from envs.agent.parts import RequestError
from envs.agent.request import Request, Response
from envs.errors import EnvironmentFault
from envs.json_text import short

MAX_BYTES = 4 << 20
"""What the unanswered requests of one program may have together, by default."""
PAUSE = 4.0
"""Seconds without reading per second of reading, because Python runs nothing else while it parses
JSON."""
MAX_THREADS = 64
"""Threads that have a number to themselves; all further ones share the last number."""
MAX_WAITING = 64
"""Requests of one program that may wait at once; further ones are refused."""
MAX_REFUSED = 200
"""Refused requests after which the episode is given up."""


@dataclass(frozen=True)
class End:
    """How the program ended."""

    exit_code: int
    output: str
    """The end of what it wrote to stdout and stderr."""
    stopped: str = ""
    """The sandbox's limit that ended it; empty if it ended by itself."""

    @property
    def words(self) -> str:
        """Return how the program ended, as part of a sentence."""
        how = (
            f"was stopped ({self.stopped} limit)"
            if self.stopped
            else f"ended with exit code {self.exit_code}"
        )
        last_line = self.output.strip().rpartition("\n")[2].strip()
        return f"{how}; its last line: {last_line[:300]}" if last_line else how


@dataclass(eq=False)
class Waiting:
    """One request, and the connections that wait for its answer."""

    request: Request
    number: int
    """Of the episode's requests, from 0."""
    thread: int = 0
    """Number of the agent's thread, in order of their first requests."""
    alone: bool = True
    """No other request of the program was open when it arrived."""
    answer: Response | None = None
    connections: int = 0
    delivered: bool = False
    """The answer was written to a connection that was open."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def answered(self, seconds: float) -> Response | None:
        """Return the answer; None if there is none after so many seconds."""
        try:
            await asyncio.wait_for(self.done.wait(), seconds)
        except TimeoutError:
            return None
        if self.answer is None:
            raise RequestError("the episode is over", 503)
        return self.answer


class Session:
    """One program. `current` is the request that the model answers next."""

    def __init__(self, models: Sequence[str], max_bytes: int = MAX_BYTES) -> None:
        self.models = models
        self.max_bytes = max_bytes
        self.connections = 0
        """How many are open."""
        self.unread = 0
        """Bytes of requests that are arriving or being read."""
        self.current: Waiting | None = None
        self.end: End | None = None
        self.counts: Counter[str] = Counter()
        """`requests`, `retries`, `refused` and `lost_answers` so far."""
        self.refusal = ""
        """Why the last refused request was refused."""
        self.threads: dict[str, int] = {}
        """Numbers of the agent's first `MAX_THREADS` threads."""
        self._reader = asyncio.Lock()
        self._queue: deque[Waiting] = deque()
        self._answered: Waiting | None = None
        self._news = asyncio.Event()
        self._closed = False

    def check_room(self, size: int) -> None:
        """Check that `size` more bytes may be read; raises RequestError if the budget is used
        up."""
        limit = f"{self.max_bytes / (1 << 20):g} MiB (env.request_mb)"
        if size > self.max_bytes:
            raise RequestError(f"the request has more than {limit}", 413)
        if (
            size + self.unread + sum(waiting.request.size for waiting in self._queue)
            > self.max_bytes
        ):
            raise RequestError(
                f"the unanswered requests of this program have more than {limit}", 429
            )

    async def on_thread(self, read: Callable[[], Request], size: int) -> Request:
        """Read a request of `size` bytes on a thread; one at a time, with pauses in proportion to
        what it took."""
        cost = 0.0

        def measured() -> Request:
            nonlocal cost
            began = time.thread_time()
            try:
                return read()
            finally:
                cost = time.thread_time() - began

        await self._reader.acquire()
        try:
            return await asyncio.to_thread(measured)
        finally:
            self.unread -= size
            asyncio.get_running_loop().call_later(PAUSE * cost, self._reader.release)

    def arrive(self, request: Request) -> Waiting:
        """Queue a request, or return the equal one whose answer was not received; raises
        RequestError."""
        if self._closed:
            raise RequestError("the episode is over", 503)
        if not any(fnmatch.fnmatchcase(request.model, name) for name in self.models):
            known = ", ".join(self.models)
            raise RequestError(
                f"there is no model {short(request.model)} here, only {known} (env.models)", 404
            )
        others = [
            known for known in (self._answered, self.current, *self._queue) if known is not None
        ]
        for known in others:
            # The request is lost if its client is gone without its answer.
            is_lost = not known.delivered and not known.connections
            if is_lost and known.request.digest == request.digest:
                self.counts["retries"] += 1
                return known
        if len(self._queue) >= MAX_WAITING:
            raise RequestError(f"{MAX_WAITING} requests of this program are waiting already", 429)
        if len(self.threads) < MAX_THREADS:
            self.threads.setdefault(request.thread, len(self.threads))
        waiting = Waiting(
            request,
            number=self.counts["requests"],
            thread=self.threads.get(request.thread, MAX_THREADS - 1),
            alone=not any(known.connections for known in others),
        )
        self.counts["requests"] += 1
        self._queue.append(waiting)
        self._news.set()
        return waiting

    def refuse(self, why: str) -> None:
        """Count a request that was refused."""
        self.counts["refused"] += 1
        self.refusal = why
        self._news.set()

    def left(self, waiting: Waiting) -> None:
        """A connection ended. A queued request without a connection is dropped."""
        waiting.connections -= 1
        if not waiting.connections and waiting in self._queue:
            self._queue.remove(waiting)

    def ended(self, end: End) -> None:
        """The program ended."""
        self.end = end
        self._news.set()

    async def exchange(self, answer: Response | None, seconds: float) -> Waiting | None:
        """Answer the current request, if there is one, and return the next; None if none comes in
        time.

        Raises EnvironmentFault for a flood of refused requests.
        """
        if answer is not None:
            assert self.current is not None
            self._answered = self.current
            self.current = None
            self._answered.answer = answer
            # A retry needs neither messages nor tools.
            self._answered.request = replace(self._answered.request, messages=(), tools=())
            self._answered.done.set()
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            if self.counts["refused"] >= MAX_REFUSED:
                flood = f"the agent sent {MAX_REFUSED} requests that were refused"
                raise EnvironmentFault(f"{flood}, the last one because {self.refusal}")
            if self.end is not None:
                return None
            if self._queue:
                self.current = self._queue.popleft()
                answered = self._answered
                if answered is not None and not answered.delivered and not answered.connections:
                    # Another request came before the last answer was received.
                    self.counts["lost_answers"] += 1
                    self._answered = None
                return self.current
            self._news.clear()
            try:
                await asyncio.wait_for(
                    self._news.wait(), deadline - asyncio.get_running_loop().time()
                )
            except TimeoutError:
                return None

    async def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True
        for waiting in (self.current, self._answered, *self._queue):
            if waiting is not None:
                waiting.done.set()
