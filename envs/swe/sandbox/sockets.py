"""Estimates the kernel memory in a sandbox's sockets, from what the kernel lists of its network namespace.

The list also has sockets that no descriptor shows: those under way in another socket, and connections that nobody has
accepted yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_DATAGRAM = "0002"


def socket_bytes(pid: int) -> int:
    """Memory that the sockets in the namespace of `pid` hold at most, or nearly; 0 if it is gone.

    The kernel does not say how full a UNIX socket is, so each counts with its whole buffer (the filter in `seccomp.py`
    keeps it from being enlarged). The contents of a datagram socket may come from many senders, which may have ended.
    """
    buffer = _number("/proc/sys/net/core/wmem_default", 212992) * 5 // 4
    datagrams = 1 + _number("/proc/sys/net/unix/max_dgram_qlen", 10)
    total = 0
    for words in _lines(pid, "unix"):
        total += buffer * (datagrams if words[4] == _DATAGRAM else 1)
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for words in _lines(pid, name):
            sent, _, received = words[4].partition(":")
            total += 2 * (int(sent, 16) + int(received, 16))
    return total + sum(int(words[4]) + int(words[5]) for words in _lines(pid, "netlink"))


def _lines(pid: int, name: str) -> Iterator[list[str]]:
    """The words of each line but the first."""
    with contextlib.suppress(OSError, IndexError):
        yield from (
            line.split() for line in Path(f"/proc/{pid}/net/{name}").read_text(errors="replace").splitlines()[1:]
        )


def _number(path: str, default: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return default
