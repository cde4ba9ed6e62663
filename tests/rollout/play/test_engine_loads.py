"""Each engine's running and waiting requests reach the batch's metrics, and engines that do not
tell stop nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.bridge.settings import EngineSettings
from rollout.play import engine_loads
from rollout.play.engine import EngineClient
from rollout.play.engine_loads import EngineLoad, EngineLoads


@asynccontextmanager
async def serving(routes: dict[str, Any]) -> AsyncIterator[str]:
    """A server that answers GET requests with this JSON; a list is answered one item per request,
    the last again."""

    async def answer(request: web.Request) -> web.Response:
        found = routes[request.path]
        return web.json_response(
            (found.pop(0) if len(found) > 1 else found[0]) if isinstance(found, list) else found
        )

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in routes])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def load(running: int, waiting: int, ranks: int = 1) -> dict[str, Any]:
    rank = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": 9,
    }
    return {"version": "0.5.9", "loads": [rank] * ranks}


@asynccontextmanager
async def watching(router: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineLoads]:
    monkeypatch.setattr(engine_loads, "LOADS_PAUSE_S", 0.02)
    client = EngineClient(router, EngineSettings())
    loads = EngineLoads(router, client.get)
    loads.start()
    yield loads
    loads.close()
    await client.close()


async def until_known(loads: EngineLoads, engines: int) -> dict[int, EngineLoad]:
    for _ in range(200):
        await asyncio.sleep(0.02)
        if len(found := loads.take()) == engines:
            return found
    raise AssertionError(f"no loads of {engines} engines")


async def test_engines_behind_a_router_tell_what_runs_and_waits_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers are those of the addresses in order, also of an engine that does not tell."""
    async with (
        serving({"/v1/loads": load(3, 1, ranks=2)}) as one,
        serving({"/v1/loads": load(5, 0)}) as two,
    ):
        told = {"http://127.0.0.1:9": None, one: EngineLoad(6.0, 2.0), two: EngineLoad(5.0, 0.0)}
        listed = {"workers": [{"url": url} for url in told]}
        async with serving({"/workers": listed}) as router, watching(router, monkeypatch) as loads:
            found = await until_known(loads, 2)
    assert found == {
        number: told[url] for number, url in enumerate(sorted(told)) if told[url] is not None
    }


async def test_a_load_is_the_mean_since_the_last_batch() -> None:
    loads = EngineLoads("http://router", lambda url: asyncio.sleep(0, answers[url].pop(0)))
    answers = {"http://engine/v1/loads": [load(2, 0), load(4, 3), load(7, 7)]}
    for _ in range(2):
        await loads._ask(1, "http://engine")
    assert loads.take() == {1: EngineLoad(3.0, 1.5)}
    await loads._ask(1, "http://engine")
    assert (loads.take(), loads.take()) == ({1: EngineLoad(7.0, 7.0)}, {})


@pytest.mark.parametrize("routes", [{}, {"/workers": {"urls": []}}])
def test_a_router_that_lists_no_engines_is_asked_once(
    routes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with serving(routes) as router, watching(router, monkeypatch) as loads:
            await asyncio.sleep(0.3)
            assert loads.take() == {}

    with caplog.at_level(logging.INFO):
        asyncio.run(play())
    assert caplog.text.count("does not list its engines") == 1
