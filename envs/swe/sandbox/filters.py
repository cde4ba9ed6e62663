"""Seccomp filters of the sandbox's innermost layer, made by libseccomp.

Two filters hold together: Docker's default profile (`docker_seccomp.json`, from Docker 20.10,
Apache License 2.0), and our own refusals of what that profile lets through. Most refused calls fail
with ENOSYS, so that libraries fall back.
"""

import contextlib
import errno
import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.errors import MissingDependencyError

_REFUSED = (
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "vmsplice",
    "memfd_secret",
    "io_setup",
)
"""Calls that hold memory past the limits; rings also open files and sockets past the filters. The
machine has one small number of `io_setup` requests for everybody."""
_REFUSED_IN_VERDICTS = (
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "kcmp",
    "truncate",
)
"""Calls by which a tested program could change the process that judges it, or a reward without
opening its file."""
_FAMILIES = (1, 2, 10, 16)
"""UNIX, INET, INET6 and NETLINK: used by loopback servers, event loops and name look-ups."""
_LAST_FAMILY = 46
_PROTOCOLS = (33, 132, 256, 262)
"""DCCP, SCTP, SMC and MPTCP, whose buffers the kernel does not count."""
_WORD = 0xFFFFFFFF
"""The kernel reads 32 bits of most arguments, and a comparison without this mask reads 64."""
_HUGE_PAGES = {"mmap": (3, 0x40000), "memfd_create": (1, 0x4), "shmget": (2, 0o4000)}
"""Calls with the argument and the flag that ask for huge pages, which are counted elsewhere."""
_SOCKET_LEVEL = 1
_SOCKET_FILTERS = (26, 50, 51, 52)
"""`setsockopt` options that attach a BPF program to a socket. The kernel counts its memory
nowhere."""
_FILTER_LOADERS = {"seccomp": ((0, 1),), "prctl": ((0, 22), (1, 2))}
"""Calls that load a further seccomp filter, not counted either, with the places and values of their
arguments."""


@functools.lru_cache(maxsize=2)
def filters(in_verdict: bool) -> tuple[bytes, bytes]:
    """Return Docker's filter and ours as BPF programs, in the order of loading: ours refuses to
    load more.

    Raises MissingDependencyError without pyseccomp or libseccomp.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"these tasks need pyseccomp and libseccomp ({error}); install them with: pip install "
            "pyseccomp, apt-get install -y libseccomp2"
        ) from error
    return _docker_filter(pyseccomp), _own_filter(pyseccomp, in_verdict)


_PRETENDED = (
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "setuid",
    "setgid",
    "setreuid",
    "setregid",
    "setgroups",
)
_PRETENDED += ("setresuid", "setresgid", "setfsuid", "setfsgid")


@functools.lru_cache(maxsize=1)
def build_filter() -> bytes:
    """Return the filter of an image build: changes of owners and users succeed without effect."""
    import pyseccomp

    made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in _PRETENDED:
        made.add_rule(pyseccomp.ERRNO(0), name)
    return _program(pyseccomp, made)


def _own_filter(seccomp: Any, in_verdict: bool) -> bytes:
    made = seccomp.SyscallFilter(seccomp.ALLOW)
    no_call = seccomp.ERRNO(errno.ENOSYS)
    for name in (*_REFUSED, *(_REFUSED_IN_VERDICTS if in_verdict else ())):
        made.add_rule(no_call, name)
    no_family = seccomp.ERRNO(errno.EAFNOSUPPORT)
    for name in ("socket", "socketpair"):
        for family in set(range(_LAST_FAMILY)).difference(_FAMILIES):
            made.add_rule(no_family, name, seccomp.Arg(0, seccomp.MASKED_EQ, _WORD, family))
        made.add_rule(no_family, name, seccomp.Arg(0, seccomp.GE, _LAST_FAMILY))
    for protocol in _PROTOCOLS:
        refused = seccomp.Arg(2, seccomp.MASKED_EQ, _WORD, protocol)
        made.add_rule(seccomp.ERRNO(errno.EPROTONOSUPPORT), "socket", refused)
    for name, (place, flag) in _HUGE_PAGES.items():
        made.add_rule(
            seccomp.ERRNO(errno.ENOMEM), name, seccomp.Arg(place, seccomp.MASKED_EQ, flag, flag)
        )
    level = seccomp.Arg(1, seccomp.MASKED_EQ, _WORD, _SOCKET_LEVEL)
    for option in _SOCKET_FILTERS:
        attaches = seccomp.Arg(2, seccomp.MASKED_EQ, _WORD, option)
        made.add_rule(seccomp.ERRNO(errno.EPERM), "setsockopt", level, attaches)
    # Without a program, a call only asks whether the kernel knows filters.
    program = seccomp.Arg(2, seccomp.NE, 0)
    for name, operation in _FILTER_LOADERS.items():
        loads = [seccomp.Arg(place, seccomp.MASKED_EQ, _WORD, value) for place, value in operation]
        made.add_rule(seccomp.ERRNO(errno.EACCES), name, *loads, program)
    # A process may read the limits of another one, and set only its own, which is number 0.
    other = seccomp.Arg(0, seccomp.NE, 0)
    sets = seccomp.Arg(2, seccomp.NE, 0)
    made.add_rule(seccomp.ERRNO(errno.EPERM), "prlimit64", other, sets)
    return _program(seccomp, made)


def _docker_filter(seccomp: Any) -> bytes:
    profile = json.loads(
        Path(__file__).with_name("docker_seccomp.json").read_text(encoding="utf-8")
    )
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    made = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    for rule in profile["syscalls"]:
        if rule["action"] != "SCMP_ACT_ALLOW" or not _applies(rule, machine):
            continue
        conditions = [_condition(seccomp, each) for each in rule["args"] or ()]
        for name in rule["names"]:
            # The profile names calls of all machines and versions; one that does not exist here
            # stays refused.
            with contextlib.suppress(OSError):
                made.add_rule(seccomp.ALLOW, name, *conditions)
    return _program(seccomp, made)


def _applies(rule: Mapping[str, Any], machine: str) -> bool:
    """Whether a rule of Docker's profile holds for a process without capabilities on this
    machine."""
    wanted = rule["includes"]
    unwanted = rule["excludes"]
    if wanted.get("caps") or machine in unwanted.get("arches", ()):
        return False
    return machine in wanted.get("arches", (machine,))


def _condition(seccomp: Any, given: Mapping[str, Any]) -> Any:
    if given["op"] == "SCMP_CMP_MASKED_EQ":
        return seccomp.Arg(
            given["index"], seccomp.MASKED_EQ, given["value"], given.get("valueTwo", 0)
        )
    return seccomp.Arg(given["index"], seccomp.EQ, given["value"])


def _program(seccomp: Any, made: Any) -> bytes:
    made.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.ERRNO(errno.ENOSYS))
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
