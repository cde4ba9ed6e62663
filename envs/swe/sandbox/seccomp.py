"""The system calls that a sandbox refuses, and why. bubblewrap installs the filter with `--seccomp`.

The list covers what the default profiles of Docker and Flatpak refuse, and what outlives a sandbox or hides memory in
it. Still allowed, unlike there: `ptrace` and `process_vm_*`, which debuggers need and which reach the sandbox's own
processes only; and
`personality`, which `setarch` needs. See the kernel's `Documentation/userspace-api/seccomp_filter.rst`.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from collections.abc import Mapping

FAMILIES = (1, 2, 10, 16)
"""UNIX, INET, INET6 and NETLINK: what loopback servers, event loops and name look-ups use."""

REFUSED: Mapping[str, Mapping[str, tuple[int | None, int | None]]] = {
    "keys outlive the sandbox: keyrings belong to the user and the trainer's session, not to a namespace": {
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
    },
    "System V IPC holds memory that no process and no descriptor shows": {
        "shmget": (29, 194),
        "msgget": (68, 186),
        "semget": (64, 190),
    },
    "memfd_secret and io_uring hide memory and files from the limits; io_uring also opens sockets past this filter": {
        "memfd_secret": (447, 447),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
    },
    "the page cache is shared with the whole machine, and cachestat shows which files another sandbox has read": {
        "cachestat": (451, 451),
    },
    "large parts of the kernel that programs in a sandbox do not need, with a history of faults": {
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "fanotify_init": (300, 262),
        "kcmp": (312, 272),
        "lookup_dcookie": (212, 18),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "syslog": (103, 116),
        "vhangup": (153, 58),
        "uselib": (134, None),
        "ustat": (136, None),
        "sysfs": (139, None),
        "_sysctl": (156, None),
        "modify_ldt": (154, None),
        "nfsservctl": (180, 42),
    },
    "placing memory on chosen nodes concerns the whole machine": {
        "move_pages": (279, 239),
        "migrate_pages": (256, 238),
        "mbind": (237, 235),
        "get_mempolicy": (239, 236),
        "set_mempolicy": (238, 237),
        "set_mempolicy_home_node": (450, 450),
    },
    "they open files by number, past the mounts": {
        "open_by_handle_at": (304, 265),
        "name_to_handle_at": (303, 264),
    },
    "root's alone; refused in case that a kernel fault gives the rights": {
        "acct": (163, 89),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "clock_settime": (227, 112),
        "settimeofday": (164, 170),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "create_module": (174, None),
        "get_kernel_syms": (177, None),
        "query_module": (178, None),
        "ioperm": (173, None),
        "iopl": (172, None),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "reboot": (169, 142),
        "swapon": (167, 224),
        "swapoff": (168, 225),
    },
}
"""Reason: calls: their numbers on x86_64 and aarch64."""

REFUSED_INSIDE: Mapping[str, Mapping[str, tuple[int | None, int | None]]] = {
    "namespaces and mounts; bubblewrap needs them to build the sandbox, and nothing in it does": {
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "setns": (308, 268),
        "unshare": (272, 97),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
    },
}
"""As `REFUSED`, once the sandbox is built."""

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_ARCHITECTURES = {
    # machine: column of the tables above, audit architecture, socket, socketpair, setsockopt, clone
    "x86_64": (0, 0xC000003E, 41, 53, 54, 56),
    "aarch64": (1, 0xC00000B7, 198, 199, 208, 220),
}
_X32 = 0x40000000
"""Numbers from here on are calls of x86's third ABI."""
_SOL_SOCKET, _SO_SNDBUF = 1, 7
_CLONE3, _NEW_NAMESPACES = 435, 0x7E020000


@functools.lru_cache(maxsize=2)
def seccomp_filter(inside: bool) -> bytes:
    """The filter for this machine; empty on architectures that we have no numbers for.

    Args:
        inside: for the command itself. Otherwise for the layer around it, which still builds the sandbox.
    """
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return b""
    column, architecture, socket, socketpair, setsockopt, clone = known
    tables = (REFUSED, REFUSED_INSIDE) if inside else (REFUSED,)
    numbers = [row[column] for table in tables for calls in table.values() for row in calls.values()]
    no_such_call = _answer(_RETURN, _ERRNO | errno.ENOSYS)
    program = [
        _answer(_LOAD, _ARCHITECTURE_AT),
        _jump(_EQUAL, architecture, 1, 0),
        no_such_call,
        _answer(_LOAD, _NUMBER_AT),
        _jump(_AT_LEAST, _X32, 0, 1),
        no_such_call,
    ]
    for number in numbers:
        if number is not None:
            program += [_jump(_EQUAL, number, 0, 1), no_such_call]
    family = [_jump(_EQUAL, number, len(FAMILIES) - place, 0) for place, number in enumerate(FAMILIES)]
    family = [_answer(_LOAD, _ARGUMENTS_AT), *family, _answer(_RETURN, _ERRNO | errno.EAFNOSUPPORT)]
    program += [*_case(socket, family), *_case(socketpair, family)]
    # A send buffer keeps its default size, which `sockets.py` counts: the call has no effect and no error.
    buffer = [_answer(_LOAD, _ARGUMENTS_AT + 8), _jump(_EQUAL, _SOL_SOCKET, 0, 3)]
    buffer += [_answer(_LOAD, _ARGUMENTS_AT + 16), _jump(_EQUAL, _SO_SNDBUF, 0, 1), _answer(_RETURN, _ERRNO)]
    program += _case(setsockopt, buffer)
    if inside:
        program += [_jump(_EQUAL, _CLONE3, 0, 1), no_such_call]  # its flags cannot be read; libc then uses clone
        flags = [_answer(_LOAD, _ARGUMENTS_AT), _jump(_ANY_BIT, _NEW_NAMESPACES, 0, 1)]
        program += _case(clone, [*flags, _answer(_RETURN, _ERRNO | errno.EPERM)])
    return b"".join([*program, _answer(_RETURN, _ALLOW)])


def _case(number: int, block: list[bytes]) -> list[bytes]:
    """Run `block` for one call; what it does not refuse is allowed."""
    return [_jump(_EQUAL, number, 0, len(block) + 1), *block, _answer(_RETURN, _ALLOW)]


def _answer(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
