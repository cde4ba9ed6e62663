"""The simulated engines of a benchmark, in a process of their own and on a simulated clock, as a
client sees them."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import aiohttp
import orjson

from rollout.players.running import HANG_S

REPOSITORY = Path(__file__).parents[1]


class SimulatedEngines:
    """A context with `benchmarks.engine_server` running for this process. Its calls block an event
    loop."""

    def __init__(
        self, vocabulary: Mapping[str, Any], engines: int, places: int, answer_tokens: float
    ) -> None:
        options = {
            "vocabulary": vocabulary,
            "engines": engines,
            "places": places,
            "answer_tokens": answer_tokens,
        }
        self._command = [sys.executable, "-m", "benchmarks.engine_server", json.dumps(options)]
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._ask("now")["now"]

    def count_players(self, pids: Sequence[int]) -> None:
        """Charge these processes, too."""
        self._ask("set_hosts", pids=pids)

    def saturated(self, every: int, mode: str) -> dict[str, float]:
        """Ask what these engines reach with a queue that is never empty; also with new weights
        after `every` turns."""
        return self._ask("saturated", every=every, mode=mode)

    def update(self, mode: str = "abort") -> None:
        """Load new weights, which aborts or retracts the requests in flight."""
        self._ask("update", mode=mode)

    def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds, as a trainer that works on other machines."""
        self._ask("sleep", seconds=seconds)

    def _ask(self, name: str, **body: Any) -> dict[str, float]:
        request = urllib.request.Request(f"{self.url}/simulated/{name}", json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request) as reply:
            return json.load(reply)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Let `asyncio.sleep` wait in simulated time, for example in the pause after an aborted
        response."""
        real = asyncio.sleep

        async def sleep(seconds: float, result: Any = None) -> Any:
            if not 0 < seconds < HANG_S:  # the watch over players is about real time
                return await real(seconds, result)
            url = f"{self.url}/simulated/sleep"
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, json={"seconds": seconds}),
            ):
                return result

        with mock.patch.object(asyncio, "sleep", sleep):
            yield

    async def bare_client_ms(self, bodies: Sequence[bytes], places: int) -> float:
        """Send the bodies of `/generate` and parse the responses, with aiohttp and orjson alone;
        return CPU ms each.

        The first `places` responses, whose connections are opened, do not count. 0 with so few
        bodies.
        """
        if len(bodies) <= places:
            return 0.0
        unsent = iter(bodies)
        began = 0.0
        answered = 0

        async def send() -> None:
            nonlocal began, answered
            headers = {"Content-Type": "application/json"}
            for body in unsent:
                async with session.post(
                    f"{self.url}/generate", data=body, headers=headers
                ) as response:
                    orjson.loads(await response.read())
                answered += 1
                if answered == places:
                    began = time.process_time()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=places)) as session:
            await asyncio.gather(*(send() for _ in range(places)))
            seconds = time.process_time() - began
        return 1e3 * seconds / (answered - places)
