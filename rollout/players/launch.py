"""Starts players: guarded processes of this machine, or Ray actors if this process belongs to a Ray cluster."""

import asyncio
import hmac
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollout.errors import PlayerError
from rollout.players.process import PlayerActor
from rollout.players.wire import Link
from rollout.workers.hosts import end_guarded, start_guarded

START_S = 600.0
"""Seconds in which Ray must have started an actor."""
HELLO_S = 10.0
"""Seconds in which whoever connects must have shown the token."""


@dataclass(frozen=True)
class Launched:
    """A process that was started, and the connection to it."""

    connection: socket.socket
    end: Callable[[], None]
    """Ends the process, and the connection with it."""
    died: Awaitable[Any] | None = None
    """Ends or raises when a process on another node is gone, which the connection need not show."""

    async def connect(self, link: Link) -> None:
        """Put the connection behind `link`."""
        await asyncio.get_running_loop().create_connection(lambda: link, sock=self.connection)
        if self.died is not None:
            # Reads the exception, which asyncio would otherwise log as never retrieved.
            gone = lambda task: (task.cancelled() or task.exception(), link.abort())
            asyncio.ensure_future(self.died).add_done_callback(gone)


async def launch(number: int) -> Launched:
    """Start player `number`; raises PlayerError if Ray does not."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return await _launch_actor(ray, number)
    guard, connection = await asyncio.to_thread(start_guarded, "rollout.players.process")
    return Launched(connection, lambda: end_guarded(guard))


async def _launch_actor(ray: Any, number: int) -> Launched:
    token = secrets.token_bytes(32)
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as listener:
        listener.setblocking(False)
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(**options)(PlayerActor).remote()
        playing = asyncio.ensure_future(actor.play.remote(listener.getsockname()[:2], token))
        accepting = asyncio.create_task(_accept(listener, token))
        await asyncio.wait({playing, accepting}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            return Launched(accepting.result(), lambda: ray.kill(actor), playing)
        accepting.cancel()
        why = f"Ray reports: {playing.exception()}" if playing.done() else f"no node had a free CPU for {START_S:g} s"
        playing.cancel()
        ray.kill(actor)
    raise PlayerError(
        f"rollout process {number} could not be started as a Ray actor, which needs one CPU: {why}; `ray status` "
        "shows what is free, or lower rollout_processes"
    )


async def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Wait for a connection that shows the token; nothing that another one sends is read."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        shown = b""
        try:
            async with asyncio.timeout(HELLO_S):
                while len(shown) < len(token) and (more := await loop.sock_recv(connection, len(token) - len(shown))):
                    shown += more
        except (TimeoutError, OSError):
            shown = b""
        if hmac.compare_digest(shown, token):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()
