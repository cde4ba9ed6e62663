"""Bombs against the sandbox's limits: memory and disk space that no folder and no process's size
shows."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.swe.sandbox import groups
from envs.swe.sandbox.sandbox import Sandbox, check_sandbox
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import process_folder
from tests.cases import some
from tests.envs.harbor.task_folders import make_image

LIMITS = Limits(
    seconds=20, memory_mb=128, processes=40, file_mb=32, tree_mb=32, tmp_mb=64, output_mb=2
)


def python(tree: Path, code: str, limits: Limits = LIMITS, **options: Any) -> Outcome:
    return Sandbox(tree, limits=limits, **options).run(["python", "-c", code])


FILL = "block = b'x' * (1 << 20)\ndef fill(fd, n):\n    for _ in range(n): os.write(fd, block)\n"
MEMORY = {
    "memory files": "held = [os.memfd_create('x') for _ in range(40)]\nfor fd in held: fill(fd, 20)\n",
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
MEMORY |= {
    "a process whose first thread has ended": """
import ctypes, threading
def hold():
    held = bytearray(b'x') * (400 << 20)
    time.sleep(10)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    "empty files": """
for folder in ('/tmp', '/dev/shm'):
    for i in range(150_000): os.close(os.open(f'{folder}/{"n" * 200}{i}', os.O_CREAT))
""",
    "datagrams over the loopback network": SOCKETS
    + CHILDREN
    + """
def work():
    for _ in range(200):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        for _ in range(100):
            receiver.sendto(block[:60000], receiver.getsockname())
        held.append(receiver)
in_children(work)
""",
}
needs_groups = pytest.mark.skipif(
    not groups.can_be_made(), reason="control groups cannot be made here"
)
needs_x86_64 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64"
)


@needs_groups
@pytest.mark.parametrize(
    "name",
    some(
        MEMORY,
        [
            name
            for name in MEMORY
            if name not in ("memory files", "datagrams over the loopback network")
        ],
    ),
)
def test_memory_that_no_process_shows_is_counted(tree: Path, name: str) -> None:
    limits = replace(LIMITS, address_mb=256 << 10)
    outcome = python(
        tree,
        "import os, time\n" + FILL + MEMORY[name] + "time.sleep(5)\nprint('held it')\n",
        limits,
    )
    assert outcome.stopped == "memory", outcome.output


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
    "a key in the session's keyring": (
        "call(248, 'user', 'note', '1', 1, -3)",
        "call(249, 'user', 'note', 0, 0)",
    ),
    "a key in the user's keyring": (
        "call(248, 'user', 'note', '1', 1, -4)",
        "call(250, 10, -4, 'user', 'note', 0)",
    ),
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
        "any(b'863' b'97' in open(f'/proc/{p}/cmdline', 'rb').read() for p in "
        "os.listdir('/proc') if p.isdigit())",
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


@needs_x86_64
@pytest.mark.parametrize("name", SURVIVORS)
def test_what_one_sandbox_leaves_another_does_not_find(tree: Path, name: str) -> None:
    plant, find = SURVIVORS[name]
    attempt = f"{CALLS}\ntry:\n    print('planted', {plant})\nexcept OSError as error:\n    print(error)\n"
    first = python(tree, attempt)
    assert first.returncode == 0, first.output
    if "key" in name:
        assert first.output == "planted False\n"
    assert python(tree, f"{CALLS}\nprint(bool({find}))").output == "False\n"


REFUSED_CALLS = {
    "io_uring_setup": "call(425, 1, 0)",
    "vmsplice": "call(278, 1, 0, 0, 0)",
    "asynchronous I/O, which the machine has for all together": "call(206, 1, ctypes.byref(ctypes.c_ulong()))",
    "memfd_secret": "call(447, 0)",
    "MPTCP": "socket.socket(2, 1, 262)",
    "SMC": "socket.socket(2, 1, 256)",
    "SCTP": "socket.socket(2, 1, 132)",
    "MPTCP with bits that the kernel ignores": "call(41, 2, 1, (1 << 40) + 262) or None",
    "huge pages": "mmap.mmap(-1, 2 << 20, flags=0x40022)",
    "huge pages in a memory file": "os.memfd_create('x', 4)",
    "the limits of another process": "resource.prlimit(1, resource.RLIMIT_NOFILE, (50, 50))",
    "keyctl": "call(250, 0, -3, 0)",
    "clone3": "call(435, 0, 0)",
    "mount": "call(165, 'x', '/tmp', 'tmpfs', 0, 0)",
    "unshare": "call(272, 0x10000000)",
    "bpf": "call(321, 0, 0, 0)",
    "x32": "call(0x40000000 + 41, 1, 1, 0)",
}


@needs_x86_64
def test_calls_that_leave_the_limits_are_refused(tree: Path) -> None:
    code = "import mmap, resource\n"
    for name, expression in REFUSED_CALLS.items():
        code += f"try:\n    done = {expression}\nexcept OSError:\n    done = False\n"
        code += f"if done: print({name!r}, 'was let through')\n"
    outcome = python(tree, CALLS + code)
    assert (outcome.output, outcome.returncode) == ("", 0)


@needs_x86_64
def test_no_program_is_loaded_into_the_kernel_and_asking_for_support_goes_on(tree: Path) -> None:
    """Filters of sockets and of system calls make kernel memory that no limit counts; each call is
    made once."""
    code = """
import errno, struct
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow))
def told(done): return errno.errorcode[ctypes.get_errno()] if done < 0 else "done"
with socket.socket() as sock:
    print(*[told(libc.setsockopt(sock.fileno(), 1, option, program, 16)) for option in (26, 50, 51, 52)])
for given in (None, program):
    print(told(libc.syscall(317, 1, 0, given)), told(libc.prctl(22, 2, given)))
"""
    assert (
        python(tree, CALLS + code).output
        == "EPERM EPERM EPERM EPERM\nEFAULT EFAULT\nEACCES EACCES\n"
    )


def test_a_verdict_refuses_what_changes_another_process(tree: Path) -> None:
    code = """
import ctypes, os
child = os.fork() or __import__("signal").pause()
print(ctypes.CDLL(None).ptrace(16, child, 0, 0))
try:
    open(f"/proc/{child}/mem", "r+b")
    print("written")
except OSError as error:
    print(error.strerror)
os.kill(child, 9)
"""
    said = [python(tree, code, is_verdict=verdict).output for verdict in (0, 1)]
    assert said == ["0\nRead-only file system\n", "-1\nRead-only file system\n"]


@needs_groups
def test_cpu_time_of_all_processes_together_is_limited(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.swe.sandbox.supervise._CORES", 0.1)
    script = "for i in {1..1000}; do timeout 0.2 sh -c 'while :; do :; done'; done"
    outcome = Sandbox(tree, limits=replace(LIMITS, seconds=8)).run(["bash", "-c", script])
    assert outcome.stopped == "time"


@needs_groups
def test_nothing_is_left_of_a_group(tree: Path) -> None:
    python(tree, "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)")
    left = [
        folder
        for parent in groups._parents().values()
        for folder in parent.glob(f"{process_folder().path.name}-*")
    ]
    assert not left


def test_a_machine_without_groups_says_which_limits_do_not_hold(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "_own_groups", lambda mounts, own: iter(()))
    monkeypatch.setattr("os.geteuid", lambda: 7)
    groups.say_once.cache_clear()
    check_sandbox.cache_clear()
    for _ in range(2):
        check_sandbox(Sandbox(tree, limits=LIMITS))
    assert [record.message for record in caplog.records] == [groups.ONE_USER, groups.NO_GROUPS]


@needs_x86_64
def test_no_namespace_can_be_made(tree: Path) -> None:
    code = """
import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x00020000):
    print(libc.syscall(56, flag | signal.SIGCHLD, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert python(tree, code).output == "-1 ENOSYS\n" * 7


@pytest.mark.parametrize("has_image", [False, True])
def test_sandboxes_side_by_side_do_not_share_their_number_of_processes(
    tmp_path: Path, has_image: bool
) -> None:
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
