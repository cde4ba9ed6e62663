"""Measures files outside the tree: memory files, deleted files that are still open or mapped, pipes, and /tmp.

They use memory or disk space, too. The kernel lists them among the descriptors, mappings and mounts of the sandbox's
processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ (?P<offset>[0-9a-f]+) (?P<dev>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d+)"
    r" +.* \(deleted\)$",
    re.MULTILINE,
)
_TMPFS = ("tmp", "dev/shm")
_PIPE_BYTES = 64 << 10
"""What a pipe holds. The kernel lets one user enlarge pipes by 64 MiB in all."""


@dataclass(frozen=True)
class HeldFiles:
    """Bytes in memory and on the tree's disk."""

    memory: int = 0
    disk: int = 0


def held_files(pids: Iterable[int], tree: Path, tmp_bytes: int, file_bytes: int) -> HeldFiles:
    """What the processes hold. `tmp_bytes` is the size of the sandbox's own tmpfs mounts.

    A descriptor that is under way in a socket counts as a file of the largest size, `file_bytes`.
    """
    tree_device = tree.stat().st_dev
    found: dict[tuple[int, int], int] = {}
    mounts: dict[int, int] = {}
    pipes: set[tuple[int, int]] = set()
    under_way = 0
    for pid in pids:
        mounts |= dict(_mounts(pid, tmp_bytes))
        for status, sockets_hold in _descriptors(pid):
            under_way += sockets_hold
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
            elif stat.S_ISFIFO(status.st_mode):
                pipes.add((status.st_dev, status.st_ino))
        for device, inode, size in _mappings(pid):
            found[device, inode] = max(found.get((device, inode), 0), size)
    memory = sum(size for (device, _), size in found.items() if device != tree_device and device not in mounts)
    disk = sum(size for (device, _), size in found.items() if device == tree_device)
    memory += sum(mounts.values()) + len(pipes) * _PIPE_BYTES + under_way * file_bytes
    return HeldFiles(memory, disk)


def _mounts(pid: int, size: int) -> Iterator[tuple[int, int]]:
    """Device and used bytes of the sandbox's tmpfs mounts; another size means that it is not ours."""
    for name in _TMPFS:
        with contextlib.suppress(OSError):
            place = f"/proc/{pid}/root/{name}"
            room = os.statvfs(place)
            if room.f_blocks * room.f_frsize == size:
                yield os.stat(place).st_dev, (room.f_blocks - room.f_bfree) * room.f_frsize


def _descriptors(pid: int) -> Iterator[tuple[os.stat_result, int]]:
    """The file behind each descriptor, and how many descriptors wait inside it if it is a socket."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                yield status, _waiting(pid, name) if stat.S_ISSOCK(status.st_mode) else 0


def _waiting(pid: int, name: str) -> int:
    found = re.search(r"^scm_fds:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{name}").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _mappings(pid: int) -> Iterator[tuple[int, int, int]]:
    """Device, inode and size of each deleted file that is mapped."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return
    for line in _MAPPING.finditer(text):
        try:
            status = os.stat(f"/proc/{pid}/map_files/{line['start']}-{line['end']}")
            yield status.st_dev, status.st_ino, status.st_blocks * 512
        except OSError:
            # Only root may look at the file; the mapping says how large it is at least.
            major, minor = (int(part, 16) for part in line["dev"].split(":"))
            length = int(line["end"], 16) - int(line["start"], 16)
            yield os.makedev(major, minor), int(line["inode"]), int(line["offset"], 16) + length
