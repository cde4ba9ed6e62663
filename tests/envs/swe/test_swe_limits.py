"""Bombs against the sandbox's limits: memory and disk space that no folder and no process's size shows."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.seccomp import REFUSED, REFUSED_INSIDE
from envs.swe.sandbox.supervise import Limits, Outcome
from tests.envs.harbor.task_folders import make_image

LIMITS = Limits(seconds=20, memory_mb=128, processes=40, file_mb=32, tree_mb=32, tmp_mb=64, output_mb=2)


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
CHILDREN = """
def in_children(work):
    for _ in range(20):
        if os.fork() == 0:
            work()
            time.sleep(15)
            os._exit(0)
        time.sleep(0.02)
"""
SOCKETS = """
import errno, socket
held = []
def stuff(sock):
    sock.setblocking(False)
    try:
        while True: sock.send(block)
    except OSError:
        pass
"""
MEMORY |= {
    "UNIX sockets": SOCKETS
    + CHILDREN
    + """
def work():
    for _ in range(400):
        left, right = socket.socketpair()
        stuff(left), stuff(right)
        held.append((left, right))
in_children(work)
""",
    "UNIX sockets with enlarged buffers, whose senders are closed": SOCKETS
    + """
for _ in range(900):
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    stuff(left)
    left.close()
    held.append(right)
""",
    "connections to a UNIX socket that nobody accepts": SOCKETS
    + """
server = socket.socket(socket.AF_UNIX)
server.bind("\\0server")
server.listen(4000)
for _ in range(2000):
    client = socket.socket(socket.AF_UNIX)
    client.connect("\\0server")
    stuff(client)
    client.close()
""",
    "datagrams of senders that are closed": SOCKETS
    + """
block = block[:200 << 10]
for i in range(300):
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(f"\\0receiver{i}")
    held.append(receiver)
    for _ in range(11):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(f"\\0receiver{i}")
            sender.setblocking(False)
            try: sender.send(block)
            except OSError: pass
""",
    "loopback connections": SOCKETS
    + """
server = socket.create_server(("127.0.0.1", 0), backlog=500)
for _ in range(300):
    client = socket.create_connection(server.getsockname())
    stuff(client)
    held.append((client, server.accept()))
""",
    "pipes": CHILDREN
    + """
def work():
    for _ in range(500):
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.write(write, block)
in_children(work)
time.sleep(10)
""",
    "page tables": """
import mmap
for _ in range(8):
    if os.fork() == 0:
        held = mmap.mmap(-1, 120 << 30, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)
        for place in range(0, len(held), 2 << 20): held[place]
        time.sleep(5)
        os._exit(0)
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
    limits = replace(LIMITS, address_mb=256 << 10)
    outcome = python(tree, "import os, time\n" + FILL + MEMORY[name] + "time.sleep(5)\nprint('held it')\n", limits)
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


def test_some_sockets_and_pipes_are_no_harm(tree: Path) -> None:
    code = """
import asyncio, multiprocessing, os, socket
pairs = [socket.socketpair() for _ in range(50)] + [os.pipe() for _ in range(50)]
async def main():
    async def echo(reader, writer):
        writer.write(await reader.read(100))
        writer.close()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    for _ in range(100):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello")
        assert await reader.read() == b"hello"
asyncio.run(main())
with multiprocessing.Pool(2) as pool:
    print(sum(pool.map(abs, range(100))))
"""
    outcome = python(tree, code)
    assert (outcome.output, outcome.stopped) == ("4950\n", "")


CALLS = """
import ctypes, os, socket, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *(a.encode() if isinstance(a, str) else a for a in arguments)) >= 0
def bind(name):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind(name)
def connect(name):
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        return True
    except OSError:
        return False
held = []
"""
SURVIVORS = {
    "a key in the session's keyring": ("call(248, 'user', 'note', '1', 1, -3)", "call(249, 'user', 'note', 0, 0)"),
    "a key in the user's keyring": ("call(248, 'user', 'note', '1', 1, -4)", "call(250, 10, -4, 'user', 'note', 0)"),
    "a joined keyring": ("call(250, 1, 'note')", "'note' in open('/proc/keys').read()"),
    "a System V message queue": ("call(68, 7, 0o1666)", "call(68, 7, 0)"),
    "a System V semaphore": ("call(64, 7, 1, 0o1666)", "call(64, 7, 1, 0)"),
    "System V shared memory": ("call(29, 7, 4096, 0o1666)", "call(29, 7, 4096, 0)"),
    "a POSIX message queue": ("call(240, 'note', 0o102, 0o666, 0)", "call(240, 'note', 2, 0, 0)"),
    "POSIX shared memory": ("open('/dev/shm/note', 'w')", "os.path.exists('/dev/shm/note')"),
    "a file in /tmp": ("open('/tmp/note', 'w')", "os.path.exists('/tmp/note')"),
    "an abstract socket": ("bind('\\0note')", "connect('\\0note')"),
    "a process": (
        "subprocess.Popen(['sleep', '86397'], start_new_session=True)",
        "any(b'863' b'97' in open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc') if p.isdigit())",
    ),
    "a control group": ("os.mkdir('/sys/fs/cgroup/note')", "os.path.exists('/sys/fs/cgroup/note')"),
    "the name of the machine": ("socket.sethostname('note')", "socket.gethostname() == 'note'"),
    "a setting of the kernel": (
        "open('/proc/sys/net/ipv4/ip_default_ttl', 'w').write('77')",
        "open('/proc/sys/net/ipv4/ip_default_ttl').read() == '77\\n'",
    ),
    "a time stamp of the machine's files": (
        "os.utime('/usr/bin/env', (7, 7)) or open('/usr/bin/env', 'rb').read()",
        "os.stat('/usr/bin/env').st_atime in (7, os.stat('/proc').st_mtime)",
    ),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
@pytest.mark.parametrize("name", SURVIVORS)
def test_what_one_sandbox_leaves_another_does_not_find(tree: Path, name: str) -> None:
    plant, find = SURVIVORS[name]
    attempt = f"{CALLS}\ntry:\n    print('planted', {plant})\nexcept OSError as error:\n    print(error)\n"
    first = python(tree, attempt)
    assert first.returncode == 0, first.output
    if "key" in name:
        assert first.output == "planted False\n"
    assert python(tree, f"{CALLS}\nprint(bool({find}))").output == "False\n"


def test_calls_that_hide_memory_or_sockets_are_refused(tree: Path) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls below are those of x86_64")
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in NUMBERS:
    print(number, libc.syscall(number, 0, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    tables = [calls for table in (REFUSED, REFUSED_INSIDE) for calls in table.values()]
    numbers = [number for calls in tables for number, _ in calls.values()] + [0x40000000 + 41, 435]
    outcome = python(tree, f"NUMBERS = {numbers}\n{code}")
    assert outcome.output == "".join(f"{number} -1 ENOSYS\n" for number in numbers)


def test_no_namespace_can_be_made(tree: Path) -> None:
    code = """
import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000):
    print(libc.syscall(56, flag | signal.SIGCHLD, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of system calls are those of x86_64")
    assert python(tree, code).output == "-1 EPERM\n" * 7


@pytest.mark.parametrize("has_image", [False, True])
def test_sandboxes_side_by_side_do_not_share_their_number_of_processes(tmp_path: Path, has_image: bool) -> None:
    image = make_image(tmp_path / "image", "bash", "sleep") if has_image else None
    limits = replace(LIMITS, processes=20)

    def start(number: int) -> Outcome:
        tree = tmp_path / str(number)
        (tree / "testbed").mkdir(parents=True)
        command = "for i in {1..8}; do sleep 2 & done; wait"
        return Sandbox(tree, limits=limits, root=image).run(["bash", "-c", command])

    with ThreadPoolExecutor(4) as at_once:
        outcomes = list(at_once.map(start, range(4)))
    assert [(found.returncode, found.output) for found in outcomes] == [(0, "")] * 4
