"""The simulated engines of a benchmark, in a process of their own and on a simulated clock."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import aiohttp

from benchmarks.parts import BARE_REQUESTS
from rollout.players.running import HANG_S

REPOSITORY = Path(__file__).parents[1]


class SimulatedEngines:
    """A context with `benchmarks.engine_server` running for this process. Its calls block an event loop."""

    def __init__(self, vocabulary: Path, engines: int, places: int, answer_tokens: float) -> None:
        options = {"host": os.getpid(), "vocabulary": vocabulary, "engines": engines, "places": places}
        options["answer-tokens"] = answer_tokens
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = [sys.executable, "-m", "benchmarks.engine_server", *flags]
        self.port = 0
        self.bodies: deque[bytes] = deque(maxlen=BARE_REQUESTS)
        """Requests of the last turns."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._ask("/simulated/now")["now"]

    def count_players(self, pids: Sequence[int]) -> None:
        """Charge these processes, too."""
        self._ask("/simulated/hosts", {"pids": pids})

    def saturated(self, every: int, mode: str) -> dict[str, float]:
        """Ask what these engines reach with a queue that is never empty; also with new weights after `every` turns."""
        return self._ask(f"/simulated/saturated?every={every}&mode={mode}")

    def update(self, mode: str = "abort") -> None:
        """Load new weights, which aborts or retracts the requests in flight."""
        self._ask("/simulated/update", {"mode": mode})

    def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds, as a trainer that works on other machines."""
        self._ask("/simulated/sleep", {"seconds": seconds})

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, float]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            return json.load(reply)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Let `asyncio.sleep` wait in simulated time, for example in the pause after an aborted response."""
        url, real = f"http://127.0.0.1:{self.port}/simulated/sleep", asyncio.sleep

        async def sleep(seconds: float, result: Any = None) -> Any:
            if not 0 < seconds < HANG_S:  # the watch over players is about real time
                return await real(seconds, result)
            async with aiohttp.ClientSession() as session, session.post(url, json={"seconds": seconds}):
                return result

        with mock.patch.object(asyncio, "sleep", sleep):
            yield
