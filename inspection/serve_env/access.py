"""Who may use the server of `slime-verlog serve-env`: programs may, pages in a browser only if they are named.

A browser names the page in `Origin` and the server's name, as the page knows it, in `Host`. A page that reaches this
machine through its own host name (DNS rebinding) is recognised by the latter.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from websockets.datastructures import Headers

IDLE_S = 3600.0


@dataclass(frozen=True)
class Access:
    """What is accepted, and how long a session may be silent."""

    hosts: tuple[str, ...] = ()
    """Names of this server besides its addresses, `localhost` and the machine's name."""
    origins: tuple[str, ...] = ()
    """Pages that may use it, as `https://example.org`."""
    idle_s: float = IDLE_S

    def refusal(self, headers: Headers) -> str | None:
        """Why a request is refused; None if it is not."""
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
