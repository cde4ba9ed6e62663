"""What one agent may cost its server: requests, pictures and connections beyond the limits are
refused or closed."""

import base64
import http.client
import io
import json
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from envs.agent import server
from envs.agent.server import ModelServer
from envs.agent.session import Session
from tests.fixtures.waiting import until

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

    def head(self, length: int, *more: str, key: str | None = None) -> bytes:
        fields = [
            "Host: x",
            f"Authorization: Bearer {key or self.key}",
            f"Content-Length: {length}",
            *more,
        ]
        return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *fields, "", ""]).encode()

    def post(self, body: bytes, *more: str) -> socket.socket:
        return self.connect(self.head(len(body), *more) + body)

    def next(self) -> Any:
        """The session's next request."""
        return self.server.call(self.session.exchange(None, 60.0))

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
    return json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": content}], **more}
    ).encode()


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
    assert (
        status == 429
        and why == "the unanswered requests of this program have more than 1 MiB (env.request_mb)"
    )
    for link in links:
        link.close()
    until(lambda: agent.session.unread == 0)
    agent.post(request())
    assert agent.next().request.messages[0]["content"] == "well?"


def test_a_body_without_a_length_is_refused_and_not_read(agent: Agent) -> None:
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {agent.key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    link = agent.connect(head.encode() + b"1\r\nx\r\n")
    assert reply(link) == (411, "the request has no Content-Length")
    until(lambda: closed(link))
    assert agent.session.unread == 0


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(agent: Agent) -> None:
    assert reply(agent.connect(agent.head(32 * MIB))) == (
        413,
        "the request has more than 1 MiB (env.request_mb)",
    )
    assert reply(agent.post(b"x" * 100, "Content-Encoding: gzip"))[0] == 415
    link = agent.connect(agent.head(32 * MIB, "Expect: 100-continue"))
    assert reply(link)[0] == 413, "and without asking for the rest"


def test_a_body_that_does_not_arrive_in_time_is_refused(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_S", 0.2)
    assert reply(agent.connect(agent.head(10) + b"x")) == (
        408,
        "the request did not arrive within 0.2 s",
    )
    assert agent.session.unread == 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (request(extra=[[]] * 40000), 413, "more than 32768 values"),
        (b'{"extra":' + b"[" * 300 + b"]" * 300 + b"}", 400, "not JSON: recursion limit exceeded"),
        (request(model="m" * 500_000), 404, "there is no model 'mmm"),
        (request([picture(1024, 1024)] * 3), 400, "may have 2097152 pixels together"),
        (request([picture(40, 30, "eps")]), 400, "cannot identify image"),
    ],
)
def test_a_request_that_would_cost_too_much_is_one_sentence(
    agent: Agent, body: bytes, status: int, words: str
) -> None:
    found, why = reply(agent.post(body))
    assert found == status and words in why and len(why) < 400 and "\n" not in why
    assert ("pixels together" in why) == ("pixels together" in words)
    assert agent.session.unread == 0 and agent.session.counts["refused"] == 1


def test_connections_without_a_key_make_room_for_others(agent: Agent) -> None:
    silent = [agent.connect() for _ in range(server.MAX_UNKNOWN)]
    until(lambda: len(agent.server._listener.connections) == server.MAX_UNKNOWN)
    half = agent.connect(b"POST /v1/messages HTTP/1.1\r\nHost: ")
    until(lambda: closed(silent[0]))
    agent.post(request())
    assert agent.next() is not None
    assert not closed(half) and sum(map(closed, silent)) <= 2


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
