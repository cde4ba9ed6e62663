"""An HTTP engine with SGLang's native API, for small models on one machine.

`python -m embedded.engine.server --model-path FOLDER --port PORT` serves one model. `EngineServer` serves it from
inside a process.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import threading
from collections.abc import Mapping
from typing import Any

import torch
from aiohttp import web

from embedded.engine.engine import HOST, Engine, EngineOptions
from embedded.engine.routes import build_app
from embedded.engine.vision import VisionEngine, has_vision
from slime_verlog import ConfigError, command, read_settings


class EngineServer:
    """An engine and its HTTP server in a thread of this process; a context manager."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model and listen; raises ConfigError if it is not supported, or the port is taken."""
        self.engine = (VisionEngine if has_vision(options.model_path) else Engine)(options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-http", daemon=True)
        self._thread.start()
        try:
            self._runner, self.port = self._call(_listen(self.engine))
        except ConfigError:
            self.close()
            raise
        self.url = f"http://{HOST}:{self.port}"

    def update_weights(self, state: Mapping[str, torch.Tensor], version: str | None = None) -> str:
        """Load weights with Hugging Face names into the engine; returns the version that it now serves."""
        return self.engine.scheduler.update_weights(state, version).result(timeout=600)

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

    def __enter__(self) -> EngineServer:
        return self

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
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {HOST} is in use; stop the process that listens there, or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {HOST}:{port}: {error.strerror}") from error
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
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; faster on CPUs with AMX")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more than one is slower on a busy CPU")
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
