"""OpenEnv servers that break the protocol, restart, change or are full: each costs one episode at
most."""

import asyncio
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.errors import EnvironmentFault, EpisodeOverError
from rollout.errors import EnvironmentFault as PoolFault
from rollout.spec import EnvSpec
from rollout.workers.pool import EnvPool
from tests.envs.tools.test_tool_env import call
from tests.rollout.workers.test_env_pool import config

pytest.importorskip(
    "websockets", reason="websockets is not installed; pip install 'slime-verlog[openenv]'"
)

from envs.openenv.session import Session, _fetch
from envs.openenv.settings import OpenEnvSettings
from tests.fixtures.openenv_play import SEED, built, started, wait_for_sessions
from tests.fixtures.openenv_server import TinyServer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer() as server:
        yield server


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("garbage", "sent a frame 'this is not JSON': Invalid JSON"),
        ("lie", "sent data.done 'no': Input should be a valid boolean"),
        ("nan", "sent data.reward nan: Input should be a finite"),
        ("state", "sent a frame .*'state'.* expected tags: 'observation'"),
        ("broken", "answered step with SESSION_ERROR: the session broke"),
        ("huge", "closed the connection, and the game is lost .*too big"),
        ("hang", r"did not answer step within 0.5 s \(env.step_timeout_s\)"),
    ],
)
def test_a_server_that_breaks_the_protocol_costs_the_episode(
    server: TinyServer, message: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.openenv.session.MAX_FRAME_BYTES", 1 << 20)
    env = started(server, step_timeout_s=0.5 if message == "hang" else 45.0)
    with pytest.raises(EnvironmentFault, match=words):
        env.step(message)
    with pytest.raises(EpisodeOverError):
        env.step("3")
    wait_for_sessions(server, 0)
    env.reset()
    assert env.step("3")[1], "the next episode is not affected"


def test_the_key_is_not_sent_to_a_server_that_the_first_one_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[int, set[str | None]] = {}

    class Redirecting(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.setdefault(self.server.server_address[1], set()).add(
                self.headers.get("Authorization")
            )
            self.send_response(302)
            self.send_header("Location", f"{scheme}://127.0.0.1:{other.server_port}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    first, other = (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) for _ in range(2)
    )
    for each in (first, other):
        threading.Thread(target=each.serve_forever, daemon=True).start()
    monkeypatch.setenv("OPENENV_KEY", "secret")
    settings = OpenEnvSettings(
        url=f"http://127.0.0.1:{first.server_port}", api_key_env="OPENENV_KEY"
    )
    for scheme, ask in (("ws", Session), ("http", _fetch)):  # noqa: B007 - the servers read it
        with pytest.raises(EnvironmentFault):
            ask(settings.urls[0], settings)
    for each in (first, other):
        each.shutdown()
    assert asked[first.server_port] == {"Bearer secret"}
    assert "Bearer secret" not in asked.get(other.server_port, set())


def test_a_second_reply_to_one_step_is_not_taken_for_the_next_observation(
    server: TinyServer,
) -> None:
    env = started(server)
    assert "once" in env.step("twice")[0]["obs_str"]
    time.sleep(1.0)
    with pytest.raises(EnvironmentFault, match="sent a second reply to one request"):
        env.step("3")


def serve(port: int = 0) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "tests.fixtures.openenv_server", "guess", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_server_that_restarts_never_goes_on_with_a_fresh_game(deterministic: bool) -> None:
    process, url = serve()
    pool = EnvPool(config("inline"))
    try:
        env = started(url)
        env.step("5")
        options = {"url": url, "picture": "screen", "deterministic": deterministic}
        session = await pool.open(EnvSpec("envs.openenv", {"task": "any", "seed": SEED}, options))
        await session.step("5")
        process.kill()
        process.wait()
        process, again = serve(int(url.rpartition(":")[2]))
        assert again == url
        with pytest.raises(EnvironmentFault, match="closed the connection, and the game is lost"):
            env.step("3")
        with pytest.raises(EpisodeOverError):
            env.step("3")
        if deterministic:
            reply = await session.step("4")
            assert reply.observation["obs_str"] == "text: lower\nguesses: 2", (
                "replayed from seed and answers"
            )
            assert pool.faults == {"raised": 1, "replayed": 1}
        else:
            with pytest.raises(
                PoolFault,
                match="game is lost.*; the environment is not deterministic.*\n.*2 answers",
            ):
                await session.step("4")
            assert pool.faults == {"raised": 1}
        assert "Guess" in env.reset()["obs_str"] and env.step("3")[1]
    finally:
        pool.close()
        process.kill()
        process.wait()


def test_done_in_reply_to_a_reset_and_a_refused_reset_are_faults(server: TinyServer) -> None:
    with pytest.raises(EnvironmentFault, match="says done in reply to a reset"):
        started(server, reset={"over": True})
    with pytest.raises(
        EnvironmentFault, match="answered reset with EXECUTION_ERROR: no such level"
    ):
        started(server, reset={"fail": True})
    wait_for_sessions(server, 0)


def test_actions_or_tools_that_change_in_mid_run_fault_the_next_episode() -> None:
    with TinyServer() as server:
        env = started(server)
        server.schema = {"properties": {"text": {"type": "string"}}}
        assert not env.step("5")[1]
        with pytest.raises(
            EnvironmentFault,
            match="are not those that this run began with; if this is meant, restart",
        ):
            built(server)
    with TinyServer("tools") as server:
        env = started(server)
        server.tools = [{**server.tools[0], "name": "guess_again"}]
        with pytest.raises(
            EnvironmentFault, match="the tools of .* are not those that this run began with"
        ):
            env.reset()


def test_a_full_server_is_waited_for_and_then_named() -> None:
    with TinyServer(capacity=1) as server:
        first = started(server)
        with pytest.raises(
            EnvironmentFault,
            match=r"became free within 0.2 s .*: 1/1 sessions are taken; allow three",
        ):
            started(server, capacity_timeout_s=0.2)
        threading.Timer(0.3, first.close).start()
        assert started(server, capacity_timeout_s=30.0).step("3")[1]


async def test_a_reset_that_waits_for_a_session_delays_the_other_episodes_of_its_worker_until_its_time_out() -> (
    None
):
    with TinyServer(capacity=1) as server:
        pool = EnvPool(config("inline", max_env_retries_per_turn=1))
        options = {"url": server.url, "picture": "screen", "capacity_timeout_s": 2.0}
        first, second = (
            EnvSpec("envs.openenv", {"task": "any", "seed": seed}, options) for seed in (SEED, 12)
        )
        try:
            live = await pool.open(first)
            waiting = asyncio.create_task(pool.open(second))
            while not server.refused:
                await asyncio.sleep(0.01)
            assert (await live.step("3")).done
            await (await waiting).close()
            assert pool.faults == {"raised": 1}, (
                "the step came after the first attempt had timed out"
            )
            await live.close()
        finally:
            pool.close()


def test_new_episodes_wait_while_a_known_server_restarts() -> None:
    with TinyServer() as server:
        started(server).close()
        url, port = server.url, int(server.url.rpartition(":")[2])
    with pytest.raises(EnvironmentFault, match=f"no OpenEnv server answers at {url}"):
        built(url, capacity_timeout_s=0.0)
    late: list[TinyServer] = []
    threading.Timer(0.7, lambda: late.append(TinyServer(port=port).__enter__())).start()
    env = started(url, capacity_timeout_s=30.0)
    assert env.step("3")[1]
    late[0].__exit__()


def test_episodes_are_spread_over_servers_and_avoid_those_that_are_full_or_dead() -> None:
    with TinyServer(capacity=2) as one, TinyServer() as two:
        urls = ["http://127.0.0.1:1", one.url, two.url]
        envs = [started(urls[1], seed, url=urls[1:]) for seed in range(4)]
        assert (one.sessions, two.sessions) == (2, 2)
        envs += [started(urls[1], seed, url=urls) for seed in range(3)]
        assert (one.sessions, two.sessions) == (2, 5)
        for env in envs:
            env.close()


def failing(*_: Any) -> str:
    raise KeyError("score")


def failing_later(observation: dict[str, Any]) -> str:
    return failing() if observation["guesses"] else "Guess."


@pytest.mark.parametrize(
    ("game", "option", "function"),
    [
        ("guess", "action", failing),
        ("guess", "observation", failing_later),
        ("tools", "observation", failing),
    ],
)
def test_a_function_of_the_user_that_raises_is_a_fault_and_not_an_error_of_a_tool(
    game: str, option: str, function: Callable[..., str]
) -> None:
    name = f"tests.envs.openenv.test_openenv_faults.{function.__name__}"
    words = rf"env.{option}: {name}: KeyError: .*test_openenv_faults.py:\d"
    with TinyServer(game) as server:
        options: dict[str, Any] = {option: name}
        env = built(server, **options)
        with pytest.raises(EnvironmentFault, match=words):
            env.reset()
            env.step("3" if game == "guess" else call("guess", number=3))
        wait_for_sessions(server, 0)
