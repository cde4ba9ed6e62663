"""Plays one episode on an OpenEnv server, over one socket, and asks servers for the schema of their
actions.

Invariant: a session never reconnects. A server that was restarted accepts steps on a new socket
without an error, but plays another game. A closed socket, a late reply or a frame that breaks the
protocol therefore ends the session for good, with an `EnvironmentFault`.
"""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from envs.base import closed_on_error
from envs.errors import EnvironmentFault
from envs.loading import import_extra
from envs.openenv import protocol
from envs.openenv.protocol import (
    ErrorReply,
    MalformedFrameError,
    Outcome,
    RejectedError,
    read_outcome,
)
from envs.openenv.settings import OpenEnvSettings

MAX_FRAME_BYTES = 64 << 20
"""Bytes of the largest reply; the server's own client allows 100 MiB."""
MAX_REQUEST_BYTES = 1 << 20
"""Bytes of the largest action. Servers close the session at larger ones, each at its own limit."""
POLL_S = 0.5
"""Seconds between two attempts to get a session from servers that are full, or to reach servers."""
CLOSE_S = 1.0
"""Seconds that a server has to agree to a closed session."""
SCHEMA_PATH = "/schema"
"""HTTP GET; `{"action": JSON schema, "observation": JSON schema, "state": JSON schema}`."""
T = TypeVar("T")


class UnreachableError(EnvironmentFault):
    """Nothing at the server's address speaks the protocol."""


class ServerFullError(EnvironmentFault):
    """All sessions of the server are taken."""


class Session:
    """A connected socket. Every method but `close` raises `EnvironmentFault` once the session is
    lost."""

    def __init__(self, url: str, settings: OpenEnvSettings) -> None:
        """Connect; raises UnreachableError if nothing there speaks the protocol, and as
        `import_extra`."""
        self.url = url
        self.label = f"the OpenEnv server {url}"
        self._settings = settings
        connect = import_extra("websockets.sync.client", "an OpenEnv server", "openenv").connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

        self._closed_error = ConnectionClosed
        try:
            connecting = connect(
                "ws" + url.removeprefix("http") + "/ws",
                additional_headers=settings.headers,
                compression=None,
                proxy=None if is_local(url) else True,
                open_timeout=settings.connect_timeout_s,
                ping_timeout=None,  # `step_timeout_s` decides; a server may be busy with one long step
                close_timeout=CLOSE_S,
                max_size=MAX_FRAME_BYTES,
            )
            # From websockets 17 on, only this gives a connection.
            self._socket: Any = contextlib.ExitStack().enter_context(connecting)
        except (OSError, InvalidHandshake, InvalidURI) as error:  # TimeoutError is an OSError
            raise _unreachable(url, error) from error

    def reset(self, seed: int) -> Outcome:
        """Start the episode of this seed. Raises ServerFullError, or EnvironmentFault if the server
        refuses."""
        outcome = self.first("reset", {"seed": seed, **self._settings.reset})
        if outcome.done:
            self._lose("says done in reply to a reset, so there is no episode")
        return outcome

    def first(self, kind: str, data: Mapping[str, Any]) -> Outcome:
        """Send a request that is not an action of the model. Raises as `reset`."""
        try:
            return self._ask(kind, protocol.write_frame(kind, data))
        except ErrorReply as error:
            if error.code == protocol.CAPACITY_REACHED:
                self.close()
                raise ServerFullError(error.message) from error
            self._lose(f"answered {kind} with {error}")

    def step(self, action: Mapping[str, Any]) -> Outcome:
        """Execute an action; raises RejectedError if the server refuses it, and the episode goes
        on."""
        frame = protocol.write_frame("step", action)
        if len(frame) > MAX_REQUEST_BYTES:
            raise RejectedError("the answer is too long")
        try:
            return self._ask("step", frame)
        except ErrorReply as error:
            excused = (
                error.code == protocol.EXECUTION_ERROR
                and self._settings.execution_error == "invalid"
            )
            if excused or error.code == protocol.VALIDATION_ERROR:
                raise RejectedError(error.message) from error
            self._lose(f"answered step with {error}")

    def is_admitted(self) -> bool:
        """Whether the server gave this connection a session; asks for the state, which changes
        nothing."""
        try:
            with contextlib.suppress(self._closed_error):
                # `recv` raises it again, after replies that came before.
                self._socket.send('{"type": "state"}')
            reply = json.loads(self._socket.recv(timeout=self._settings.step_timeout_s))
            return (
                reply["type"] != "error" or reply["data"].get("code") != protocol.CAPACITY_REACHED
            )
        except (
            TimeoutError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            self._closed_error,
        ) as error:
            self._lose(f"did not answer a request for its state ({error})")

    def close(self) -> None:
        """End the session, so that its place on the server is free; may be called twice."""
        socket = self._socket
        self._socket = None
        if socket is not None:
            with contextlib.suppress(OSError, self._closed_error):
                socket.send('{"type": "close"}')
            socket.close()

    def _ask(self, kind: str, frame: str) -> Outcome:
        """Send a request and wait for its reply; raises `ErrorReply` if that is an error."""
        socket = self._socket
        seconds = self._settings.step_timeout_s
        if socket is None:
            raise EnvironmentFault(f"the session on {self.label} has ended, and its game is lost")
        try:
            with contextlib.suppress(TimeoutError):  # nothing is here yet
                # A server that is full or broken says so before it is asked.
                read_outcome(socket.recv(timeout=0))
                raise MalformedFrameError("a second reply to one request")
            with contextlib.suppress(self._closed_error):
                # `recv` raises it again, after replies that came before.
                socket.send(frame)
            return read_outcome(socket.recv(timeout=seconds))
        except TimeoutError:
            self._lose(f"did not answer {kind} within {seconds:g} s (env.step_timeout_s)")
        except MalformedFrameError as error:
            self._lose(f"sent {error}")
        except self._closed_error as error:
            self._lose(f"closed the connection, and the game is lost ({error})")

    def _lose(self, why: str) -> NoReturn:
        self.close()
        raise EnvironmentFault(f"{self.label} {why}")


def open_session(
    settings: OpenEnvSettings, seed: int, begin: Callable[[Session], T]
) -> tuple[Session, T]:
    """Open a session on one of the servers; return it with what `begin` got for first requests.
    Raises as `_on_one`."""

    def attempt(url: str) -> tuple[Session, T]:
        session = Session(url, settings)
        with closed_on_error(session):
            return session, begin(session)

    return _on_one(settings, seed, attempt)


def _on_one(settings: OpenEnvSettings, seed: int, attempt: Callable[[str], T]) -> T:
    """Call `attempt` with one server's address after the other, beginning with the one that the
    seed chooses.

    If all servers are full, they are tried again, up to `capacity_timeout_s`. So are servers that
    cannot be reached, if this process has reached them before: they may be restarting. Raises
    EnvironmentFault as `attempt` does, or if no server took the request.
    """
    deadline = time.monotonic() + settings.capacity_timeout_s
    turn = seed % len(settings.urls)
    urls = settings.urls
    while True:
        lost: list[EnvironmentFault] = []
        for url in (*urls[turn:], *urls[:turn]):
            try:
                return attempt(url)
            except (ServerFullError, UnreachableError) as error:
                lost.append(error)
        full = next((error for error in lost if isinstance(error, ServerFullError)), None)
        known = first_seen(_SCHEMAS, settings) is not None
        if time.monotonic() < deadline and (full or known):
            time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
        elif full is None:
            raise lost[0]
        else:
            raise EnvironmentFault(
                f"no session of {', '.join(urls)} became free within "
                f"{settings.capacity_timeout_s:g} s (env.capacity_timeout_s): {full}; allow three "
                "sessions per slot (n_env), often with the server's variable MAX_CONCURRENT_ENVS, "
                "or lower n_env"
            ) from full


def is_local(url: str) -> bool:
    """Return whether the server runs on this machine, where proxies must not be used."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


_first: dict[tuple[str, tuple[str, ...]], Any] = {}
"""What the servers of this process said first, by subject and addresses."""
_SCHEMAS = "actions or observations"


def action_schema(settings: OpenEnvSettings, seed: int) -> Mapping[str, Any]:
    """Return the JSON schema of the environment's actions.

    Raises EnvironmentFault if no server answers, it is none of OpenEnv, or its schemas have
    changed.
    """
    schemas, url = _on_one(settings, seed, lambda url: (_fetch(url, settings), url))
    check_unchanged(_SCHEMAS, schemas, settings, url)
    return schemas["action"]


def first_seen(what: str, settings: OpenEnvSettings) -> Any:
    """Return what the servers said first; None if they were not asked yet."""
    return _first.get((what, settings.urls))


def check_unchanged(what: str, value: Any, settings: OpenEnvSettings, url: str) -> None:
    """Compare with what the servers said first; raises EnvironmentFault if it differs."""
    if _first.setdefault((what, settings.urls), value) != value:
        changed = f"the {what} of {url} are not those that this run began with"
        raise EnvironmentFault(f"{changed}; if this is meant, restart the run")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses to follow a redirect: the headers hold the key."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


def _fetch(url: str, settings: OpenEnvSettings) -> dict[str, Any]:
    proxies = urllib.request.ProxyHandler({} if is_local(url) else None)
    request = urllib.request.Request(url + SCHEMA_PATH, headers=settings.headers)
    opener = urllib.request.build_opener(_NoRedirects(), proxies)
    try:
        with opener.open(request, timeout=settings.connect_timeout_s) as reply:
            found = json.loads(reply.read(MAX_FRAME_BYTES))
        if not isinstance(found["action"], Mapping):
            raise TypeError("its action schema is not a mapping")
        return {"action": found["action"], "observation": found["observation"]}
    except urllib.error.URLError as error:
        raise _unreachable(url, error) from error
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ) as error:
        wrong = f"its {SCHEMA_PATH} has no schemas ({type(error).__name__}: {error})"
        raise UnreachableError(
            f"{url} is not an OpenEnv server: {wrong}; correct env.url"
        ) from error


def count_sessions(settings: OpenEnvSettings, most: int) -> int:
    """Return how many sessions the servers give at once, at most `most`; raises as `Session`."""
    count = 0
    with contextlib.ExitStack() as opened:
        for url in settings.urls:
            while count < most:
                if not opened.enter_context(
                    contextlib.closing(Session(url, settings))
                ).is_admitted():
                    break
                count += 1
    return count


def _unreachable(url: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"no OpenEnv server answers at {url} ({error}); start it, or correct env.url"
    )
