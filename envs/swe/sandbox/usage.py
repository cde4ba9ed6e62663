"""Measures what the processes of a sandbox use: memory, sockets, and files that no folder of the tree shows.

Such files are memory files, deleted files that are still open or mapped, pipes, and /tmp.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_MAPPING = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ (?P<offset>[0-9a-f]+) (?P<dev>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d+)"
    r" +.* \(deleted\)$",
    re.MULTILINE,
)
_TMPFS = ("tmp", "dev/shm")
_PIPE_BYTES = 64 << 10
"""What a pipe holds. The kernel lets one user enlarge pipes by 64 MiB in all."""
_DATAGRAM = "0002"


def uses_more_than(limit_kb: int, pid: int, held_kb: int = 0) -> bool:
    """Whether the processes below `pid` and their sockets use more memory than that, shared pages counted once.

    `held_kb` is the memory in files, of which a part may be mapped.
    """
    pids = list(_descendants(pid))
    limit_kb -= _socket_bytes(pids[0]) >> 10 if pids else 0
    if sum(map(_resident_kb, pids)) + held_kb <= limit_kb:
        return False
    own, shared = (sum(column) for column in zip(*map(_proportional_kb, pids), strict=True)) if pids else (0, 0)
    return own + max(shared, held_kb) > limit_kb


def held_files(pid: int, tree: Path, tmp_bytes: int, file_bytes: int) -> tuple[int, int]:
    """Bytes in memory, and on the tree's disk, that the processes below `pid` hold in such files.

    `tmp_bytes` is the size of the sandbox's own tmpfs mounts.

    A descriptor that is under way in a socket counts as a file of the largest size, `file_bytes`.
    """
    tree_device = tree.stat().st_dev
    found: dict[tuple[int, int], int] = {}
    mounts: dict[int, int] = {}
    pipes: set[tuple[int, int]] = set()
    under_way = 0
    for inner in _descendants(pid):
        mounts |= dict(_mounts(inner, tmp_bytes))
        for status, waiting in _descriptors(inner):
            under_way += waiting
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
            elif stat.S_ISFIFO(status.st_mode):
                pipes.add((status.st_dev, status.st_ino))
        for device, inode, size in _mappings(inner):
            found[device, inode] = max(found.get((device, inode), 0), size)
    memory = sum(size for (device, _), size in found.items() if device != tree_device and device not in mounts)
    disk = sum(size for (device, _), size in found.items() if device == tree_device)
    memory += sum(mounts.values()) + len(pipes) * _PIPE_BYTES + under_way * file_bytes
    return memory, disk


def _descendants(pid: int) -> Iterator[int]:
    """All processes below `pid`, as far as they still live."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        if parent != pid:
            yield parent
        with contextlib.suppress(OSError):  # the process itself may end while its tasks are listed
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    waiting += map(int, path.read_text().split())


def _sizes(pid: int, name: str) -> dict[str, int]:
    """The sizes in a file of /proc, in kB; none if the process is gone or the file may not be read."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
        return {key: int(size) for key, size in re.findall(r"^(\w+):\s*(\d+) kB", text, re.MULTILINE)}
    return {}


def _resident_kb(pid: int) -> int:
    """Memory of a process with its page tables, which can be larger than what they map."""
    sizes = _sizes(pid, "status")
    return sizes.get("VmRSS", 0) + sizes.get("VmPTE", 0)


def _proportional_kb(pid: int) -> tuple[int, int]:
    """Like `_resident_kb`, with shared pages divided among those who share: private pages, pages of memory files.

    Forks share almost everything, so the plain sum would count it many times.
    """
    sizes = _sizes(pid, "smaps_rollup")
    if not sizes:
        return _resident_kb(pid), 0
    shared = sizes.get("Pss_Shmem", 0)
    return sizes.get("Pss", 0) - shared + _sizes(pid, "status").get("VmPTE", 0), shared


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
                text = Path(f"/proc/{pid}/fdinfo/{name}").read_text() if stat.S_ISSOCK(status.st_mode) else ""
                waiting = re.search(r"^scm_fds:\s*(\d+)", text, re.MULTILINE)
                yield status, int(waiting[1]) if waiting else 0


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


def _socket_bytes(pid: int) -> int:
    """Kernel memory that the sockets in the network namespace of `pid` hold at most, or nearly; 0 if it is gone.

    The kernel also lists sockets that no descriptor shows: those under way in another socket, and connections that
    nobody has accepted yet. It does not say how full a UNIX socket is, so each counts with its whole buffer (the filter
    in `seccomp.py` keeps it from being enlarged). The contents of a datagram socket may come from many senders, which
    may have ended.
    """
    buffer = _number("/proc/sys/net/core/wmem_default", 212992) * 5 // 4
    datagrams = 1 + _number("/proc/sys/net/unix/max_dgram_qlen", 10)
    total = 0
    for words in _lines(pid, "unix"):
        total += buffer * (datagrams if words[4] == _DATAGRAM else 1)
    for name in _internet_tables(pid):
        for words in _lines(pid, name):
            sent, _, received = words[4].partition(":")
            total += 2 * (int(sent, 16) + int(received, 16))
    return total + sum(int(words[4]) + int(words[5]) for words in _lines(pid, "netlink"))


def _internet_tables(pid: int) -> Iterator[str]:
    """The tables that list an internet socket of that namespace.

    Reading a table takes milliseconds, because the kernel looks through the sockets of the whole machine. Reading how
    many of them the namespace has takes almost no time.
    """
    for counts, names in (("sockstat", ("tcp", "udp")), ("sockstat6", ("tcp6", "udp6"))):
        told = dict(words[:3:2] for words in _lines(pid, counts, titles=0) if words[1:2] == ["inuse"])
        yield from (name for name in names if told.get(f"{name.upper()}:") != "0")


def _lines(pid: int, name: str, titles: int = 1) -> list[list[str]]:
    """The words of each line but the titles."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/net/{name}").read_text(errors="replace").splitlines()
        return [line.split() for line in lines[titles:]]
    return []


def _number(path: str, default: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return default


UNMEASURABLE = 1 << 62
"""Size of a tree that hides something from being measured: closed folders, or paths too long to name."""


def tree_bytes(tree: Path) -> int:
    """Disk space of the files under `tree`, links not followed; every entry counts for 512 bytes at least."""
    total, unlisted = 0, list[str]()
    for entry in walk(tree, unlisted=unlisted.append):
        try:
            total += 512 * max(entry.stat(follow_symlinks=False).st_blocks, 1)
        except FileNotFoundError:  # removed while we looked
            continue
        except OSError:
            return UNMEASURABLE
    return UNMEASURABLE if unlisted else total


def walk(
    top: Path, skipped: Collection[str] = (), unlisted: Callable[[str], object] = lambda folder: None
) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder, however deep; links are not followed.

    Args:
        skipped: names of folders to leave out.
        unlisted: is told of each folder that cannot be listed: closed to us, or with a path that is too long.
    """
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry
                    elif entry.name not in skipped:
                        waiting.append(entry.path)
                        yield entry
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            continue
        except OSError:
            unlisted(folder)
