"""Offers the tools of MCP servers as `ToolSpec`s and calls them; a server that died is started anew
for later calls."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from envs.errors import ConfigError, EnvironmentFault, ToolError, warn_once
from envs.loading import import_extra
from envs.tools.mcp.connection import Connection, Listing, reason
from envs.tools.results import Tool, ToolEpisode, ToolResult, ToolSpec
from envs.tools.schema import Schema, check_schema
from envs.tools.settings import McpSettings

START_GRACE_S = 10.0
_lock = threading.Lock()
_servers: dict[str, McpServer] = {}
"""The servers of this process, by their settings."""


def mcp_tools(settings: McpSettings, key: str) -> tuple[ToolSpec, ...]:
    """Load the tools that a server offers; they stay the same as long as this process runs.

    A server that all episodes share is asked each time whether it still has them.

    Args:
        key: the entry's position in the YAML, for error messages.

    Raises:
        ConfigError: the command or `include` names something that does not exist.
        EnvironmentFault: the server cannot be started or reached, or its tools have changed.
        ToolError: the server gives all its tools names or schemas that models cannot use.
    """
    shared = settings.scope == "worker"
    with _lock:
        server = _servers.setdefault(settings.model_dump_json(), McpServer(settings))
    if server.specs and not shared:
        return server.specs
    try:
        listing = server.offered()
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error
    if not server.specs:
        schemas = read_schemas(listing.values(), settings.label, settings.prefix)
        server.specs = tuple(
            ToolSpec(
                schema,
                target=functools.partial(server.call, name) if shared else EpisodeTool,
                config={"settings": settings, "known": listing, "tool": name},
                create_timeout_s=2 * settings.start_timeout_s + START_GRACE_S,
                deterministic=settings.deterministic,
                source=settings.label,
            )
            for name, schema in schemas.items()
        )
    if not shared:
        server.close()
    return server.specs


def read_schemas(
    listing: Iterable[Mapping[str, Any]], label: str, prefix: str = ""
) -> dict[str, Schema]:
    """Return the tools' schemas by name; leaves out a tool whose schema cannot be read, with a
    warning.

    Raises:
        ToolError: none can be read.
    """
    schemas = dict[str, Schema]()
    failed = list[ToolError]()
    for tool in listing:
        name = tool["name"]
        described = {
            "name": prefix + name,
            "description": (tool.get("description") or "").strip() or tool.get("title") or name,
            "parameters": tool["inputSchema"] if "inputSchema" in tool else tool["input_schema"],
        }
        try:
            schemas[name] = check_schema(described, label)
        except ToolError as error:
            failed.append(error)
    if failed and not schemas:
        raise failed[0]
    for error in failed:
        warn_once(f"{error}; the tool is left out")
    return schemas


class EpisodeTool(Tool):
    """A tool of a server that belongs to one episode; the episode's tools find it in
    `ToolEpisode.shared`."""

    _server: McpServer | None = None

    async def create(self, episode: ToolEpisode) -> None:
        settings: McpSettings = self.config["settings"]
        place = f"mcp {settings.model_dump_json()}"
        self._server = episode.shared.get(place)
        if self._server is None:
            self._server = episode.shared[place] = McpServer(
                settings, self.config["known"], fresh=True
            )
            await asyncio.to_thread(self._server.offered)

    async def execute(self, /, *args: Any, **kwargs: Any) -> ToolResult:
        assert self._server is not None
        return await self._server.call(self.config["tool"], **kwargs)

    def release(self) -> None:
        if self._server is not None:
            self._server.close()


def tool_result(result: Mapping[str, Any]) -> ToolResult:
    """Return MCP's result, with images as data URIs; keys may be in the protocol's form or in
    Python's."""
    texts = []
    images = []
    for part in result["content"]:
        match part["type"]:
            case "text":
                texts.append(part["text"])
            case "image":
                images.append(f"data:;base64,{part['data']}")
            case "resource" if "text" in part["resource"]:
                texts.append(part["resource"]["text"])
            case kind:
                texts.append(f"[{kind} left out]")
    structured = result.get("structuredContent", result.get("structured_content"))
    if not result["content"] and structured is not None:
        texts.append(json.dumps(structured, ensure_ascii=False))
    text = "\n".join(texts)
    failed = bool(result.get("isError", result.get("is_error")))
    return ToolResult(f"error: {text}" if failed else text, tuple(images), failed=failed)


_loop: asyncio.AbstractEventLoop | None = None


def mcp_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all connections of this process, in a thread that runs no tool's
    code."""
    global _loop
    for client in ("stdio", "streamable_http"):  # here, because it takes seconds
        import_extra(f"mcp.client.{client}", "an MCP tool", "mcp")
    with _lock:
        if _loop is None:
            # It logs a traceback per line that is not JSON.
            logging.getLogger("mcp").setLevel(logging.CRITICAL)
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="mcp", daemon=True).start()
        return _loop


class McpServer:
    """A server for one episode (`fresh`) or for all episodes of this process.

    Args:
        known: the tools that are offered already; the server must list them with the same schemas.
        fresh: the server's state belongs to an episode, so it must not be replaced.
    """

    def __init__(
        self, settings: McpSettings, known: Listing | None = None, fresh: bool = False
    ) -> None:
        self.settings = settings
        self.specs: tuple[ToolSpec, ...] = ()
        self._known = known
        self._fresh = fresh
        self._connection: Connection | None = None

    def offered(self) -> Listing:
        """Return the tools on offer, after starting the server; raises ConfigError or
        EnvironmentFault."""
        return asyncio.run_coroutine_threadsafe(self._offered(), mcp_loop()).result()

    async def call(self, name: str, /, **arguments: Any) -> ToolResult:
        """Call a tool on any loop. Raises EnvironmentFault if the server died."""
        asking = asyncio.run_coroutine_threadsafe(self._call(name, arguments), mcp_loop())
        return tool_result(await asyncio.wrap_future(asking))

    def close(self) -> None:
        """Begin to end the server."""
        if self._connection is not None:
            mcp_loop().call_soon_threadsafe(self._connection.close)

    async def _offered(self) -> Listing:
        if self._connection is not None:
            self._connection.doubtful = True  # so it lists its tools again
        return self._checked((await self._living()).listing)

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        connection = await self._living()
        try:
            result = await connection.ask(lambda session: session.call_tool(name, arguments))
            return result.model_dump(by_alias=True)
        except Exception as error:  # whatever it is, the server either lives or is dead
            if not await connection.answers():
                raise EnvironmentFault(
                    f"{self.settings.label} died in a call: {reason(error)}"
                ) from error
            return {"content": [{"type": "text", "text": reason(error)}], "isError": True}

    async def _living(self) -> Connection:
        """Return an open connection, a new one if there is none that lives."""
        old = self._connection
        # The question whether the server lives may take longer than the call that asks it.
        if (
            old is not None
            and not old.ended
            and (not old.doubtful or await asyncio.shield(old.answers()))
        ):
            await old.opened()
            return old
        if old is not None and self._fresh:
            raise EnvironmentFault(
                f"{self.settings.label} died in the middle of an episode, and its state is lost"
            )
        if self._connection is old:
            self._connection = Connection(self.settings)
        connection = self._connection
        assert connection is not None
        await connection.opened()
        self._checked(connection.listing)
        return connection

    def _checked(self, listing: Listing) -> Listing:
        """Return the tools on offer, which stay the same from the first listing on."""
        if self._known is None:
            settings = self.settings
            chosen = listing if settings.include is None else settings.include
            for name in chosen:
                if name not in listing:
                    has = ", ".join(listing) or "none"
                    raise ConfigError(
                        f"mcp.include: {settings.label} has no tool {name!r}; it has {has}"
                    )
            self._known = {name: listing[name] for name in chosen}
        for name, tool in self._known.items():
            if name not in listing or listing[name]["inputSchema"] != tool["inputSchema"]:
                change = "has changed the arguments of" if name in listing else "no longer has"
                raise EnvironmentFault(
                    f"{self.settings.label} {change} the tool {name!r}; restart the run to offer "
                    "it anew"
                )
        return self._known
