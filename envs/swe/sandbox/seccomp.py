"""The system calls that a sandbox refuses: sockets of families that no test needs, and ways to hide memory.

Written as a classic BPF program, which bubblewrap installs with `--seccomp`; see the kernel's
`Documentation/userspace-api/seccomp_filter.rst`.
"""

from __future__ import annotations

import errno
import platform
import struct

FAMILIES = (1, 2, 10, 16)
"""UNIX, INET, INET6 and NETLINK: what loopback servers, event loops and name look-ups use."""

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06

_ARCHITECTURES = {
    # machine: audit architecture, socket, socketpair, shmget
    "x86_64": (0xC000003E, 41, 53, 29),
    "aarch64": (0xC00000B7, 198, 199, 194),
}
_IO_URING = (425, 426, 427)
"""It opens sockets without the call that is filtered, and keeps files that no descriptor shows."""
_MEMFD_SECRET = 447
_X32 = 0x40000000
"""Numbers from here on are calls of x86's third ABI."""


def seccomp_filter() -> bytes:
    """The filter for this machine; empty on architectures that we have no numbers for."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return b""
    architecture, socket, socketpair, shmget = known
    refused = (*_IO_URING, _MEMFD_SECRET, shmget)
    no_such_call = _answer(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _answer(_LOAD, _ARCHITECTURE_AT),
        _jump(_EQUAL, architecture, 1, 0),
        no_such_call,
        _answer(_LOAD, _NUMBER_AT),
        _jump(_AT_LEAST, _X32, 0, 1),
        no_such_call,
    ]
    for number in refused:
        program += [_jump(_EQUAL, number, 0, 1), no_such_call]
    program += [
        _jump(_EQUAL, socket, 2, 0),
        _jump(_EQUAL, socketpair, 1, 0),
        _answer(_RETURN, _ALLOW),
        _answer(_LOAD, _FIRST_ARGUMENT_AT),
    ]
    for family in FAMILIES:
        program += [_jump(_EQUAL, family, 0, 1), _answer(_RETURN, _ALLOW)]
    return b"".join([*program, _answer(_RETURN, _ERRNO | errno.EAFNOSUPPORT)])


def _answer(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
