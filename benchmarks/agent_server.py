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
import json
import multiprocessing
import re
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

from envs.agent.request import Response
from envs.agent.server import ModelServer, model_server
from envs.agent.session import Session

MIB = 1 << 20
LIMIT = 4 * MIB
"""The default of `env.request_mb`: just below it, nothing refuses a body before it is read."""
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"


class Hostile:
    """The attacker: raw sockets, which stay open until it is killed."""

    def __init__(self, port: int, key: str) -> None:
        self._port, self.key = port, key
        self._open: list[socket.socket] = []

    def connect(self, data: bytes = b"") -> socket.socket | None:
        """Send `data` on a new connection; None if the server closed it."""
        link = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        self._open.append(link)
        with contextlib.suppress(OSError):
            link.sendall(data)
            return link
        return None

    def head(self, length: int, *more: str, path: str = CHAT, key: str | None = None) -> bytes:
        fields = ["Host: x", f"Authorization: Bearer {key or self.key}", f"Content-Length: {length}", *more]
        return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode()

    def post(self, body: bytes, *more: str, path: str = CHAT) -> bytes:
        return self.head(len(body), *more, path=path) + body

    def unfinished(self, length: int, key: str | None = None) -> bytes:
        """Build a request without its last byte."""
        return self.head(length, key=key) + b"x" * (length - 1)

    def ask_forever(self, data: bytes, reads: bool = True) -> None:
        """Send this again and again, each time on a new connection; read each reply, or leave at once."""
        while True:
            if (link := self.connect(data)) is not None:
                with contextlib.suppress(OSError):
                    link.recv(1 << 16) if reads else None
                link.close()
            self._open.clear()

    def pipeline(self, data: bytes) -> None:
        """Send this again and again on one connection, without waiting for replies."""
        link = self.connect()
        while link is not None:
            link.sendall(data)


def said(content: bytes, extra: bytes = b"0") -> bytes:
    """Build the body of a request with this JSON as its content, and something else beside it."""
    return b'{"model":"policy","extra":' + extra + b',"messages":[{"role":"user","content":' + content + b"}]}"


def png(width: int, height: int) -> bytes:
    """Return an image of one colour as a part of a message."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "png")
    url = b"data:image/png;base64," + base64.b64encode(file.getvalue())
    return b'{"type":"image_url","image_url":{"url":"' + url + b'"}}'


def zeros() -> bytes:
    """Deflate a gigabyte of zeros to one megabyte."""
    deflated = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(deflated.compress(bytes(MIB)) for _ in range(1024)) + deflated.flush()


def get(hostile: Hostile, *more: str, request: str = "GET /v1/models") -> bytes:
    return "\r\n".join([f"{request} HTTP/1.1", "Host: x", f"x-api-key: {hostile.key}", *more, "", ""]).encode()


VALUES = said(b'"hi"', b"[" + b'{"a":0},' * (LIMIT // 70) + b"0]")
EMPTY_LISTS = said(b'"hi"', b"[" + b"[]," * (LIMIT // 3 - 99) + b"0]")
LONG_NUMBERS = said(b'"hi"', b"[" + (b"1" * 4000 + b",") * (LIMIT // 4100) + b"0]")
WIDE_TEXT = b'{"type":"text","text":"\xf0\x9f\x98\x80' + b"a" * (LIMIT // 2 - 200) + b'"}'
LINE, CHUNKS = b"x" * 1900, "Transfer-Encoding: chunked"
ONCE: dict[str, tuple[int, Callable[[Hostile], bytes]]] = {
    "nothing": (0, lambda h: b""),
    "unfinished": (40, lambda h: h.unfinished(32 * MIB)),
    "unfinished_small": (40, lambda h: h.unfinished(LIMIT)),
    "large": (4, lambda h: h.post(said(b'"hi"', b"[" + b"[]," * (9 * MIB) + b"0]"))),
    "images": (1, lambda h: h.post(said(b"[" + b",".join([png(4096, 4096)] * 24) + b"]"))),
    "idle": (3000, lambda h: b""),
    "idle_with_key": (3000, get),
    "slow_headers": (1000, lambda h: b"POST / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, LINE) for i in range(100))),
    "compressed": (40, lambda h: h.post(zeros(), "Content-Encoding: gzip")),
    "crumbs": (40, lambda h: get(h, CHUNKS, request="POST /v1/messages") + b"1\r\nx\r\n" * MIB),
    "unknown": (100, lambda h: h.unfinished(32 * MIB, key="wrong")),
}
"""Attacks that send the same on so many connections, and leave them open."""
FOREVER: dict[str, Callable[[Hostile], None]] = {
    "empty_lists": lambda h: h.ask_forever(h.post(EMPTY_LISTS, path=COUNT)),
    "many_values": lambda h: h.ask_forever(h.post(VALUES, path=COUNT)),
    "long_numbers": lambda h: h.ask_forever(h.post(LONG_NUMBERS, path=COUNT)),
    # One emoji makes every character take four bytes; sent in two parts, which are joined.
    "wide_text": lambda h: h.ask_forever(h.post(said(b"[" + WIDE_TEXT + b"," + WIDE_TEXT + b"]"))),
    "images_within_limits": lambda h: h.ask_forever(h.post(said(b"[" + png(3840, 2160) + b"]"))),
    "connects": lambda h: h.ask_forever(b"", reads=False),
    "leaves": lambda h: h.ask_forever(h.post(VALUES), reads=False),
    "pipelined": lambda h: h.pipeline(h.post(said(b'"' + b"x" * 60000 + b'"'))),
}
"""Attacks that go on until they are ended; `leaves` closes before its requests are read, `pipelined` never reads."""


def honest(port: int, key: str, seconds: float) -> float:
    """Return the longest wait for a response, each on a new connection."""
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
    """Play the model of an episode: answer every request at once."""
    with contextlib.suppress(Exception):  # the episode is over
        waiting = server.call(session.next(600.0))
        while waiting is not None:
            waiting = server.call(session.exchange(Response("well"), 600.0))


def memory_mb(key: str) -> float:
    return int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def measured(name: str, seconds: float) -> dict[str, float]:
    """Measure an honest agent beside one attack, each in its own process."""
    server, processes = model_server(), multiprocessing.get_context("spawn")
    sessions = [Session(("policy",)) for _ in range(2)]
    keys = [server.open(session) for session in sessions]
    threading.Thread(target=answer_all, args=(server, sessions[0]), daemon=True).start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from now on
    before = memory_mb("VmRSS")
    ready = processes.Event()
    hostile = processes.Process(target=attack, args=(name, server.port, keys[1], ready), daemon=True)
    hostile.start()
    ready.wait()
    with processes.Pool(1) as pool:
        waited = pool.apply(honest, (server.port, keys[0], seconds))
        found = {"longest_wait_s": waited, "memory_mb": memory_mb("VmHWM") - before}
        found["open_files"] = float(len(list(Path("/proc/self/fd").iterdir())))
    hostile.kill()
    for key in keys:
        server.close(key)
    return {name: round(value, 2) for name, value in found.items()}


def attack(name: str, port: int, key: str, ready: Event) -> None:
    """Attack until this process is killed."""
    ready.set()
    hostile = Hostile(port, key)
    if name in FOREVER:
        FOREVER[name](hostile)
    else:
        number, data = ONCE[name]
        sent = data(hostile)
        for _ in range(number):
            hostile.connect(sent)
    time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", default=[*ONCE, *FOREVER])
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    most = min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for name in options.attacks:
        print(json.dumps({"attack": name, **measured(name, options.seconds)}), flush=True)


if __name__ == "__main__":
    main()
