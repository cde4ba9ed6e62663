"""Who may use `slime-verlog serve-env`: programs may, pages in a browser may not, and silent sessions end."""

import asyncio
import functools
import http.client
import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import pytest

pytest.importorskip("websockets", reason="serve-env needs pip install 'slime-verlog[openenv]'")

from websockets.exceptions import ConnectionClosed

from inspection.serve_env.server import Access
from tests.fixtures.browser import Browser, chromium
from tests.fixtures.env_server import Client, serving

ROOT = Path(__file__).parents[2]
DRIVE = """new Promise((done) => {
  const link = new WebSocket("ws://HOST/ws");
  link.onopen = () => link.send('{"type": "reset", "data": {"seed": 1}}');
  link.onmessage = (event) => done("drove it: " + event.data);
  link.onerror = () => done("refused");
})"""
READ = 'fetch("http://HOST/schema").then((reply) => reply.text()).then((text) => "read it: " + text, () => "refused")'


@contextmanager
def served(folder: Path, *words: str) -> Iterator[int]:
    """The port of the command, started as a person types it."""
    path = folder / "served.yaml"
    path.write_text("rollout_interaction_env_path: tests.fixtures.counting_env\ntasks: [count]\nenv_workers: 1\n")
    command = [sys.executable, "-m", "inspection", "serve-env", str(path), "--port", "0", *words]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ}, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield int(server.stdout.readline().partition(" to at most")[0].rpartition(":")[2])
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


@contextmanager
def page(folder: Path) -> Iterator[int]:
    """The port of another web server, with an empty page."""
    (folder / "index.html").write_text("<title>elsewhere</title>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def opened(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", url=url)
    browser.wait("document.title === 'elsewhere'")


@pytest.mark.parametrize("name", ["127.0.0.1", "rebound.localhost"])
def test_a_page_in_a_browser_can_neither_drive_nor_read_the_server(name: str, tmp_path: Path) -> None:
    """With the second name, the page reaches the server under a name of the page's own."""
    with chromium() as browser, served(tmp_path) as port, page(tmp_path) as other:
        opened(browser, f"http://{name}:{other}/")
        for script in (DRIVE, READ):
            assert browser.evaluate(script.replace("HOST", f"{name}:{port}")) == "refused"


def test_a_page_that_is_allowed_drives_the_server_under_its_own_name_only(tmp_path: Path) -> None:
    with chromium() as browser, page(tmp_path) as other:
        origin = f"http://rebound.localhost:{other}"
        with served(tmp_path, "--allow-origin", origin) as port:
            opened(browser, origin)
            assert browser.evaluate(DRIVE.replace("HOST", f"rebound.localhost:{port}")) == "refused"
            assert browser.evaluate(DRIVE.replace("HOST", f"127.0.0.1:{port}")).startswith('drove it: {"type"')


def status(url: str, path: str, *headers: tuple[str, str]) -> tuple[int, str]:
    address = urlparse(url)
    link = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    link.putrequest("GET", path, skip_host=True)
    for name, value in headers:
        link.putheader(name, value)
    link.endheaders()
    reply = link.getresponse()
    return reply.status, reply.read().decode()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("Host", "127.0.0.1:8000")], 200),
        ([("Host", "[::1]:8000")], 200),
        ([("Host", "LOCALHOST")], 200),
        ([("Host", "envs.cluster:8000")], 200),
        ([("Host", "127.0.0.1"), ("Origin", "https://ours.example")], 200),
        ([("Host", "evil.example")], 403),
        ([("Host", "127.0.0.1.evil.example")], 403),
        ([("Host", "127.0.0.1@evil.example")], 403),
        ([("Host", "2130706433")], 403),
        ([("Host", "[::1")], 403),
        ([("Host", "")], 403),
        ([], 403),
        ([("Host", "127.0.0.1"), ("Host", "evil.example")], 403),
        ([("Host", "127.0.0.1"), ("Origin", "null")], 403),
        ([("Host", "127.0.0.1"), ("Origin", "https://ours.example.evil.example")], 403),
        ([("Host", "127.0.0.1"), ("Origin", "https://ours.example"), ("Origin", "https://evil.example")], 403),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/ws"])
async def test_only_requests_to_the_server_itself_and_from_pages_that_are_named_are_answered(
    path: str, headers: list[tuple[str, str]], expected: int, tmp_path: Path
) -> None:
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    upgrade += [("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA==")]
    access = Access(("envs.cluster",), ("https://ours.example",))
    async with serving(tmp_path, access=access) as url:
        more = upgrade if path == "/ws" else []
        found, why = await asyncio.to_thread(status, url, path, *headers, *more)
    assert found == (101 if (path, expected) == ("/ws", 200) else expected)
    assert expected == 200 or ("--allow-" in why and why.count("\n") == 1)


async def test_a_session_that_is_silent_ends_and_its_place_becomes_free(tmp_path: Path) -> None:
    async with serving(tmp_path, capacity=1, access=Access(idle_s=0.2)) as url:
        async with Client(url) as silent:
            kind, data = await silent.receive()
            assert (kind, data["code"]) == ("error", "SESSION_ERROR")
            assert data["message"] == "no request for 0.2 s, so the session ends (--idle-timeout)"
            with pytest.raises(ConnectionClosed):
                await silent.receive()
        async with Client(url) as client:
            await client.reset(seed=1)
