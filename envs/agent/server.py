"""The HTTP server that stands in for the model's API; one per process, for the agents of all its
episodes.

It speaks OpenAI's two APIs and Anthropic's on a port of this machine and on a Unix socket, for
programs in a sandbox. The API key of a request identifies its episode. A connection belongs to an
episode from its first request with that episode's key on. Until then nothing is read from it but
headers, and the oldest such connection is closed when there are too many.
"""

import asyncio
import functools
import json
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import ModuleType
from typing import Any, TypeVar

from aiohttp import web

from envs.agent import anthropic_format, openai_format, responses_format
from envs.agent.parts import RequestError
from envs.agent.request import Request, read_request
from envs.agent.session import Session, Waiting
from envs.errors import EnvironmentFault
from envs.json_text import short
from envs.swe.sandbox.workspace import per_process, process_folder

MAX_UNKNOWN = 128
"""Connections that have not sent a key yet."""
MAX_CONNECTIONS = 128
"""Connections of one episode."""
MAX_HEADER = 2048
"""Characters in the first line of a request and in each of its headers."""
RECEIVED_BYTES = 8192
"""Most that is received from a connection before it is the next one's turn; asyncio's own 256 KiB
may take 0.1 s."""
LINGER_S = 2.0
"""Seconds in which the rest of a refused request is discarded, so that its client reads the
reply."""
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

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self._unknown.pop(handler, None)
        if (owner := self._owners.pop(handler, None)) is not None:
            owner.connections -= 1

    def assign(self, handler: web.RequestHandler, session: Session) -> None:
        """Count a connection as one of the session's; raises RequestError if there are too many."""
        if (owner := self._owners.get(handler)) is session:
            return
        if session.connections >= MAX_CONNECTIONS:
            raise RequestError(
                f"{MAX_CONNECTIONS} connections of this program are open already", 429
            )
        session.connections += 1
        if owner is not None:
            owner.connections -= 1
        self._owners[handler] = session
        self._unknown.pop(handler, None)


async def read_body(http: web.BaseRequest, session: Session) -> bytearray:
    """Read a request's body; its bytes stay counted in `session.unread`. Raises RequestError for
    what it refuses."""
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


PATIENCE_S = 15.0
"""Seconds between the bytes that keep a waiting client from timing out."""
ACCEPTED = 8
"""Connections accepted at a time, far fewer than `MAX_UNKNOWN`, so that a flood leaves time to read
each one's key."""
QUEUED = 1024
"""Connections that the kernel keeps until then; the clients of others would try again after
seconds."""
START_S = 30.0
THREAD_HEADER = "x-agent-thread"
"""With this header, an agent names its threads itself."""
COMPACTION_HEADER = "x-agent-compaction"
"""With this header set to 1, an agent says that a request only summarises its own conversation."""

T = TypeVar("T")


Api = ModuleType
"""One of the `..._format` modules: how requests are read, and answers and refusals written."""
APIS: dict[str, Api] = {
    "/v1/chat/completions": openai_format,
    "/v1/responses": responses_format,
    "/v1/messages": anthropic_format,
    "/v1/messages/count_tokens": anthropic_format,
}


class ModelServer:
    """Serves on a thread until the process ends."""

    def __init__(self) -> None:
        self.folder = process_folder()
        self.socket = self.folder.make() / "model.sock"
        self.port = 0
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent-server", daemon=True).start()
        try:
            self.call(self._start(), START_S)
        except OSError as error:
            raise EnvironmentFault(f"the server for agents cannot be started: {error}") from error

    def call(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the server's loop."""
        self._loop.call_soon_threadsafe(functools.partial(function, *arguments))

    def open(self, session: Session) -> str:
        """Accept the requests of a session from now on; returns its API key."""
        key = f"sk-{secrets.token_hex(16)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """End a session; its requests that wait are refused."""
        session = self._sessions.pop(key, None)
        if session is not None:
            self.call(session.close(), START_S)

    async def _start(self) -> None:
        self._listener = Listener(self._handle)
        runner = web.ServerRunner(self._listener)
        await runner.setup()
        tcp = socket.create_server(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(self.socket))
        for listening in (tcp, unix):
            # asyncio accepts as many at a time as it lets the kernel keep, so the kernel is told
            # afterwards.
            await web.SockSite(runner, listening, backlog=ACCEPTED).start()
            listening.listen(QUEUED)
        self.socket.chmod(0o666)
        self.port = runner.addresses[0][1]

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of an episode's program; others learn only that they need a key."""
        api = APIS.get(http.path, openai_format)
        bearer = http.headers.get("Authorization", "").partition(" ")[2].strip()
        session = self._sessions.get(http.headers.get("x-api-key") or bearer)
        try:
            if session is None:
                raise RequestError("the API key is not that of a running episode", 401)
            self._listener.assign(http.protocol, session)
        except RequestError as error:
            return await _dismissed(api, http, error)
        try:
            return await self._answer(api, http, session)
        except RequestError as error:
            session.refuse(str(error))
            return (
                _refused(api, error)
                if http.content_length is not None
                else await _dismissed(api, http, error)
            )

    async def _answer(
        self, api: Api, http: web.BaseRequest, session: Session
    ) -> web.StreamResponse:
        match http.method, http.path:
            case "POST", "/v1/messages/count_tokens":
                return web.json_response({"input_tokens": (await _read(api, http, session)).tokens})
            case "POST", path if path in APIS:
                waiting = session.arrive(await _read(api, http, session))
            case "GET", "/v1/models":
                models = [{"id": name, "object": "model", "created": 0} for name in session.models]
                return web.json_response({"object": "list", "data": models})
            case _:
                asked = short(f"{http.method} {http.path}")
                raise RequestError(f"{asked} is not supported; there are {', '.join(APIS)}", 404)
        waiting.connections += 1
        try:
            return await _respond(api, http, waiting)
        except RequestError as error:  # the episode is over; the agent is not to blame
            return _refused(api, error)
        except ConnectionResetError:
            return web.Response(status=499)  # the client is gone, so this is not sent
        finally:
            session.left(waiting)


async def _read(api: Api, http: web.BaseRequest, session: Session) -> Request:
    body = await read_body(http, session)
    thread = http.headers.get(THREAD_HEADER, "")
    compacts = http.headers.get(COMPACTION_HEADER, "") in ("1", "true")
    read = functools.partial(
        read_request, api.read, http.path, body, thread, compacts, session.max_bytes
    )
    # A client that leaves must not free its bytes.
    return await asyncio.shield(session.on_thread(read, len(body)))


async def _respond(api: Api, http: web.BaseRequest, waiting: Waiting) -> web.StreamResponse:
    """Wait for the answer and write it. Spaces before JSON, and pings in a stream, keep the client
    from timing out."""
    streams = waiting.request.streams
    response = web.StreamResponse()
    response.content_type = "text/event-stream" if streams else "application/json"
    try:
        while (answer := await waiting.answered(PATIENCE_S)) is None:
            if not response.prepared:
                await response.prepare(http)
            await response.write(api.PING if streams else b" ")
    except RequestError:
        if response.prepared and http.transport is not None:
            http.transport.abort()  # too late for another status
            return response
        raise
    if streams:
        body = b"".join(api.events(answer, waiting.request, waiting.number))
    else:
        body = json.dumps(api.reply(answer, waiting.request, waiting.number)).encode()
    if not response.prepared:
        response.content_length = len(body)
        await response.prepare(http)
    await response.write(body)
    await response.write_eof()
    waiting.delivered = True
    return response


async def _dismissed(api: Api, http: web.BaseRequest, error: RequestError) -> web.StreamResponse:
    """Refuse a request and close its connection, at once if the length of its body is unknown."""
    response = _refused(api, error)
    response.force_close()
    if http.headers.get("Transfer-Encoding") and http.transport is not None:
        await response.prepare(http)
        await response.write_eof()
        http.transport.close()
    return response


def _refused(api: Api, error: RequestError) -> web.Response:
    return web.json_response(api.refusal(error), status=error.status)


model_server = per_process(ModelServer)
"""Returns this process's server, started by the first call; raises EnvironmentFault if that
fails."""
