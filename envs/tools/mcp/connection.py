"""One connection to an MCP server, through the client of the `mcp` package.

One task opens, holds and closes the connection, as anyio demands. All methods run on the event loop
of that task.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from envs.errors import EnvironmentFault
from envs.tools import reaper
from envs.tools.settings import McpSettings

ANSWER_S = 5.0
"""Seconds in which a living server lists its tools."""
END_S = 1.0
"""Seconds that a command has to end after its stdin is closed, before it is killed with all that it
started."""
STDERR_CHARS = 2000

Listing = dict[str, dict[str, Any]]
"""A server's tools by name, with the keys of the protocol: `name`, `description`, `inputSchema`."""


class Connection:
    """A connection that is opened at once. It has ended if the server died or `close` was
    called."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the connection
        self._holder = asyncio.create_task(self._hold())
        self.listing: Listing = {}
        """The tools that the server listed last."""
        self.doubtful = False
        """A request was cancelled, so the server may hang."""

    @property
    def ended(self) -> bool:
        return self._closing.is_set() or self._holder.done()

    async def opened(self) -> Any:
        """Wait for the connection; return the client's session. Raises EnvironmentFault if it
        failed."""
        return await asyncio.shield(self._ready)

    async def ask(self, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send a request and return its result; raises ConnectionError if the connection ends."""
        request = asyncio.ensure_future(send(await self.opened()))
        try:
            await asyncio.wait({request, self._holder}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ConnectionError("the connection ended")
            return request.result()
        except asyncio.CancelledError:
            self.doubtful = True
            raise
        finally:
            request.cancel()

    async def answers(self) -> bool:
        """Return whether the server still lists its tools; closes the connection if not."""
        try:
            async with asyncio.timeout(ANSWER_S):
                self.listing = await self.ask(list_tools)
        except Exception:  # each kind of failure means that the server is lost
            self.close()
            return False
        self.doubtful = False
        return True

    def close(self) -> None:
        """Begin to close the connection; a command gets a second to end before it is killed."""
        self._closing.set()
        if not self._ready.done():
            self._give_up("was closed while it started")

    async def _hold(self) -> None:
        seconds = self._settings.start_timeout_s
        late = f"did not start and list its tools within {seconds:g} s (start_timeout_s)"
        limit = asyncio.get_running_loop().call_later(seconds, self._give_up, late)
        from mcp import Client  # takes seconds

        try:
            async with Client(_transport(self._settings, self._stderr), cache=None) as session:
                self.listing = await list_tools(session)
                limit.cancel()
                self._ready.set_result(session)
                await self._closing.wait()
        except Exception as error:
            self._refuse(
                f"{'cannot be reached' if self._settings.url else 'did not start'}: {reason(error)}"
            )
        finally:
            limit.cancel()
            self._stderr.close()

    def _give_up(self, why: str) -> None:
        self._refuse(why)
        self._holder.cancel()

    def _refuse(self, what: str) -> None:
        if not self._ready.done():
            said = self._last_line()
            heard = f"; the last line of its stderr: {said}" if said else ""
            self._ready.set_exception(EnvironmentFault(f"{self._settings.label} {what}{heard}"))
            self._ready.exception()  # marks it as retrieved, because no call may be waiting

    def _last_line(self) -> str:
        """Return the last line that the command wrote to stderr; the client may still move the
        file's position."""
        end = os.fstat(self._stderr.fileno()).st_size
        written = os.pread(self._stderr.fileno(), STDERR_CHARS, max(end - STDERR_CHARS, 0))
        return written.decode(errors="replace").strip().rpartition("\n")[2]


async def list_tools(session: Any) -> Listing:
    """Return all tools that the server lists now."""
    listing: Listing = {}
    cursor = None
    while True:
        page = (await session.list_tools(cursor=cursor)).model_dump(by_alias=True)
        listing |= {tool["name"]: tool for tool in page["tools"]}
        cursor = page.get("nextCursor")
        if not cursor:
            return listing


@contextlib.asynccontextmanager
async def _transport(settings: McpSettings, stderr: Any) -> AsyncIterator[Any]:
    """The streams to a server; a command's stderr goes into the file."""
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if settings.url is not None:
        key = settings.api_key_env
        headers = {} if key is None else {"Authorization": f"Bearer {os.environ[key]}"}
        async with (
            create_mcp_http_client(headers) as client,
            streamable_http_client(settings.url, http_client=client) as streams,
        ):
            yield streams
        return
    command, *arguments = settings.words
    variables = {name: os.environ[name] for name in settings.pass_env}
    beside = shutil.which(command, path=os.path.dirname(sys.executable))
    kept = ["-I", "-S", reaper.__file__, f"{END_S}", beside or command, *arguments]
    parameters = StdioServerParameters(command=sys.executable, args=kept, env=variables)
    async with stdio_client(parameters, errlog=stderr) as streams:
        yield streams


def reason(error: BaseException) -> str:
    """Return the first error inside groups of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
