"""SGLang's HTTP interface over simulated engines, in a process that `benchmarks.engines` starts.

Time is simulated. Its clock goes to the engines' next event whenever the hosts, the processes that
send the requests, sleep; while a host computes, the clock advances by the CPU time that the host
uses. So a host's cost is its real cost, HTTP and JSON on its side included, and a loaded machine
slows the run down without changing what it shows. The cost of this process and the network's
latency do not count.

Several hosts compute at the same time, each on its own core, even if the machine has fewer cores:
every host has its own clock, which starts at the simulated time at which it woke, and simulated
time follows the slowest host that is awake. A host that the machine runs ahead of the others may
therefore send its requests too early by one time slice of the scheduler, a few milliseconds. What
this cannot show: cores that share caches, memory bandwidth or a clock frequency, and the network
between nodes.

A response has the form `THINK: <words> ACTION: <action>`. Its length is drawn from the prompt
alone, so every loop gets responses of the same distribution. As in SGLang, an update aborts those
in flight, or retracts them, and raises the weight version.
"""

import asyncio
import contextlib
import heapq
import itertools
import json
import math
import os
import random
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from benchmarks.simulated_sglang import Engine, Request, Timing, saturated


class Host:
    """Another process: the CPU time that it has used, and whether it sleeps (Linux only)."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | 2
        """The process's CPU clock, as `clock_getcpuclockid` gives it."""
        self._tasks = Path(f"/proc/{pid}/task")
        self._cpu = self.cpu_s()
        self._time = 0.0
        self._awake = False

    def cpu_s(self) -> float:
        """Read the CPU seconds of all its threads; raises OSError if the process has ended."""
        return time.clock_gettime(self._clock)

    def asleep(self) -> bool:
        """Tell whether none of its threads runs, waits for a CPU, or waits for a disk."""
        for task in self._tasks.iterdir():
            try:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue  # this thread has just ended
            if state not in "SZ":
                return False
        return True

    def advance(self, now: float) -> float | None:
        """Charge the CPU time since the last call; return the host's own time, or None if it
        slept."""
        cpu = self.cpu_s()
        used = cpu - self._cpu
        self._cpu = cpu
        awake = used > 0 or not self.asleep()
        if awake and not self._awake:
            self._time = max(self._time, now)
        self._time += used
        self._awake = awake
        return self._time if awake else None

    def unchanged(self) -> bool:
        """Tell whether it has slept since the last `advance`."""
        return self.asleep() and self.cpu_s() == self._cpu


def draw_length(seed: int, mean: float) -> int:
    """Draw the tokens of a response, at least 16: log-normal with sigma 0.6, which is assumed for
    short reasoning."""
    return max(16, round(random.Random(seed).lognormvariate(math.log(mean) - 0.6**2 / 2, 0.6)))


class Server:
    """The engines behind one address, and their clock."""

    def __init__(
        self,
        host: Host,
        engines: int,
        places: int,
        answer_tokens: float,
        vocabulary: Mapping[str, Any],
    ):
        """Start with idle engines; the engines have no tokenizer, so responses are made of the
        `vocabulary`."""
        self.timing = Timing(places=places)
        self.engines = [Engine(self.timing) for _ in range(engines)]
        self.answer_tokens = answer_tokens
        self.vocabulary = vocabulary
        self.hosts = [host]
        self.time = 0.0
        self.version = 1
        self.arrived = 0
        self.recorded: dict[int, tuple[np.ndarray, int]] = {}
        self._answers: dict[Request, asyncio.Future[str]] = {}
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28, middlewares=[self._count])
        app.router.add_get("/workers", self.workers)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        for control in (self.now, self.set_hosts, self.update, self.sleep, self.saturated):
            app.router.add_post(f"/simulated/{control.__name__}", control)
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.arrived += 1
        return await handler(request)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = np.asarray(body["input_ids"], dtype=np.int32)
        seed = zlib.crc32(prompt.tobytes())
        length = min(
            draw_length(seed, self.answer_tokens), body["sampling_params"]["max_new_tokens"]
        )
        work = Request(prompt, length)
        self.recorded.setdefault(seed, (prompt, length))  # an aborted request comes again
        answered = self._answers[work] = asyncio.get_running_loop().create_future()
        emptiest = min(self.engines, key=lambda engine: engine.load)
        emptiest.submit(work, self.time)
        finish = await answered
        return web.json_response(self._answer(work, random.Random(seed), finish))

    def _answer(self, work: Request, rng: random.Random, finish: str) -> dict[str, Any]:
        begin, begin_text = self.vocabulary["begin"]
        end, end_text = rng.choice(self.vocabulary["ends"])
        words = rng.choices(self.vocabulary["words"], k=max(1, work.length - len(begin) - len(end)))
        ids = [*begin, *(token for token, _ in words), *end]
        text = begin_text + "".join(word for _, word in words) + end_text
        if finish == "abort":
            ids = ids[: work.done]
            text = ""
        versions = [*work.versions, (self.version, len(ids))]
        return {
            "text": text,
            "meta_info": {
                "finish_reason": {"type": finish},
                "output_token_logprobs": [[-rng.random(), token, None] for token in ids],
                "prompt_tokens": len(work.prompt),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": str(self.version),
                "weight_versions": [
                    {"version": str(version), "end": tokens} for version, tokens in versions
                ],
            },
        }

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def abort(self, request: web.Request) -> web.Response:
        for engine in self.engines:
            for work in engine.abort(self.time):
                self._answers.pop(work).set_result("abort")
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """Load new weights: pause, abort or retract, flush the cache, load, continue."""
        retracts = (await request.json())["mode"] == "retract"
        for engine in self.engines:
            engine.paused = True
            if retracts:
                for work in engine.retract(self.time):
                    if work.done:
                        work.versions.append((self.version, work.done))
            engine.cache.clear()
        if not retracts:
            await self.abort(request)
        self.version += 1
        for engine in self.engines:
            engine.resume(self.time)
        return web.json_response({})

    async def set_hosts(self, request: web.Request) -> web.Response:
        """Charge these processes, too."""
        self.hosts[1:] = map(Host, (await request.json())["pids"])
        return web.json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        """Respond after some simulated seconds."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        seconds = (await request.json())["seconds"]
        heapq.heappush(self._sleepers, (self.time + seconds, next(self._numbers), woken))
        await woken
        return web.json_response({})

    async def now(self, request: web.Request) -> web.Response:
        return web.json_response({"now": self.time})

    async def saturated(self, request: web.Request) -> web.Response:
        """Replay the recorded requests with a queue that is never empty; takes no simulated
        time."""
        body = await request.json()
        engines = len(self.engines)
        work = list(self.recorded.values())
        tokens, _ = saturated(self.timing, work)
        updated, _ = saturated(self.timing, work, max(1, body["every"] // engines), body["mode"])
        return web.json_response(
            {"tokens_per_s": tokens * engines, "updated_tokens_per_s": updated * engines}
        )

    async def keep_time(self) -> None:
        """Advance the clock until a host ends, and finish what is due."""
        while True:
            clocks = [host.advance(self.time) for host in self.hosts]
            if awake := [clock for clock in clocks if clock is not None]:
                self.time = max(self.time, min(awake))
            if self._next_event() < math.inf and await self._hosts_wait():
                self.time = max(self.time, self._next_event())
            else:
                await asyncio.sleep(2e-4)
            for engine in self.engines:
                while engine.next_event <= self.time:
                    for work in engine.advance():
                        self._answers.pop(work).set_result("stop")
            while self._sleepers and self._sleepers[0][0] <= self.time:
                _, _, woken = heapq.heappop(self._sleepers)
                woken.set_result(None)

    def _next_event(self) -> float:
        asleep = self._sleepers[0][0] if self._sleepers else math.inf
        return min(asleep, *(engine.next_event for engine in self.engines))

    async def _hosts_wait(self) -> bool:
        """Tell whether all hosts wait for an event, and all that they sent has been read."""
        arrived = self.arrived
        for _ in range(12):
            # A request on a new connection takes up to ten turns of the loop to be queued.
            await asyncio.sleep(0)
        return arrived == self.arrived and all(host.unchanged() for host in self.hosts)


async def serve(server: Server) -> None:
    """Print the port, then serve until a host ends."""
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    with contextlib.suppress(OSError):  # the host has ended
        await server.keep_time()


if __name__ == "__main__":
    asyncio.run(serve(Server(Host(os.getppid()), **json.loads(sys.argv[1]))))
