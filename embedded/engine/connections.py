"""Access rules: control requests need a local client or the admin key, and idle connections are closed."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

CONTROL = frozenset(
    {"/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/flush_cache"}
)
"""Paths that affect all clients."""


def refusal(path: str, remote: str | None, authorization: str | None, admin_key: str | None) -> web.Response | None:
    """The answer that refuses a control request; None if the request is allowed.

    `remote` is the client's address; `authorization` is the header of that name.
    """
    if path not in CONTROL or is_local(remote):
        return None
    if admin_key is None:
        text = f"{path} is for local clients only; start the engine with --admin-api-key to allow others"
        return web.json_response({"error": {"message": text}}, status=403)
    if hmac.compare_digest((authorization or "").encode(), f"Bearer {admin_key}".encode()):
        return None
    text = f"{path} needs the header 'Authorization: Bearer KEY' with the engine's --admin-api-key"
    return web.json_response({"error": {"message": text}}, status=401)


def is_local(remote: str | None) -> bool:
    """Whether the client runs on this machine; a client of a Unix socket has no address."""
    if not remote:
        return True
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class IdleConnections:
    """Closes connections without a complete request for `seconds`, unless a request is in progress.

    aiohttp closes connections that are idle after a request, but waits forever for the first request and for the rest
    of a header.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.server: web.Server | None = None
        self._busy: set[Any] = set()
        self._since: dict[Any, float] = {}

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Record the connections with a request in progress."""
        transport = request.transport
        self._busy.add(transport)
        try:
            return await handler(request)
        finally:
            self._busy.discard(transport)

    async def watch(self, _: web.Application) -> AsyncIterator[None]:
        """Close idle connections for as long as the application runs."""
        task = asyncio.create_task(self._sweep())
        yield
        task.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 4)
            transports = [handler.transport for handler in self.server.connections] if self.server else []
            now = time.monotonic()
            self._since = {t: self._since.get(t, now) for t in transports if t is not None and t not in self._busy}
            for transport, since in self._since.items():
                if now - since >= self.seconds:
                    transport.close()
