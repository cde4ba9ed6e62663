"""An OpenEnv server: sessions over WebSockets at `/ws`, and its descriptions over HTTP.

A browser names the page in `Origin` and the server's name, as the page knows it, in `Host`. A page that reaches this
machine through its own host name (DNS rebinding) is recognised by the latter."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import signal
import socket
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envs.openenv.protocol import HEALTH_PATH, METADATA_PATH, SCHEMA_PATH, SOCKET_PATH, ErrorCode
from inspection.command import VERSION
from inspection.serve_env.frames import error_frame, schemas
from inspection.serve_env.session import Catalogue, Session
from slime_verlog import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.datastructures import Headers
    from websockets.http11 import Request, Response

logger = logging.getLogger(__name__)

PONG_TIMEOUT_S = 600.0
"""A client that is silent for this long has gone; a trainer may block its event loop during an update."""


@dataclass(frozen=True)
class Access:
    """What is accepted, and how long a session may be silent."""

    hosts: tuple[str, ...] = ()
    """Names of this server besides its addresses, `localhost` and the machine's name."""
    origins: tuple[str, ...] = ()
    """Pages that may use it, as `https://example.org`."""
    idle_s: float = 3600.0

    def refusal(self, headers: Headers) -> str | None:
        """Return why a request is refused; None if it is not."""
        hosts, origins = headers.get_all("Host"), headers.get_all("Origin")
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return f"this server is not {', '.join(hosts)[:200] or 'without a name'}; name it with --allow-host"
        for origin in origins:
            if origin not in self.origins:
                return f"pages of {origin[:200]} may not use this server; name them with --allow-origin"
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", socket.gethostname().lower(), *map(str.lower, self.hosts)):
            return True
        try:
            return bool(ipaddress.ip_address(name))  # only names can be pointed elsewhere
        except ValueError:
            return False


class EnvServer:
    """Serves the tasks of a catalogue to at most `capacity` clients at a time."""

    def __init__(self, catalogue: Catalogue, name: str, capacity: int, access: Access) -> None:
        self._catalogue, self._capacity, self._access, self._open = catalogue, capacity, access, 0
        tasks = ", ".join(catalogue.tasks)
        about = {"name": name, "description": f"reset takes seed and task. Tasks: {tasks}.", "version": VERSION}
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
