"""What one agent may cost its server: requests, pictures and connections beyond the limits are refused or closed."""

import asyncio
import base64
import http.client
import io
import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from envs.agent import server, session
from envs.agent.request import Response, with_images
from envs.agent.server import ModelServer
from envs.agent.session import Session
from tests.envs.agent.test_agent import until

MIB = 1 << 20


class Agent:
    """A session with a budget of 1 MiB, and the sockets of its program."""

    def __init__(self) -> None:
        self.server = ModelServer()
        self.session = Session(("policy",), MIB)
        self.key = self.server.open(self.session)
        self._links: list[socket.socket] = []

    def connect(self, data: bytes = b"") -> socket.socket:
        self._links.append(socket.create_connection(("127.0.0.1", self.server.port), timeout=60))
        self._links[-1].sendall(data)
        return self._links[-1]

    def head(self, length: int, *more: str, path: str = "/v1/chat/completions", key: str | None = None) -> bytes:
        fields = ["Host: x", f"Authorization: Bearer {key or self.key}", f"Content-Length: {length}", *more]
        return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode()

    def post(self, body: bytes, *more: str) -> socket.socket:
        return self.connect(self.head(len(body), *more) + body)

    def next(self) -> Any:
        """The session's next request."""
        return self.server.call(self.session.next(60.0))

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.server.close(self.key)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def reply(link: socket.socket) -> tuple[int, str]:
    """Status and message of a refusal."""
    response = http.client.HTTPResponse(link)
    response.begin()
    return response.status, json.loads(response.read())["error"]["message"]


def closed(link: socket.socket) -> bool:
    """Whether the server closed the connection without a reply."""
    try:
        return bool(select.select([link], [], [], 0)[0]) and link.recv(1) == b""
    except ConnectionResetError:
        return True


def request(content: Any = "well?", **more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": content}], **more}).encode()


def picture(width: int, height: int, kind: str = "png") -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind)
    url = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_bodies_that_never_end_share_one_budget_and_give_it_back(agent: Agent) -> None:
    part = MIB // 4
    links = [agent.connect(agent.head(part) + b"x" * (part - 1)) for _ in range(4)]
    until(lambda: agent.session.unread == 4 * (part - 1))
    status, why = reply(agent.connect(agent.head(part)))
    assert status == 429 and why == "the unanswered requests of this program have more than 1 MiB (env.request_mb)"
    for link in links:
        link.close()
    until(lambda: agent.session.unread == 0)
    agent.post(request())
    assert agent.next().request.messages[0]["content"] == "well?"


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_body_without_a_length_is_refused_and_not_read(agent: Agent, key: str) -> None:
    head = (
        f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {key or agent.key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    link = agent.connect(head.encode() + b"1\r\nx\r\n")
    assert (
        reply(link) == (401, "the API key is not that of a running episode")
        if key
        else (411, "the request has no Content-Length")
    )
    until(lambda: closed(link))
    assert agent.session.unread == 0


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(agent: Agent) -> None:
    assert reply(agent.connect(agent.head(32 * MIB))) == (413, "the request has more than 1 MiB (env.request_mb)")
    link = agent.connect(agent.head(32 * MIB, "Expect: 100-continue"))
    assert reply(link)[0] == 413, "and without asking for the rest"


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(agent: Agent) -> None:
    body = request()
    link = agent.connect(agent.head(len(body), "Expect: 100-continue"))
    assert link.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    link.sendall(body)
    assert agent.next().request.tokens == len(body) // 4


def test_a_body_that_does_not_arrive_in_time_is_refused(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)
    assert reply(agent.connect(agent.head(10) + b"x")) == (408, "the request did not arrive within 0.2 s")
    assert agent.session.unread == 0


def test_requests_that_wait_count_and_the_one_that_is_answered_does_not(agent: Agent) -> None:
    large = request("x" * (MIB // 2))
    lost, first = agent.post(large), agent.next()
    lost.close()
    until(lambda: not first.connections)
    agent.post(large)
    until(lambda: agent.session.counts["retries"] == 1)
    agent.post(request("y" * (MIB // 2)))
    until(lambda: agent.session._queue)
    assert reply(agent.post(request("z" * (MIB // 2))))[0] == 429
    following: Any = agent.server.call(agent.session.exchange(Response("well"), 60.0))
    assert following.request.size > MIB // 2
    assert first.request.messages == (), "what was answered takes no memory"


def test_more_requests_than_may_wait_are_refused(agent: Agent) -> None:
    for number in range(session.MAX_WAITING):
        agent.post(request(f"number {number}"))
    until(lambda: len(agent.session._queue) == session.MAX_WAITING == 64)
    assert reply(agent.post(request("one more"))) == (429, "64 requests of this program are waiting already")
    assert agent.next() is not None
    agent.post(request("later"))
    until(lambda: len(agent.session._queue) == session.MAX_WAITING)


def test_after_a_request_is_read_the_next_one_waits_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(thread_time=lambda: clock[0]))

    async def read(seconds: float) -> float:
        """Read a request that takes so long; return the pause after it."""
        one = Session(("policy",), MIB)
        pauses: list[float] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda pause, _: pauses.append(pause))
        await one.on_thread(lambda: clock.append(clock.pop() + seconds), 0)
        assert one._reader.locked(), "nothing is read until then"
        return pauses[0]

    assert [asyncio.run(read(seconds)) for seconds in (0.0, 0.25, 3.0)] == [0.0, 1.0, 12.0]


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_never_says_that_it_was_cut_by_its_length(agent: Agent, streams: bool) -> None:
    link = agent.post(request(stream=streams))
    assert agent.next() is not None
    agent.server.call(agent.session.exchange(Response("and then I"), 0.1))
    response = http.client.HTTPResponse(link)
    response.begin()
    assert set(re.findall(r'"finish_reason": (\S+?)[,}]', response.read().decode())) - {"null"} == {'"stop"'}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (request(extra=[[]] * 40000), 413, "more than 32768 values"),
        (b'{"extra":' + b"[" * 300 + b"]" * 300 + b"}", 400, "not JSON: recursion limit exceeded"),
        (b'{"extra":' + b"1" * 5000 + b"}", 400, "not JSON: number out of range"),
        (request(model="m" * 500_000), 404, "there is no model 'mmm"),
        (request(stop=["x"] * 65), 400, "stop may hold at most 64 texts, got 65"),
        (request([picture(1024, 1024)] * 3), 400, "may have 2097152 pixels together"),
        (request([picture(40, 30, "eps")]), 400, "cannot identify image"),
        (request([{"type": "image_url", "image_url": {"url": "data:,a"}}]), 400, "cannot be read"),
    ],
)
def test_a_request_that_would_cost_too_much_is_one_sentence(agent: Agent, body: bytes, status: int, words: str) -> None:
    found, why = reply(agent.post(body))
    assert found == status and words in why and len(why) < 400 and "\n" not in why
    assert agent.session.unread == 0 and agent.session.counts["refused"] == 1


def test_a_compressed_request_is_refused(agent: Agent) -> None:
    assert reply(agent.post(b"x" * 100, "Content-Encoding: gzip"))[0] == 415


def test_earlier_calls_with_arguments_that_would_take_long_stay_text(agent: Agent) -> None:
    arguments = ["[" * 500 + "]" * 500, "1" * 5000, '{"a": 1}']
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    agent.post(request(messages=[{"role": "assistant", "tool_calls": calls}]))
    read = [call["function"]["arguments"] for call in agent.next().request.messages[0]["tool_calls"]]
    assert read == [*arguments[:2], {"a": 1}]


def test_as_many_pixels_as_are_allowed_reach_the_prompt(agent: Agent) -> None:
    agent.post(request([picture(1024, 1024), picture(1024, 1024, "webp"), {"type": "text", "text": "?"}]))
    (message,) = with_images(agent.next().request.messages)
    assert [part["image"].size for part in message["content"][:2]] == [(1024, 1024)] * 2


def test_connections_without_a_key_make_room_for_others(agent: Agent) -> None:
    silent = [agent.connect() for _ in range(server.MAX_UNKNOWN)]
    until(lambda: len(agent.server._listener.connections) == server.MAX_UNKNOWN)
    half = agent.connect(b"POST /v1/messages HTTP/1.1\r\nHost: ")
    until(lambda: closed(silent[0]))
    agent.post(request())
    assert agent.next() is not None
    assert not closed(half) and sum(map(closed, silent)) <= 2


def test_connections_that_are_opened_at_once_are_kept_until_the_server_has_time(agent: Agent) -> None:
    has_time = threading.Event()
    agent.server.soon(has_time.wait)
    try:
        links = [agent.connect() for _ in range(100)]
    finally:
        has_time.set()
    links[-1].sendall(agent.head(len(request())) + request())
    assert agent.next() is not None


def test_an_episode_has_a_limited_number_of_connections(agent: Agent) -> None:
    hello = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {agent.key}\r\n\r\n".encode()
    links = [agent.connect(hello) for _ in range(server.MAX_CONNECTIONS)]
    until(lambda: agent.session.connections == server.MAX_CONNECTIONS)
    late = agent.connect(hello)
    assert reply(late) == (429, "128 connections of this program are open already")
    until(lambda: closed(late))
    links[0].close()
    until(lambda: agent.session.connections == server.MAX_CONNECTIONS - 1)
    agent.post(request())
    assert agent.next() is not None


def test_connections_that_ask_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    agent = Agent()
    links = [
        agent.connect(),
        agent.connect(b"POST /v1/messages HT"),
        agent.connect(agent.head(3, key="wrong") + b"{}}"),
    ]
    assert reply(links[2]) == (401, "the API key is not that of a running episode")
    until(lambda: all(map(closed, links)))
    agent.close()


def test_a_client_that_leaves_keeps_its_bytes_charged_until_they_are_read(agent: Agent) -> None:
    for _ in range(20):
        agent.post(request("x" * (MIB // 2))).close()
    until(lambda: agent.session.unread == 0)
    agent.post(request("still there"))
    while agent.next().request.messages[0]["content"] != "still there":
        agent.session.current = None


def test_threads_beyond_the_limit_share_the_last_number(agent: Agent) -> None:
    numbers = []
    for name in range(session.MAX_THREADS + 3):
        agent.post(request(), f"X-Agent-Thread: {name}")
        numbers.append(agent.next().thread)
        agent.session._queue.clear()
    last = session.MAX_THREADS - 1
    assert numbers == [*range(last + 1), last, last, last] and len(agent.session.threads) == session.MAX_THREADS
