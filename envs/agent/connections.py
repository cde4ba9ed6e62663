"""Connections to the server for agents: how many there may be, and how long they may take to send a request.

A connection belongs to an episode from its first request with that episode's key on. Until then nothing is read from it
but headers, and the oldest such connection is closed when there are too many.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from envs.agent.parts import RequestError
from envs.agent.session import Session

MAX_UNKNOWN = 128
"""Connections that have not sent a key yet."""
MAX_CONNECTIONS = 128
"""Connections of one episode."""
MAX_HEADER = 2048
"""Characters in the first line of a request and in each of its headers."""
RECEIVED_BYTES = 8192
"""Most that is received from a connection before it is the next one's turn; asyncio's own 256 KiB may take 0.1 s."""
LINGER_S = 2.0
"""Seconds in which the rest of a refused request is discarded, so that its client reads the reply."""
IDLE_S = 30.0
"""Seconds in which a connection must send the headers of its next request."""
BODY_S = 30.0
"""Seconds in which a request's body must arrive."""


class Listener(web.Server):
    """aiohttp's server with a limited number of connections, whose idle ones it closes itself."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )
        self._unknown: dict[web.RequestHandler, None] = {}
        self._owners: dict[web.RequestHandler, Session] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        transport.max_size = RECEIVED_BYTES  # type: ignore[attr-defined]
        self._unknown[handler] = None
        if len(self._unknown) > MAX_UNKNOWN:
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._unknown.pop(handler, None)
        if (owner := self._owners.pop(handler, None)) is not None:
            owner.connections -= 1

    def assign(self, handler: web.RequestHandler, session: Session) -> None:
        """Count a connection as one of the session's; raises RequestError if there are too many."""
        if (owner := self._owners.get(handler)) is session:
            return
        if session.connections >= MAX_CONNECTIONS:
            raise RequestError(f"{MAX_CONNECTIONS} connections of this program are open already", 429)
        session.connections += 1
        if owner is not None:
            owner.connections -= 1
        self._owners[handler] = session
        self._unknown.pop(handler, None)


async def read_body(http: web.BaseRequest, session: Session) -> bytearray:
    """Read the body of a request. Its bytes stay counted in `session.unread`.

    Raises:
        RequestError: it is compressed, too long or too slow, or does not say how long it is.
    """
    if http.content_length is None:
        raise RequestError("the request has no Content-Length", 411)
    if http.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError("compressed requests are not supported; send the JSON itself", 415)
    session.check_room(http.content_length)
    if http.headers.get("Expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        http.writer.output_size = 0  # otherwise a failed request would count as answered
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for data in http.content.iter_any():
                session.check_room(len(data))
                session.unread += len(data)
                body += data
    except BaseException as error:
        session.unread -= len(body)
        if isinstance(error, TimeoutError):
            raise RequestError(f"the request did not arrive within {BODY_S:g} s", 408) from error
        raise
    return body
