"""Tools of MCP servers, played with real servers: results, failures, restarts, and what is left
running."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp.test_utils import unused_port

from envs.errors import EnvironmentFault, EpisodeOverError
from envs.loading import build_env_from
from envs.tools import ToolEnv
from envs.tools.mcp import connection as connection_module
from rollout.spec import EnvSpec
from tests.cases import some
from tests.envs.tools.test_tool_env import call
from tests.fixtures.killed_worker import check_that_nothing_outlives_the_worker
from tests.fixtures.waiting import until
from tests.rollout.workers.test_env_pool import is_alive

pytest.importorskip("mcp", reason="mcp is not installed; pip install 'slime-verlog[mcp]'")
ROOT = Path(__file__).parents[3]
SERVER = [sys.executable, str(ROOT / "tests/fixtures/mcp_server.py")]


def options(timeout_s: float | None = None, **mcp: Any) -> dict[str, Any]:
    own = {"command": SERVER, "start_timeout_s": 120, **mcp}  # a busy machine starts it slowly
    entry: dict[str, Any] = {"mcp": mcp if "url" in mcp or "command" in mcp else own}
    return {
        "max_steps": 80,
        "data": [{"question": "Well?"}],
        "tools": [entry | ({"timeout_s": timeout_s} if timeout_s else {})],
    }


def started(**keywords: Any) -> ToolEnv:
    env = build_env_from("envs.tools", {"task": "any", "seed": 0}, options(**keywords))
    env.reset()
    return env


def shown(env: ToolEnv, text: str) -> tuple[str, dict[str, float]]:
    """The observation after one answer, and the metrics."""
    observation, _, info = env.step(text)
    return observation["obs_str"], info["metrics"]


def servers() -> list[psutil.Process]:
    """The servers that this process has started and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            found += [process] if SERVER[1] in process.cmdline() else []
    return found


def test_schemas_texts_and_pictures_come_from_the_server_and_errors_are_observations() -> None:
    env = started(prefix="my_", include=["add", "paint", "misbehave"])
    assert [tool["function"]["name"] for tool in env.tools] == [
        "my_add",
        "my_paint",
        "my_misbehave",
    ]
    assert env.tools[0]["function"]["description"] == "Add two numbers."
    assert shown(env, call("my_add", a=1, b=2)) == ("my_add: 3", {"tool_calls": 1.0})
    observation, *_ = env.step(call("my_paint", colour="red"))
    assert observation["obs_str"] == "my_paint: all red"
    assert observation["multi_modal_data"]["image"][0].getpixel((5, 5)) == (255, 0, 0)
    text, metrics = shown(env, call("my_misbehave", how="raise"))
    assert text.startswith("my_misbehave: error: ") and metrics["tool_errors"] == 1
    text, metrics = shown(env, call("my_misbehave", how="megabyte"))
    assert len(text) < 8100 and "characters left out" in text and metrics["tool_errors"] == 1
    text, metrics = shown(env, call("my_add", a="one"))
    assert "is not of type 'integer'" in text and metrics["tool_calls"] == 4, (
        "the schema was checked here"
    )


PAIR = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
LETTERS = {"type": "string", "pattern": r"^\p{L}+$"}


def test_a_tool_whose_schema_cannot_be_read_is_left_out_and_the_others_are_offered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = {"type": "object", "properties": {"pair": PAIR, "word": LETTERS}, "required": ["word"]}
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    monkeypatch.setenv("MCP_TEST_SCHEMA", json.dumps({**draft, **read}))
    env = started(prefix="read_", pass_env=["MCP_TEST_SCHEMA"])
    assert shown(env, call("read_remember", word="Łódź"))[0] == "read_remember: Łódź"
    assert "does not match" in shown(env, call("read_remember", word="R2D2"))[0]
    unread = {"type": "object", "properties": {"word": {"$ref": "http://elsewhere/word.json"}}}
    monkeypatch.setenv("MCP_TEST_SCHEMA", json.dumps(unread))
    env = started(prefix="unread_", pass_env=["MCP_TEST_SCHEMA"])
    names = [tool["function"]["name"] for tool in env.tools]
    assert names == ["unread_add", "unread_paint", "unread_misbehave"]
    assert "the parameters of unread_remember refer to 'http://elsewhere/word.json'" in caplog.text
    assert "the tool is left out" in caplog.text


@pytest.mark.slow
def test_a_server_that_dies_costs_the_episode_and_the_next_one_has_a_server_again() -> None:
    env = started()
    with pytest.raises(EnvironmentFault, match="died in a call"):
        env.step(call("misbehave", how="exit"))
    env.reset()
    assert shown(env, call("add", a=1))[0] == "add: 1"


def test_a_call_that_hangs_is_counted_and_the_server_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than a call, as it is for short time limits.
    monkeypatch.setattr(connection_module, "ANSWER_S", 1.5)
    env = started(timeout_s=1.0)
    text, metrics = shown(env, call("misbehave", how="hang"))
    assert "did not end within 1 s" in text and metrics["tool_timeouts"] == 1
    for _ in range(60):  # starting a server may take longer than a call
        text, metrics = shown(env, call("add", a=4))
        if text == "add: 4":
            break
    assert text == "add: 4" and 1 <= metrics["tool_timeouts"] == metrics["tool_errors"] < 60


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("change", "changed the arguments of"),
        pytest.param("drop", "no longer has", marks=pytest.mark.slow),
    ],
)
def test_a_server_whose_tools_change_faults_the_next_episode(how: str, words: str) -> None:
    env = started(prefix=f"{how}_")
    shown(env, call(f"{how}_misbehave", how=how))
    with pytest.raises(EnvironmentFault, match=f"{words} the tool 'add'; restart the run"):
        started(prefix=f"{how}_")


@pytest.mark.slow
def test_with_scope_episode_each_episode_has_its_own_server_whose_state_is_never_lost_silently() -> (
    None
):
    before = len(servers())
    first, second = started(scope="episode"), started(scope="episode")
    assert shown(first, call("remember", word="one"))[0] == "remember: one"
    assert shown(second, call("remember", word="two"))[0] == "remember: two"
    assert shown(first, call("remember", word="three"))[0] == "remember: one three"
    with pytest.raises(EnvironmentFault, match="died in a call"):
        first.step(call("misbehave", how="exit"))
    with pytest.raises(EpisodeOverError):
        first.step("after the fault, the episode's tools are released")
    first.reset()
    assert shown(first, call("remember", word="new"))[0] == "remember: new"
    first.close()
    second.close()
    until(lambda: len(servers()) <= before)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_what_a_server_started_ends_with_it(ends: bool, tmp_path: Path) -> None:
    """A child in a session of its own, of a server that ends when it is told to, and of one that
    does not."""
    mark = tmp_path / "pid"
    program = f"""
import runpy, signal, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(mark)!r}, "w").write(str(child.pid))
{"" if ends else "signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Thread(target=child.wait).start()"}
sys.argv = [{SERVER[1]!r}]
runpy.run_path({SERVER[1]!r}, run_name="__main__")
"""
    env = started(command=[sys.executable, "-c", program], scope="episode")
    child = int(mark.read_text())
    assert is_alive(child)
    env.close()
    until(lambda: not is_alive(child))


def serve(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([*SERVER, str(port)])

    def answers() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    until(answers)
    return process


@pytest.fixture
def port() -> Iterator[int]:
    yield unused_port()
    for process in servers():
        process.kill()


@pytest.mark.parametrize("scope", some(["worker", "episode"], ["worker"]))
def test_a_server_is_reached_by_url_and_reached_again_after_its_restart(
    port: int, scope: str
) -> None:
    server = serve(port)
    env = started(url=f"http://127.0.0.1:{port}/mcp", scope=scope)
    assert shown(env, call("add", a=1, b=2))[0] == "add: 3"
    observation, *_ = env.step(call("paint", colour="blue"))
    assert observation["multi_modal_data"]["image"][0].getpixel((5, 5)) == (0, 0, 255)
    server.kill()
    server.wait()
    with pytest.raises(EnvironmentFault, match="died in a call"):
        env.step(call("add", a=1))
    serve(port)
    env.reset()
    assert shown(env, call("add", a=1))[0] == "add: 1"


@pytest.mark.slow
async def test_nothing_is_left_running_when_a_worker_is_killed_and_its_episode_is_given_up() -> (
    None
):
    spec = EnvSpec("envs.tools", {"task": "any", "seed": 0}, options(scope="episode"))
    await check_that_nothing_outlives_the_worker(
        spec, call("remember", word="one"), "mcp_server.py"
    )


def test_mcp_tools_are_replayable_only_if_declared() -> None:
    assert not started().deterministic
    assert started(deterministic=True).deterministic


@pytest.mark.slow
def test_servers_end_with_the_process_that_started_them() -> None:
    script = (
        "import os, rollout.workers.guard as guard, envs.tools\n"
        f"envs.tools.load_tools([{{'mcp': {{'command': {SERVER!r}}}}}])\n"
        "print(*guard.descendants(os.getpid()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    pids = list(map(int, done.stdout.split()))
    assert (done.returncode, done.stderr) == (0, "") and pids
    until(lambda: not any(map(is_alive, pids)))
