"""SGLang's HTTP interface over simulated engines, in its own process: `python -m benchmarks.engine_server --host PID`.

Time is simulated. Its clock goes to the engines' next event whenever the hosts, the processes that send the requests,
sleep; while a host computes, the clock advances by the CPU time that the host uses. So a host's cost is its real cost,
HTTP and JSON on its side included, and a loaded machine slows the run down without changing what it shows. The cost of
this process and the network's latency do not count.

Several hosts compute at the same time, each on its own core, even if the machine has fewer cores: every host has its
own clock, which starts at the simulated time at which it woke, and simulated time follows the slowest host that is
awake. A host that the machine runs ahead of the others may therefore send its requests too early by one time slice of
the scheduler, a few milliseconds. What this cannot show: cores that share caches, memory bandwidth or a clock
frequency, and the network between nodes.

A response has the form `THINK: <words> ACTION: <action>`. Its length is drawn from the prompt alone, so every loop gets
responses of the same distribution. As in SGLang, an update aborts those in flight, or retracts them, and raises the
weight version.
"""

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import math
import random
import time
import zlib
from collections.abc import Mapping, Sequence
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
        self._cpu, self._time, self._awake = self.cpu_s(), 0.0, False

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
        """Charge the CPU time since the last call; return the host's own time, or None if it slept."""
        cpu = self.cpu_s()
        used, self._cpu = cpu - self._cpu, cpu
        awake = used > 0 or not self.asleep()
        if awake and not self._awake:
            self._time = max(self._time, now)
        self._time, self._awake = self._time + used, awake
        return self._time if awake else None

    def unchanged(self) -> bool:
        """Tell whether it has slept since the last `advance`."""
        return self.asleep() and self.cpu_s() == self._cpu


def draw_length(seed: int, mean: float) -> int:
    """Draw the tokens of a response, at least 16: log-normal with sigma 0.6, which is assumed for short reasoning."""
    return max(16, round(random.Random(seed).lognormvariate(math.log(mean) - 0.6**2 / 2, 0.6)))


class Server:
    """The engines behind one address, and their clock."""

    def __init__(
        self, host: Host, engines: int, timing: Timing, vocabulary: Mapping[str, Any], answer_tokens: float
    ) -> None:
        """Start with idle engines; the engines have no tokenizer, so responses are made of the `vocabulary`."""
        self.hosts, self.timing, self.vocabulary, self.answer_tokens = [host], timing, vocabulary, answer_tokens
        self.engines = [Engine(timing) for _ in range(engines)]
        self.now, self.version, self.arrived = 0.0, 1, 0
        self.recorded: dict[int, tuple[np.ndarray, int]] = {}
        self._answers: dict[Request, asyncio.Future[str]] = {}
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28, middlewares=[self._count])
        posts = {"/generate": self.generate, "/abort_request": self.abort, "/pause_generation": self.pause}
        posts |= {"/continue_generation": self.resume, "/simulated/update": self.update}
        posts |= {"/simulated/sleep": self.sleep, "/simulated/hosts": self.set_hosts}
        gets = {"/workers": self.workers, "/v1/loads": self.loads}
        gets |= {"/simulated/now": self.clock, "/simulated/saturated": self.saturated}
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        return app

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.arrived += 1
        return await handler(request)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = np.asarray(body["input_ids"], dtype=np.int32)
        seed = zlib.crc32(prompt.tobytes())
        length = min(draw_length(seed, self.answer_tokens), body["sampling_params"]["max_new_tokens"])
        work = Request(prompt, length)
        self.recorded.setdefault(seed, (prompt, length))  # an aborted request comes again
        self._answers[work] = asyncio.get_running_loop().create_future()
        min(self.engines, key=lambda engine: engine.load).submit(work, self.now)
        return web.json_response(self._answer(work, seed, await self._answers[work]))

    def _answer(self, work: Request, seed: int, finish: str) -> dict[str, Any]:
        rng = random.Random(seed)
        begin, end = self.vocabulary["begin"], rng.choice(self.vocabulary["ends"])
        words = rng.choices(self.vocabulary["words"], k=max(1, work.length - len(begin[0]) - len(end[0])))
        ids = [*begin[0], *(token for token, _ in words), *end[0]]
        text = begin[1] + "".join(word for _, word in words) + end[1]
        if finish == "abort":
            ids, text = ids[: work.done], ""
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
                "weight_versions": [{"version": str(version), "end": tokens} for version, tokens in versions],
            },
        }

    async def workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": f"http://{request.host}"}]})

    async def loads(self, request: web.Request) -> web.Response:
        running = sum(len(engine.running) for engine in self.engines)
        waiting = len(self._answers) - running
        return web.json_response({"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]})

    async def abort(self, request: web.Request) -> web.Response:
        for engine in self.engines:
            for work in engine.abort(self.now):
                self._answers.pop(work).set_result("abort")
        return web.json_response({})

    async def pause(self, request: web.Request) -> web.Response:
        for engine in self.engines:
            engine.paused = True
        return await self.abort(request)

    async def resume(self, request: web.Request) -> web.Response:
        for engine in self.engines:
            engine.resume(self.now)
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        """Load new weights: pause, abort or retract, flush the cache, load, continue."""
        retracts = (await request.json()).get("mode") == "retract"
        for engine in self.engines:
            engine.paused = True
            if retracts:
                for work in engine.retract(self.now):
                    if work.done:
                        work.versions.append((self.version, work.done))
            engine.cache.clear()
        if not retracts:
            await self.abort(request)
        self.version += 1
        return await self.resume(request)

    async def set_hosts(self, request: web.Request) -> web.Response:
        """Charge these processes, too."""
        self.hosts = [self.hosts[0], *map(Host, (await request.json())["pids"])]
        return web.json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        """Respond after some simulated seconds."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        seconds = (await request.json())["seconds"]
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), woken))
        await woken
        return web.json_response({})

    async def clock(self, request: web.Request) -> web.Response:
        return web.json_response({"now": self.now})

    async def saturated(self, request: web.Request) -> web.Response:
        """Replay the recorded requests with a queue that is never empty; takes no simulated time."""
        engines, work = len(self.engines), list(self.recorded.values())
        tokens, responses = saturated(self.timing, work)
        updated, _ = saturated(self.timing, work, max(1, int(request.query["every"]) // engines), request.query["mode"])
        found = {"tokens_per_s": tokens, "turns_per_s": responses, "updated_tokens_per_s": updated}
        return web.json_response({name: rate * engines for name, rate in found.items()})

    async def keep_time(self) -> None:
        """Advance the clock until the host ends, and finish what is due."""
        while True:
            if awake := [moment for host in self.hosts if (moment := host.advance(self.now)) is not None]:
                self.now = max(self.now, min(awake))
            if self._next_event() < math.inf and await self._hosts_wait():
                self.now = max(self.now, self._next_event())
            else:
                await asyncio.sleep(2e-4)
            for engine in self.engines:
                while engine.next_event <= self.now:
                    for work in engine.advance():
                        self._answers.pop(work).set_result("stop")
            while self._sleepers and self._sleepers[0][0] <= self.now:
                heapq.heappop(self._sleepers)[2].set_result(None)

    def _next_event(self) -> float:
        asleep = self._sleepers[0][0] if self._sleepers else math.inf
        return min(asleep, *(engine.next_event for engine in self.engines))

    async def _hosts_wait(self) -> bool:
        """Tell whether all hosts wait for an event, and all that they sent has been read."""
        arrived = self.arrived
        for _ in range(12):  # a request on a new connection takes up to ten turns of the loop to be queued
            await asyncio.sleep(0)
        return arrived == self.arrived and all(host.unchanged() for host in self.hosts)


async def serve(server: Server) -> None:
    """Print the port, then serve until the host ends."""
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    with contextlib.suppress(OSError):  # the host has ended
        await server.keep_time()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=int, required=True, help="process whose CPU time counts")
    parser.add_argument("--vocabulary", type=Path, required=True, help="JSON file with the tokens of responses")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--places", type=int, default=Timing.places, help="requests that one engine runs at once")
    parser.add_argument("--answer-tokens", type=float, default=150.0, help="mean tokens of a response")
    options = parser.parse_args(arguments)
    vocabulary = json.loads(options.vocabulary.read_text())
    timing = Timing(places=options.places)
    asyncio.run(serve(Server(Host(options.host), options.engines, timing, vocabulary, options.answer_tokens)))


if __name__ == "__main__":
    main()
