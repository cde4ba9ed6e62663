"""The filter that refuses the system calls of `seccomp.yaml`. bubblewrap installs it with `--seccomp`.

The list covers what the default profiles of Docker and Flatpak refuse, and what outlives a sandbox or hides memory in
it. Still allowed, unlike there: `ptrace` and `process_vm_*`, which debuggers need and which reach the sandbox's own
processes only; and `personality`, which `setarch` needs. See the kernel's
`Documentation/userspace-api/seccomp_filter.rst`.
"""

import errno
import functools
import platform
import struct
from pathlib import Path

from slime_verlog import read_yaml_mapping

FAMILIES = (1, 2, 10, 16)
"""UNIX, INET, INET6 and NETLINK: what loopback servers, event loops and name look-ups use."""

_tables = read_yaml_mapping(str(Path(__file__).with_suffix(".yaml")), "system calls")
REFUSED, REFUSED_INSIDE, PRETENDED = _tables["always"], _tables["inside"], _tables["pretended"]

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_ARCHITECTURES = {
    # machine: column of the tables above, audit architecture, socket, socketpair, setsockopt, clone, prlimit64
    "x86_64": (0, 0xC000003E, 41, 53, 54, 56, 302),
    "aarch64": (1, 0xC00000B7, 198, 199, 208, 220, 261),
}
_X32 = 0x40000000
"""Numbers from here on are calls of x86's third ABI."""
_SOL_SOCKET, _SO_SNDBUF = 1, 7
_CLONE3, _NEW_NAMESPACES = 435, 0x7E020000


@functools.lru_cache(maxsize=3)
def seccomp_filter(inside: bool, pretend: bool = False) -> bytes:
    """The filter for this machine; empty on architectures that we have no numbers for.

    Args:
        inside: for the command itself. Otherwise for the layer around it, which still builds the sandbox.
        pretend: let changes of owners and users succeed without effect, for package managers in a sandbox that has one
            user.
    """
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return b""
    column, architecture, socket, socketpair, setsockopt, clone, prlimit = known
    tables = (REFUSED, REFUSED_INSIDE) if inside else (REFUSED,)
    numbers = [row[column] for table in tables for calls in table.values() for row in calls.values()]
    no_such_call = _statement(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _statement(_LOAD, _ARCHITECTURE_AT),
        _jump(_EQUAL, architecture, 1, 0),
        no_such_call,
        _statement(_LOAD, _NUMBER_AT),
        _jump(_AT_LEAST, _X32, 0, 1),
        no_such_call,
    ]
    for number in numbers:
        if number is not None:
            program += [_jump(_EQUAL, number, 0, 1), no_such_call]
    for row in [row for calls in PRETENDED.values() for row in calls.values()] if pretend else ():
        if row[column] is not None:
            program += [_jump(_EQUAL, row[column], 0, 1), _statement(_RETURN, _ERRNO)]
    family = [_jump(_EQUAL, number, len(FAMILIES) - place, 0) for place, number in enumerate(FAMILIES)]
    family = [_statement(_LOAD, _ARGUMENTS_AT), *family, _statement(_RETURN, _ERRNO | errno.EAFNOSUPPORT)]
    program += [*_case(socket, family), *_case(socketpair, family)]
    # A send buffer keeps its default size, which `usage.py` counts: the call has no effect and no error.
    buffer = [_statement(_LOAD, _ARGUMENTS_AT + 8), _jump(_EQUAL, _SOL_SOCKET, 0, 3)]
    buffer += [_statement(_LOAD, _ARGUMENTS_AT + 16), _jump(_EQUAL, _SO_SNDBUF, 0, 1), _statement(_RETURN, _ERRNO)]
    program += _case(setsockopt, buffer)
    # Limits of another process could stop the programs that judge. A process sets its own limits as number 0, and a
    # call without new limits only reads.
    others = [_statement(_LOAD, _ARGUMENTS_AT), _jump(_EQUAL, 0, 5, 0)]
    others += [_statement(_LOAD, _ARGUMENTS_AT + 16), _jump(_EQUAL, 0, 0, 2)]
    others += [_statement(_LOAD, _ARGUMENTS_AT + 20), _jump(_EQUAL, 0, 1, 0), _statement(_RETURN, _ERRNO | errno.EPERM)]
    program += _case(prlimit, others)
    if inside:
        program += [_jump(_EQUAL, _CLONE3, 0, 1), no_such_call]  # its flags cannot be read; libc then uses clone
        flags = [_statement(_LOAD, _ARGUMENTS_AT), _jump(_ANY_BIT, _NEW_NAMESPACES, 0, 1)]
        program += _case(clone, [*flags, _statement(_RETURN, _ERRNO | errno.EPERM)])
    return b"".join([*program, _statement(_RETURN, _ALLOW)])


def _case(number: int, block: list[bytes]) -> list[bytes]:
    """Run `block` for one call; what it does not refuse is allowed."""
    return [_jump(_EQUAL, number, 0, len(block) + 1), *block, _statement(_RETURN, _ALLOW)]


def _statement(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
