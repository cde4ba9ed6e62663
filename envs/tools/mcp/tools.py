"""The tools of MCP servers as `ToolSpec`s: schemas come from the server, results become text and pictures."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

from envs.errors import ConfigError
from envs.tools.base import Tool, ToolEpisode, ToolSpec
from envs.tools.mcp.server import McpServer
from envs.tools.results import ToolResult
from envs.tools.schema import ArgumentCheck, check_schema
from envs.tools.settings import McpSettings

START_GRACE_S = 10.0
_lock = threading.Lock()
_servers: dict[tuple[str, float | None], McpServer] = {}
_specs: dict[tuple[str, float | None], tuple[ToolSpec, ...]] = {}
"""The servers of this process and the tools that they offer, by their settings."""


def mcp_tools(settings: McpSettings, key: str, timeout_s: float | None = None) -> tuple[ToolSpec, ...]:
    """Load the tools that a server offers; they stay the same as long as this process runs.

    A server that all episodes share is asked each time whether it still has them.

    Args:
        key: the entry's position in the YAML, for error messages.
        timeout_s: seconds that one call may take.

    Raises:
        ConfigError: the command, `include` or `exclude` names something that does not exist.
        EnvironmentFault: the server cannot be started or reached, or its tools have changed.
        ToolError: the server gives a tool a name or a schema that models cannot use.
        MissingDependencyError: the package mcp or jsonschema is not installed.
    """
    place, shared = (settings.model_dump_json(), timeout_s), settings.scope == "worker"
    with _lock:
        server = _servers.setdefault(place, McpServer(settings))
    if shared or place not in _specs:
        try:
            listing = server.offered()
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from error
        if place not in _specs:
            _specs[place] = tuple(_spec(server, tool, listing, timeout_s) for tool in listing.values())
        if not shared:
            server.close()
    return _specs[place]


def _spec(server: McpServer, tool: Mapping[str, Any], listing: Mapping[str, Any], timeout_s: float | None) -> ToolSpec:
    settings, name = server.settings, tool["name"]
    described = {
        "name": settings.prefix + name,
        "description": (tool.get("description") or "").strip() or tool.get("title") or name,
        "parameters": tool["inputSchema"],
    }
    schema = check_schema(described, settings.label)
    own = settings.scope == "episode"
    return ToolSpec(
        described["name"],
        schema,
        ArgumentCheck(schema),
        EpisodeTool if own else functools.partial(_call, server, name),
        {"settings": settings, "known": listing, "tool": name} if own else {},
        timeout_s,
        create_timeout_s=2 * settings.start_timeout_s + START_GRACE_S,
        deterministic=settings.deterministic,
        source=settings.label,
    )


class EpisodeTool(Tool):
    """A tool of a server that belongs to one episode; the episode's tools find it in `ToolEpisode.shared`."""

    _server: McpServer | None = None

    def create(self, episode: ToolEpisode) -> None:
        settings: McpSettings = self.config["settings"]
        place = f"mcp {settings.model_dump_json()}"
        self._server = episode.shared.get(place)
        if self._server is None:
            self._server = episode.shared[place] = McpServer(settings, self.config["known"], fresh=True)
            self._server.offered()

    async def execute(self, /, *args: Any, **kwargs: Any) -> ToolResult:
        assert self._server is not None
        return await _call(self._server, self.config["tool"], **kwargs)

    def release(self) -> None:
        if self._server is not None:
            self._server.close()


async def _call(server: McpServer, name: str, /, **arguments: Any) -> ToolResult:
    """Call a tool; the metric `restarts` counts how often that restarted the server."""
    before = server.restarts
    result = await server.call(name, arguments)
    restarts = server.restarts - before
    texts, images = parts_of(result)
    text = "\n".join(texts)
    failed = bool(result.get("isError"))
    return ToolResult(
        f"error: {text}" if failed else text, images, metrics={"restarts": restarts} if restarts else {}, failed=failed
    )


def parts_of(result: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """A result's texts, and its pictures as data URIs; keys may be in the protocol's form or in Python's."""
    texts, images = [], []
    for part in result["content"]:
        match part["type"]:
            case "text":
                texts.append(part["text"])
            case "image":
                media = part.get("mimeType") or part["mime_type"]
                images.append(f"data:{media};base64,{part['data']}")
            case "resource" if "text" in part["resource"]:
                texts.append(part["resource"]["text"])
            case "resource_link":
                texts.append(f"[resource {part['uri']}]")
            case kind:
                texts.append(f"[{kind} left out]")
    structured = result.get("structuredContent", result.get("structured_content"))
    if not result["content"] and structured is not None:
        texts.append(json.dumps(structured, ensure_ascii=False))
    return texts, tuple(images)
