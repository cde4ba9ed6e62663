"""Control groups (cgroups) of one sandboxed command: the kernel's limits on memory, processes and
CPU time.

A group is made below the group of this process, so limits of an outer container still hold. Version
1 counts memory, processes and CPU time in separate hierarchies; version 2 has one. A version 2
hierarchy without controllers still has `cgroup.kill`.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
_CONTROLLERS = ("memory", "pids", "cpuacct")
_LEAF = "slime-verlog"
"""Group of the processes that were in a version 2 group before it was delegated."""
_END_S = 10.0
NO_GROUPS = (
    "control groups cannot be made here, so a sandbox has no limit on the memory, sockets and CPU "
    "time of all its processes together, only on each process, on /tmp and on seconds; start the "
    "trainer as root with writable /sys/fs/cgroup to limit them"
)
ONE_USER = (
    "the trainer is not root, so all sandboxes run as its user and share what the kernel grants "
    "to one user: buffers of pipes, inotify instances, descriptors sent through sockets; one "
    "sandbox can use them up for the others; start the trainer as root to give each sandbox a user"
)


@dataclass(frozen=True)
class Group:
    """The groups of one command, one per hierarchy, by controller; `unified` is that of version
    2."""

    folders: Mapping[str, Path]

    def take(self, process: int) -> None:
        """Move a process, which has no children yet, into the groups."""
        for folder in self._all():
            (folder / "cgroup.procs").write_text(str(process))

    def broken(self, memory_bytes: float, cpu_seconds: float) -> str:
        """The limit that was broken: `memory`, `time`, or none."""
        if self._killed() or self._memory() > memory_bytes:
            return "memory"
        return "time" if self._cpu_seconds() > cpu_seconds else ""

    def kill(self) -> None:
        """End all processes; does nothing where the kernel has no `cgroup.kill`."""
        if unified := self.folders.get("unified"):
            with contextlib.suppress(OSError):
                (unified / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove the groups, in which nothing runs any more; the kernel may need a moment."""
        deadline = time.monotonic() + _END_S
        for folder in self._all():
            while not _is_removed(folder) and time.monotonic() < deadline:
                time.sleep(0.005)

    def _all(self) -> Sequence[Path]:
        return list(dict.fromkeys(self.folders.values()))

    def _killed(self) -> bool:
        """Whether the kernel ended a process for want of memory."""
        name = "memory.events" if self._is_unified("memory") else "memory.oom_control"
        return _counts(self.folders["memory"] / name).get("oom_kill", 0) > 0

    def _memory(self) -> int:
        folder = self.folders["memory"]
        if self._is_unified("memory"):
            return _number(folder / "memory.current")
        # The kernel counts TCP apart from the rest, and its limit slows it down without holding it.
        return _number(folder / "memory.usage_in_bytes") + _number(
            folder / "memory.kmem.tcp.usage_in_bytes"
        )

    def _cpu_seconds(self) -> float:
        folder = self.folders["cpuacct"]
        if self._is_unified("cpuacct"):
            return _counts(folder / "cpu.stat").get("usage_usec", 0) / 1e6
        return _number(folder / "cpuacct.usage") / 1e9

    def _is_unified(self, controller: str) -> bool:
        return self.folders[controller] == self.folders.get("unified")


def make_group(name: str, memory_bytes: int, processes: int) -> Group | None:
    """Make the groups of a command, with its limits; None, and one warning per process, where they
    cannot be made."""
    parents = _parents()
    if not parents:
        return None
    folders = {controller: parent / name for controller, parent in parents.items()}
    group = Group(folders)
    try:
        for folder in group._all():
            folder.mkdir()
        _limit(group, memory_bytes, processes)
    except OSError:
        group.remove()
        return say_once(NO_GROUPS)
    return group


def can_be_made() -> bool:
    """Whether this machine lets us make control groups."""
    return bool(_parents())


def _limit(group: Group, memory_bytes: int, processes: int) -> None:
    memory = group.folders["memory"]
    (group.folders["pids"] / "pids.max").write_text(str(processes))
    if group._is_unified("memory"):
        (memory / "memory.max").write_text(str(memory_bytes))
        _write_if_there(memory / "memory.swap.max", "0")
        _write_if_there(memory / "memory.oom.group", "1")
        return
    (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
    _write_if_there(memory / "memory.memsw.limit_in_bytes", str(memory_bytes))
    _write_if_there(memory / "memory.kmem.tcp.limit_in_bytes", str(memory_bytes))


@functools.cache
def say_once(text: str) -> None:
    """Warn once per process about limits that do not hold on this machine."""
    logger.warning(text)


def _parents() -> dict[str, Path]:
    """The groups below which ours are made, by controller; empty if a controller is missing or
    nothing may be made."""
    own = dict(
        _own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    )
    unified = own.get("unified")
    if unified is not None and not any(name in own for name in _CONTROLLERS):
        parent = _delegate(unified)
        return dict.fromkeys((*_CONTROLLERS, "unified"), parent) if parent is not None else {}
    found = {name: own[name] for name in (*_CONTROLLERS, "unified") if name in own}
    if not all(name in found and os.access(found[name], os.W_OK) for name in _CONTROLLERS):
        say_once(NO_GROUPS)
        return {}
    if unified is not None and not os.access(unified, os.W_OK):
        del found["unified"]
    return found


def _delegate(unified: Path) -> Path | None:
    """Hand memory and processes of a version 2 group to the groups below it; None, and a warning,
    if that is refused.

    A group that does so must hold no process itself, so its processes move to a leaf first.
    """
    parent = unified.parent if unified.name == _LEAF else unified
    try:
        if not {"memory", "pids"} <= {*(parent / "cgroup.subtree_control").read_text().split()}:
            (parent / _LEAF).mkdir(exist_ok=True)
            for process in (parent / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (parent / _LEAF / "cgroup.procs").write_text(process)
            (parent / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return say_once(NO_GROUPS)
    return parent


def remove_left(name: str) -> None:
    """Remove groups whose names begin so: those of a process that was killed."""
    for parent in set(_parents().values()):
        for folder in parent.glob(f"{name}-*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _own_groups(mounts: str, own: str) -> Iterator[tuple[str, Path]]:
    """Folders of the groups that this process is in, by controller, from the kernel's tables."""
    paths = dict(line.split(":", 2)[1:] for line in own.splitlines())
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind not in ("cgroup", "cgroup2"):
            continue
        for controllers, path in paths.items():
            is_here = not controllers if kind == "cgroup2" else bool(controllers)
            names = ["unified"] if kind == "cgroup2" else controllers.split(",")
            if (
                is_here
                and set(names) <= {"unified", *options.split(",")}
                and Path(path).is_relative_to(root)
            ):
                folder = Path(place) / Path(path).relative_to(root)
                yield from ((name, folder) for name in names)


def _is_removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _write_if_there(file: Path, text: str) -> None:
    if file.exists():
        file.write_text(text)


def _number(file: Path) -> int:
    try:
        return int(file.read_bytes())
    except FileNotFoundError:  # not counted by this kernel
        return 0


def _counts(file: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}
