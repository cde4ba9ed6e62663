"""An OpenEnv server: sessions over WebSockets at `/ws`, and its descriptions over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from envs.openenv.protocol import HEALTH_PATH, METADATA_PATH, SCHEMA_PATH, SOCKET_PATH, ErrorCode
from inspection.serve_env.access import Access
from inspection.serve_env.frames import error_frame, schemas
from inspection.serve_env.session import Catalogue, Session
from slime_verlog import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)

PONG_TIMEOUT_S = 600.0
"""A client that is silent for this long has gone; a trainer may block its event loop during an update."""


class EnvServer:
    """Serves the tasks of a catalogue to at most `capacity` clients at a time."""

    def __init__(self, catalogue: Catalogue, name: str, capacity: int, access: Access) -> None:
        self._catalogue, self._capacity, self._access, self._open = catalogue, capacity, access, 0
        tasks = ", ".join(catalogue.tasks)
        about = {"name": name, "description": f"reset takes seed and task. Tasks: {tasks}.", "version": _version()}
        pages = {HEALTH_PATH: {"status": "healthy"}, SCHEMA_PATH: schemas(), METADATA_PATH: about}
        self._pages = {path: json.dumps(page).encode() for path, page in pages.items()}

    async def run(self, host: str, port: int, ready: Callable[[str], Any]) -> None:
        """Serve until SIGINT or SIGTERM; `ready` is called with the server's URL once clients can connect.

        Raises:
            ConfigError: the address cannot be used.
            MissingDependencyError: websockets is not installed.
        """
        try:
            from websockets.asyncio.server import serve
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "serve-env needs the package websockets; install it with: pip install 'slime-verlog[openenv]'"
            ) from error
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # clients that only open a connection to see whether the port answers
        try:
            listening = await serve(
                self._session,
                host,
                port,
                process_request=self._page,
                ping_timeout=PONG_TIMEOUT_S,
                compression=None,
                logger=quiet,
            )
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror or error}") from error
        async with listening:
            bound = next(iter(listening.sockets)).getsockname()[1]
            ready(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
            try:
                await _signal()
            finally:
                self._catalogue.pool.close()  # ends steps that are running, so that their sessions can end

    def _page(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a plain HTTP request; None lets a WebSocket open."""
        if (why := self._access.refusal(request.headers)) is not None:
            return connection.respond(403, f"{why}\n")
        path = request.path.partition("?")[0].rstrip("/")
        if path == SOCKET_PATH:
            return None
        body = self._pages.get(path)
        known = ", ".join([SOCKET_PATH, *self._pages])
        response = connection.respond(200 if body else 404, body.decode() if body else f"there is only {known}\n")
        if body:
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = "application/json"
        return response

    async def _session(self, connection: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            if self._open < self._capacity:
                await self._converse(connection)
            else:
                taken = {"active_sessions": self._open, "max_sessions": self._capacity}
                sentence = f"all {self._capacity} sessions of this server are taken (--capacity)"
                await connection.send(error_frame(ErrorCode.CAPACITY_REACHED, sentence, **taken))
        except ConnectionClosed:
            logger.debug("a client has gone")
        except Exception as error:
            logger.exception("a session broke")
            await connection.send(error_frame(ErrorCode.SESSION_ERROR, f"{type(error).__name__}: {error}"))

    async def _converse(self, connection: ServerConnection) -> None:
        session, seconds = Session(self._catalogue), self._access.idle_s
        self._open += 1
        try:
            while True:
                async with asyncio.timeout(seconds):
                    frame = await connection.recv()
                if (answer := await session.answer(frame)) is None:
                    return
                await connection.send(answer)
        except TimeoutError:
            sentence = f"no request for {seconds:g} s, so the session ends (--idle-timeout)"
            await connection.send(error_frame(ErrorCode.SESSION_ERROR, sentence))
        finally:
            await session.close()
            self._open -= 1


async def _signal() -> None:
    """Wait for SIGINT or SIGTERM."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _version() -> str | None:
    try:
        return metadata.version("slime-verlog")
    except metadata.PackageNotFoundError:
        return None
