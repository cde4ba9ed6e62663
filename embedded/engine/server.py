"""An HTTP engine with SGLang's native API (names, bodies and responses), for small models on one
machine.

`python -m embedded.engine.server --model-path FOLDER --port PORT` serves one model. `EngineServer`
serves it from inside a process.
"""

import argparse
import asyncio
import errno
import json
import reprlib
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from aiohttp import web

from embedded.engine.engine import HOST, Engine, EngineOptions
from embedded.engine.vision import VisionEngine, has_vision
from rollout.errors import EngineError
from slime_verlog import ConfigError, command, read_settings


def build_app(engine: Engine) -> web.Application:
    """Build the web application of one engine."""

    @web.middleware
    async def explain(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConfigError as error:
            return _error(str(error), 400)
        except RecursionError:
            return _error("the request body is nested too deeply", 400)
        except EngineError as error:
            return _error(str(error), 500)

    app = web.Application(client_max_size=engine.max_body_bytes, middlewares=[explain])
    for route, handler in ROUTES.items():
        method, path = route.split()
        add = app.router.add_get if method == "GET" else app.router.add_post
        add(path, partial(handler, engine))
    return app


def _error(text: str, status: int) -> web.Response:
    # The text may quote a whole request.
    return web.json_response({"error": {"message": text[:2000]}}, status=status)


async def _body(request: web.Request) -> dict[str, Any]:
    """Read the JSON object of a request; an empty body is an empty object."""
    raw = await request.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise ConfigError(f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def _name(body: Mapping[str, Any], key: str) -> str | None:
    """Read an optional path, request id or version in the body; raises ConfigError if it is not
    text."""
    value = body.get(key)
    if value is not None and not (isinstance(value, str) and "\0" not in value):
        raise ConfigError(f"{key} must be text, got {reprlib.repr(value)}")
    return value


async def _generate(engine: Engine, request: web.Request) -> web.Response:
    body = await _body(request)
    started = time.monotonic()
    is_slow = bool(body.get("image_data"))  # decoding images would keep the event loop busy
    queued = await asyncio.to_thread(engine.prepare, body) if is_slow else engine.prepare(body)
    engine.scheduler.submit(queued)
    try:
        finished = await asyncio.wrap_future(queued.future)
    except asyncio.CancelledError:
        # The client disconnected, so its request must not slow down the others.
        engine.scheduler.abort(lambda request: request is queued)
        raise
    return web.json_response(engine.response(finished, started))


async def _health(engine: Engine, _: web.Request) -> web.Response:
    return web.Response(status=200 if engine.scheduler.healthy else 503)


async def _server_info(engine: Engine, _: web.Request) -> web.Response:
    return web.json_response(
        {
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "num_gpus": 1,
            "model_path": engine.model_path,
            "enable_memory_saver": False,
            "context_length": engine.decoder.context_length,
            "max_running_requests": engine.options.max_running_requests,
            "device": engine.options.device,
            "weight_version": engine.scheduler.weight_version,
            "process_cpu_s": time.process_time(),
        }
    )


async def _weight_version(engine: Engine, _: web.Request) -> web.Response:
    return web.json_response({"weight_version": engine.scheduler.weight_version})


async def _loads(engine: Engine, _: web.Request) -> web.Response:
    return web.json_response({"loads": [{"dp_rank": 0, **engine.scheduler.load()}]})


async def _workers(engine: Engine, request: web.Request) -> web.Response:
    url = f"{request.scheme}://{request.host}"
    worker = {
        "id": "0",
        "url": url,
        "worker_type": "regular",
        "is_healthy": engine.scheduler.healthy,
    }
    return web.json_response({"workers": [worker]})


async def _flush_cache(engine: Engine, _: web.Request) -> web.Response:
    if engine.scheduler.flush_cache():
        return web.Response(text="Cache flushed.\n")
    return web.Response(status=400, text="Requests are in progress; the cache was not flushed.\n")


async def _abort(engine: Engine, request: web.Request) -> web.Response:
    body = await _body(request)
    rid = _name(body, "rid")
    if body.get("abort_all"):
        engine.scheduler.abort()
    elif rid:
        engine.scheduler.abort(lambda queued: queued.rid.startswith(rid))
    else:
        raise ConfigError("abort_request needs a rid, or abort_all: true")
    return web.Response(status=200)


async def _pause(engine: Engine, request: web.Request) -> web.Response:
    mode = (await _body(request)).get("mode", "abort")
    if mode not in ("abort", "retract"):
        raise ConfigError(f"mode must be one of abort, retract, got {reprlib.repr(mode)}")
    engine.scheduler.pause(mode)
    return web.json_response({"status": "ok", "message": "Generation paused."})


async def _continue(engine: Engine, _: web.Request) -> web.Response:
    engine.scheduler.resume()
    return web.json_response({"status": "ok", "message": "Generation continued."})


async def _update_from_disk(engine: Engine, request: web.Request) -> web.Response:
    body = await _body(request)
    folder = _name(body, "model_path")
    version = _name(body, "weight_version")
    if folder is None:
        raise ConfigError("model_path is missing; it must name a model folder")
    if body.get("abort_all_requests"):
        engine.scheduler.abort()
    try:
        version = await engine.load_folder(folder, version)
    except ConfigError as error:
        return web.json_response({"success": False, "message": str(error)}, status=400)
    message = f"Serving {folder} as weight version {version}."
    return web.json_response({"success": True, "message": message, "num_paused_requests": 0})


ROUTES: Mapping[str, Callable[[Engine, web.Request], Awaitable[web.Response]]] = {
    "GET /health": _health,
    "GET /health_generate": _health,
    "GET /server_info": _server_info,
    "GET /get_weight_version": _weight_version,
    "GET /v1/loads": _loads,
    "GET /workers": _workers,
    "GET /flush_cache": _flush_cache,
    "POST /flush_cache": _flush_cache,
    "POST /generate": _generate,
    "POST /abort_request": _abort,
    "POST /pause_generation": _pause,
    "POST /continue_generation": _continue,
    "POST /update_weights_from_disk": _update_from_disk,
}
"""Methods, paths and handlers."""


class EngineServer(AbstractContextManager["EngineServer"]):
    """An engine and its HTTP server in a thread of this process; a context manager."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model and listen; raises ConfigError if it is not supported, or the port is
        taken."""
        self.engine = (VisionEngine if has_vision(options.model_path) else Engine)(options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-http", daemon=True
        )
        self._thread.start()
        try:
            self._runner, self.port = self._call(_listen(self.engine))
        except ConfigError:
            self.close()
            raise
        self.url = f"http://{HOST}:{self.port}"

    def close(self) -> None:
        """Stop listening and end the worker; requests in flight are aborted. Safe to call twice."""
        self.engine.scheduler.close()
        if self._loop.is_closed():
            return
        if hasattr(self, "_runner"):
            self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=60)


async def _listen(engine: Engine) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(build_app(engine), access_log=None, handler_cancellation=True)
    await runner.setup()
    port = engine.options.port
    try:
        await web.TCPSite(runner, HOST, port).start()
    except OSError as error:
        await runner.cleanup()
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        )
        raise ConfigError(f"port {port} on {HOST} {reason}; choose another --port") from error
    return runner, runner.addresses[0][1]


@command()
def main() -> None:
    """Serve one model until interrupted."""
    parser = argparse.ArgumentParser(description="Serve a small model with SGLang's native API.")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16; faster on CPUs with AMX"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads; more than one is slower on a busy CPU",
    )
    flags = vars(parser.parse_args())
    torch.set_num_threads(flags.pop("threads"))
    server = EngineServer(read_settings(EngineOptions, flags))
    print(f"serving {server.engine.model_path} on {server.url}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
