"""Measures what one hostile agent costs the others: `python -m benchmarks.agent_server [ATTACK...]`.

An honest agent asks the server for agents ten times per second, each time on a new connection, while a hostile one
attacks. Both are processes with raw sockets. Printed per attack: the longest wait of the honest agent, and how much the
server's memory grew at its peak.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import itertools
import json
import re
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.agent.request import Answer
from envs.agent.server import ModelServer, model_server
from envs.agent.session import Session

MIB = 1 << 20
LIMIT = 4 * MIB
"""The default of `env.request_mb`: just below it, nothing refuses a body before it is read."""
ATTACKS: dict[str, Callable[[Hostile], None]] = {}


class Hostile:
    """The attacker: raw sockets, which stay open until it is killed."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self.key = port, key
        self._open: list[socket.socket] = []

    def connect(self, data: bytes = b"") -> socket.socket | None:
        """A new connection with `data` sent; None if the server closed it."""
        link = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        self._open.append(link)
        with contextlib.suppress(OSError):
            link.sendall(data)
            return link
        return None

    def head(self, length: int, path: str = "/v1/chat/completions", *more: str, key: str | None = None) -> bytes:
        fields = ["Host: x", f"Authorization: Bearer {key or self.key}", f"Content-Length: {length}", *more]
        return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode()

    def post(self, body: bytes, path: str = "/v1/chat/completions", *more: str) -> socket.socket | None:
        return self.connect(self.head(len(body), path, *more) + body)

    def ask(self, *rounds: bytes, path: str = "/v1/messages/count_tokens") -> None:
        """Send these bodies in turn, forever, and read each reply."""
        for body in itertools.cycle(rounds):
            link = self.post(body, path)
            if link is not None:
                with contextlib.suppress(OSError):
                    link.recv(1 << 16)
                link.close()
            self._open.clear()


def attack(function: Callable[[Hostile], None]) -> Callable[[Hostile], None]:
    ATTACKS[function.__name__] = function
    return function


def said(content: bytes, extra: bytes = b"0") -> bytes:
    """The body of a request with this JSON as its content, and something else beside it."""
    return b'{"model":"policy","extra":' + extra + b',"messages":[{"role":"user","content":' + content + b"}]}"


@attack
def nothing(hostile: Hostile) -> None:
    """For comparison."""


@attack
def unfinished(hostile: Hostile) -> None:
    """Bodies of 32 MB without their last byte."""
    for _ in range(40):
        hostile.connect(hostile.head(32 * MIB) + b"x" * (32 * MIB - 1))


@attack
def unfinished_small(hostile: Hostile) -> None:
    """Bodies within the limit, without their last byte."""
    for _ in range(40):
        hostile.connect(hostile.head(LIMIT) + b"x" * (LIMIT - 1))


@attack
def large(hostile: Hostile) -> None:
    """Four requests of 27 MB, of which most are empty lists."""
    body = said(b'"hi"', b"[" + b"[]," * (9 * MIB) + b"0]")
    for _ in range(4):
        hostile.post(body)


@attack
def empty_lists(hostile: Hostile) -> None:
    hostile.ask(said(b'"hi"', b"[" + b"[]," * (LIMIT // 3 - 99) + b"0]"))


@attack
def many_values(hostile: Hostile) -> None:
    hostile.ask(said(b'"hi"', b"[" + b'{"a":0},' * (LIMIT // 70) + b"0]"))


@attack
def wide_text(hostile: Hostile) -> None:
    """One emoji makes every character take four bytes; sent in two parts, which are joined."""
    part = b'{"type":"text","text":"\xf0\x9f\x98\x80' + b"a" * (LIMIT // 2 - 200) + b'"}'
    hostile.ask(said(b"[" + part + b"," + part + b"]"), path="/v1/chat/completions")


@attack
def long_numbers(hostile: Hostile) -> None:
    hostile.ask(said(b'"hi"', b"[" + (b"1" * 4000 + b",") * (LIMIT // 4100) + b"0]"))


def png(width: int, height: int) -> bytes:
    """A picture of one colour as a part of a message."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    url = b"data:image/png;base64," + base64.b64encode(file.getvalue())
    return b'{"type":"image_url","image_url":{"url":"' + url + b'"}}'


@attack
def pictures(hostile: Hostile) -> None:
    """24 pictures of 16 million pixels in 1.5 MB."""
    hostile.post(said(b"[" + b",".join([png(4096, 4096)] * 24) + b"]"))


@attack
def pictures_within_limits(hostile: Hostile) -> None:
    """As many pixels as one request may have, again and again."""
    hostile.ask(said(b"[" + png(3840, 2160) + b"]"), path="/v1/chat/completions")


@attack
def idle(hostile: Hostile) -> None:
    """3,000 connections that say nothing."""
    for _ in range(3000):
        hostile.connect()


@attack
def idle_with_key(hostile: Hostile) -> None:
    """3,000 connections that asked once."""
    for _ in range(3000):
        hostile.connect(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {hostile.key}\r\n\r\n".encode())


@attack
def slow_headers(hostile: Hostile) -> None:
    """Headers that never end."""
    for _ in range(1000):
        hostile.connect(b"POST / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"x" * 1900) for i in range(100)))


@attack
def connects(hostile: Hostile) -> None:
    """Connections that close at once, as fast as possible."""
    while True:
        if (link := hostile.connect()) is not None:
            link.close()
        hostile._open.clear()


@attack
def leaves(hostile: Hostile) -> None:
    """Whole requests whose client has gone before they are read."""
    body = said(b'"hi"', b"[" + b'{"a":0},' * (LIMIT // 70) + b"0]")
    while True:
        if (link := hostile.post(body)) is not None:
            link.close()
        hostile._open.clear()


@attack
def pipelined(hostile: Hostile) -> None:
    """Requests that follow each other without waiting for replies."""
    body = said(b'"' + b"x" * 60000 + b'"')
    one = hostile.head(len(body)) + body
    link = hostile.connect()
    while link is not None:
        link.sendall(one)


@attack
def compressed(hostile: Hostile) -> None:
    """A gigabyte of zeros in one megabyte."""
    deflated = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = b"".join(deflated.compress(bytes(MIB)) for _ in range(1024)) + deflated.flush()
    for _ in range(40):
        hostile.post(body, "/v1/chat/completions", "Content-Encoding: gzip")


@attack
def crumbs(hostile: Hostile) -> None:
    """Bodies in chunks of one byte."""
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {hostile.key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(40):
        hostile.connect(head.encode() + b"1\r\nx\r\n" * MIB)


@attack
def unknown(hostile: Hostile) -> None:
    """Bodies without the key of an episode."""
    for _ in range(100):
        hostile.connect(hostile.head(32 * MIB, key="wrong") + b"x" * (32 * MIB - 1))


def honest(port: int, key: str, seconds: float) -> float:
    """The longest wait for an answer, each on a new connection."""
    body, worst, end = said(b'"well?"'), 0.0, time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        with socket.create_connection(("127.0.0.1", port), timeout=120) as link:
            link.sendall(Hostile(port, key).head(len(body)) + body)
            reply = link.recv(1 << 16)
            assert reply.startswith(b"HTTP/1.1 200"), reply
        worst = max(worst, time.monotonic() - began)
        time.sleep(0.1)
    return worst


def answer_all(server: ModelServer, session: Session) -> None:
    """The model's side of an episode: every request is answered at once."""
    with contextlib.suppress(Exception):  # the episode is over
        waiting = server.call(session.next(600.0))
        while waiting is not None:
            waiting = server.call(session.exchange(Answer("well"), 600.0))


def memory_mb(key: str) -> float:
    return int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def measured(name: str, seconds: float) -> dict[str, float]:
    """One attack beside an honest agent."""
    server = model_server()
    sessions = [Session(("policy",)) for _ in range(2)]
    keys = [server.open(session) for session in sessions]
    threading.Thread(target=answer_all, args=(server, sessions[0]), daemon=True).start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from now on
    before = memory_mb("VmRSS")
    with ended(name, str(server.port), keys[1]):
        command = [sys.executable, "-m", "benchmarks.agent_server", "--honest", str(server.port), keys[0]]
        waited = subprocess.run([*command, f"{seconds}"], stdout=subprocess.PIPE, check=True)
        found = {"longest_wait_s": float(waited.stdout), "memory_mb": memory_mb("VmHWM") - before}
        found["open_files"] = float(len(list(Path("/proc/self/fd").iterdir())))
    for key in keys:
        server.close(key)
    return {name: round(value, 2) for name, value in found.items()}


@contextlib.contextmanager
def ended(*words: str) -> Iterator[None]:
    """Run an attack meanwhile."""
    command = [sys.executable, "-m", "benchmarks.agent_server", "--hostile", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it has been imported
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--hostile", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--honest", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    most = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.hostile:
        name, port, key = options.hostile
        print("ready", flush=True)
        hostile = Hostile(int(port), key)
        ATTACKS[name](hostile)
        time.sleep(600)
    elif options.honest:
        port, key, seconds = options.honest
        print(honest(int(port), key, float(seconds)))
    else:
        for name in options.attacks:
            found = measured(name, options.seconds)
            print(json.dumps({"attack": name, **found}), flush=True)


if __name__ == "__main__":
    main()
