"""What the CPU time of a turn is spent on, part by part, and what a bare client spends on the same requests.

What is left of the process's CPU time is the event loop, the HTTP client and the loop that plays. Players are other
processes, which are not timed; their parts are those of a run with one process.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import aiohttp
import orjson

from rollout import fixed_turn
from rollout.play import engine
from rollout.play.episode import Episode
from rollout.players.wire import Link
from rollout.tokens.encoding import DeltaEncoder
from rollout.workers.worker import EnvHost

BARE_REQUESTS = 2048
"""Requests that a bare client repeats."""
SECONDS: defaultdict[str, float] = defaultdict(float)  # by part, since it was cleared
PLACES: tuple[tuple[str, Any, str], ...] = (
    ("prompt", Episode, "_build_prompt"),
    ("prompt", DeltaEncoder, "check"),
    ("request", engine, "request_body"),
    ("answer", engine, "read_json"),
    ("answer", engine, "parse_generation"),
    ("environment", EnvHost, "handle"),
    ("batch", fixed_turn, "build_samples"),
    ("batch", fixed_turn, "batch_metrics"),
    ("players", Link, "data_received"),
    ("players", Link, "_flush"),
)
"""Part, owner and name of each timed function; none of them calls another."""


@contextmanager
def timed() -> Iterator[None]:
    """Meanwhile the functions are timed."""

    def timer(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                SECONDS[part] += time.thread_time() - began

        return call

    with ExitStack() as patches:
        for part, owner, name in PLACES:
            patches.enter_context(mock.patch.object(owner, name, timer(part, getattr(owner, name))))
        yield


async def bare_client(port: int, bodies: Iterable[bytes], places: int) -> float:
    """Send the bodies of `/generate` and parse the responses, with aiohttp and orjson alone; return CPU ms for each.

    The first `places` responses, whose connections are opened, do not count. 0 without bodies.
    """
    sent, url = iter(bodies), f"http://127.0.0.1:{port}/generate"
    begun, answered = 0.0, 0

    async def send() -> None:
        nonlocal begun, answered
        for body in sent:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                orjson.loads(await response.read())
            answered += 1
            if answered == places:
                begun = time.process_time()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=places)) as session:
        await asyncio.gather(*(send() for _ in range(places)))
        return 1e3 * (time.process_time() - begun) / (answered - places) if answered > places else 0.0
