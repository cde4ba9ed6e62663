"""Bombs against the sandbox's limits: memory and disk space that no folder and no process's size shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.swe.sandbox.folders import remove_tree
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import hand_over
from tests.envs.tiny_repository import needs_sandbox

LIMITS = Limits(seconds=20, memory_mb=128, processes=40, file_mb=32, tree_mb=32, tmp_mb=64, output_mb=2)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    needs_sandbox()
    tree = tmp_path / "tree"
    tree.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    hand_over(tree)
    yield tree
    remove_tree(tree)


def python(tree: Path, code: str, limits: Limits = LIMITS) -> Outcome:
    return Sandbox(tree, limits=limits).run(["python", "-c", code])


FILL = "block = b'x' * (1 << 20)\ndef fill(fd, n):\n    for _ in range(n): os.write(fd, block)\n"
MEMORY = {
    "memory files": "held = [os.memfd_create('x') for _ in range(40)]\nfor fd in held: fill(fd, 20)\n",
    "memory files that are mapped and closed": """
import mmap
held = []
for _ in range(40):
    fd = os.memfd_create('x')
    fill(fd, 20)
    held.append(mmap.mmap(fd, 2 << 20))
    os.close(fd)
""",
    "memory files under way in a socket": """
import socket
left, right = socket.socketpair()
for _ in range(40):
    fd = os.memfd_create('x')
    fill(fd, 20)
    socket.send_fds(left, [b'x'], [fd])
    os.close(fd)
    time.sleep(0.05)
""",
    "shared memory that children filled": """
import mmap
for _ in range(4):
    if os.fork() == 0:
        held = [mmap.mmap(-1, 20 << 20) for _ in range(3)]
        for shared in held:
            if os.fork() == 0:
                for _ in range(20): shared.write(block)
                os._exit(0)
            os.wait()
        time.sleep(5)
        os._exit(0)
""",
    "files in /tmp and /dev/shm": """
for folder in ('/tmp', '/dev/shm'):
    for i in range(3):
        fd = os.open(f'{folder}/{i}', os.O_CREAT | os.O_WRONLY)
        fill(fd, 20)
held = bytearray(b'x') * (40 << 20)
""",
}
DISK = {
    "deleted files that are open": """
held = []
for i in range(40):
    fd = os.open(f'f{i}', os.O_CREAT | os.O_WRONLY)
    os.unlink(f'f{i}')
    fill(fd, 20)
    held.append(fd)
""",
    "deleted files that are mapped": """
import mmap
held = []
for i in range(40):
    fd = os.open(f'f{i}', os.O_CREAT | os.O_RDWR)
    os.unlink(f'f{i}')
    fill(fd, 20)
    held.append(mmap.mmap(fd, 1 << 20))
    os.close(fd)
""",
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_no_process_shows_is_counted(tree: Path, name: str) -> None:
    outcome = python(tree, "import os, time\n" + FILL + MEMORY[name] + "time.sleep(5)\nprint('held it')\n")
    assert outcome.stopped == "memory", outcome.output


@pytest.mark.parametrize("name", DISK)
def test_disk_space_that_no_folder_shows_is_counted(tree: Path, name: str) -> None:
    outcome = python(tree, "import os, time\n" + FILL + DISK[name] + "time.sleep(5)\nprint('held it')\n")
    assert outcome.stopped == "disk", outcome.output


def test_files_within_the_limits_are_not_counted_twice(tree: Path) -> None:
    code = """
import mmap
fd = os.memfd_create('x')
fill(fd, 30)
held = mmap.mmap(fd, 30 << 20)
held[::4096]
other = mmap.mmap(-1, 40 << 20)
for _ in range(40): other.write(block)
for _ in range(3):
    if os.fork() == 0:
        held[::4096], other[::4096]
        time.sleep(1)
        os._exit(0)
time.sleep(1.2)
print('fine')
"""
    outcome = python(tree, "import os, time\n" + FILL + code)
    assert (outcome.output, outcome.stopped) == ("fine\n", "")


def test_sockets_of_families_that_tests_do_not_use_are_refused(tree: Path) -> None:
    code = """
import errno, socket
def family(number, kind=socket.SOCK_STREAM):
    try:
        socket.socket(number, kind).close()
        return 'open'
    except OSError as error:
        return errno.errorcode[error.errno]
print(family(socket.AF_INET), family(socket.AF_INET6), family(socket.AF_UNIX))
print({family(n, kind) for n in range(3, 46) if n not in (10, 16) for kind in (1, 2, 3, 5)})
left, right = socket.socketpair()
import asyncio
asyncio.run(asyncio.sleep(0))
"""
    opened, refused = python(tree, code).output.splitlines()
    assert opened == "open open open" and refused == "{'EAFNOSUPPORT'}"


def test_calls_that_hide_memory_or_sockets_are_refused(tree: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls below are those of x86_64")
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number, arguments in ((425, (8, 0)), (447, (0,)), (29, (0, 4096, 0o1600)), (0x40000000 + 41, (2, 1, 0))):
    print(libc.syscall(number, *arguments), errno.errorcode[ctypes.get_errno()])
"""
    assert python(tree, code).output == "-1 ENOSYS\n" * 4
