"""Starts the simulated engines beside this process, and asks them for time and new weights."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp

REPOSITORY = Path(__file__).parents[1]


class SimulatedEngines:
    """A context with `benchmarks.engine_server` running for this process.

    Its calls block; inside an event loop, run them in a thread.
    """

    def __init__(self, vocabulary: Path, engines: int, places: int) -> None:
        options = {"host": os.getpid(), "vocabulary": vocabulary, "engines": engines, "places": places}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = [sys.executable, "-m", "benchmarks.engine_server", *flags]
        self.port = 0

    def __enter__(self) -> SimulatedEngines:
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def now(self) -> float:
        """Simulated seconds so far."""
        return self._call("/simulated/now")["now"]

    def saturated(self, every: int) -> dict[str, float]:
        """`tokens_per_s` and `turns_per_s` of the same engines and requests with a queue that is never empty.

        `updated_tokens_per_s` is the same with new weights after `every` answers.
        """
        return self._call(f"/simulated/saturated?every={every}")

    def update(self) -> None:
        """Load new weights, which aborts the requests in flight."""
        self._call("/simulated/update", {})

    def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds, as a trainer that works on other machines."""
        self._call("/simulated/sleep", {"seconds": seconds})

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, float]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            return json.load(reply)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Let `asyncio.sleep` wait in simulated time, for example in the pause after an aborted answer."""
        url, real = f"http://127.0.0.1:{self.port}/simulated/sleep", asyncio.sleep

        async def sleep(seconds: float, result: Any = None) -> Any:
            if seconds <= 0:
                return await real(seconds, result)
            async with aiohttp.ClientSession() as session, session.post(url, json={"seconds": seconds}):
                return result

        with mock.patch.object(asyncio, "sleep", sleep):
            yield
