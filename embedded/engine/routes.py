"""The HTTP routes of the embedded engine: SGLang's native names, bodies and responses."""

import asyncio
import json
import reprlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from embedded.engine.engine import Engine
from rollout.errors import ConfigError, EngineError

MAX_ERROR_LENGTH = 2000
"""Characters of an error's text in a response; longer texts are cut, because they may quote the request."""
MAX_NAME_LENGTH = 4096
"""Characters of a path, a request id or a version."""
PAUSE_MODES = ("abort", "in_place")


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
    return web.json_response({"error": {"message": text[:MAX_ERROR_LENGTH]}}, status=status)


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
    """Read an optional path, request id or version in the body; raises ConfigError if it is not text, or too long."""
    value = body.get(key)
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME_LENGTH and "\0" not in value):
        raise ConfigError(f"{key} must be a text of at most {MAX_NAME_LENGTH} characters, got {reprlib.repr(value)}")
    return value


async def _generate(engine: Engine, request: web.Request) -> web.Response:
    body, started = await _body(request), time.monotonic()
    queued = await asyncio.to_thread(engine.prepare, body) if engine.takes_long(body) else engine.prepare(body)
    engine.scheduler.submit(queued)
    try:
        finished = await asyncio.wrap_future(queued.future)
    except asyncio.CancelledError:
        # The client disconnected, so its request must not slow down the others.
        engine.scheduler.abort(queued.rid)
        raise
    return web.json_response(engine.response(finished, started))


async def _health(engine: Engine, _: web.Request) -> web.Response:
    return web.Response(status=200 if engine.scheduler.healthy else 503)


async def _model_info(engine: Engine, _: web.Request) -> web.Response:
    info = {"model_path": engine.model_path, "tokenizer_path": engine.options.model_path, "is_generation": True}
    return web.json_response({**info, "weight_version": engine.scheduler.weight_version})


async def _server_info(engine: Engine, _: web.Request) -> web.Response:
    return web.json_response(
        {
            **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size", "num_gpus"), 1),
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
    worker = {"id": "0", "url": url, "worker_type": "regular", "is_healthy": engine.scheduler.healthy}
    return web.json_response({"workers": [worker]})


async def _flush_cache(engine: Engine, _: web.Request) -> web.Response:
    if engine.scheduler.flush_cache():
        return web.Response(text="Cache flushed.\n")
    return web.Response(status=400, text="Requests are in progress; the cache was not flushed.\n")


async def _abort(engine: Engine, request: web.Request) -> web.Response:
    body = await _body(request)
    rid = _name(body, "rid")
    if not body.get("abort_all") and not rid:
        raise ConfigError("abort_request needs a rid, or abort_all: true")
    engine.scheduler.abort(None if body.get("abort_all") else rid)
    return web.Response(status=200)


async def _pause(engine: Engine, request: web.Request) -> web.Response:
    mode = (await _body(request)).get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise ConfigError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {reprlib.repr(mode)}")
    engine.scheduler.pause(mode)
    return web.json_response({"status": "ok", "message": "Generation paused."})


async def _continue(engine: Engine, _: web.Request) -> web.Response:
    engine.scheduler.resume()
    return web.json_response({"status": "ok", "message": "Generation continued."})


async def _update_from_disk(engine: Engine, request: web.Request) -> web.Response:
    body = await _body(request)
    folder, version = _name(body, "model_path"), _name(body, "weight_version")
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
    "GET /get_model_info": _model_info,
    "GET /model_info": _model_info,
    "GET /get_server_info": _server_info,
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
