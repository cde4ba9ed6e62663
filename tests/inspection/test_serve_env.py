"""`slime-verlog serve-env`: other trainers play our environments over OpenEnv's protocol."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="serve-env needs pip install 'slime-verlog[openenv]'")

from PIL import Image

from envs.base import PICTURE_PLACE, make_observation
from envs.loading import build_env_from, load_env_module
from inspection.command import main
from inspection.serve_env.frames import shown
from rollout.workers.reply import EnvReply
from tests.fixtures.env_server import Client, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def babyai() -> Iterator[str]:
    """The URL of the command, started as a person types it."""
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    command = [sys.executable, "-m", "inspection", "serve-env", "custom_configs/babyai.yaml", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--set", 'tasks=["goto", "open"]', "--set", "env_workers=1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        found = re.match(r"serving goto, open at (http://127\.0\.0\.1:\d+) to at most 32 clients", line)
        assert found, line
        yield found[1]
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


def played_in_process(task: str, seed: int) -> list[tuple[str, str, float, bool]]:
    """An expert's episode: per turn its text, the answer, the reward for it, and whether it ended the episode."""
    env = build_env_from("envs.babyai", {"task": task, "seed": seed})
    expert, turns, done = load_env_module("envs.babyai").expert_action, [], False
    observation = env.reset()
    while not done:
        text = observation["obs_str"] + f"\n\n{env.answer_format}" * bool(env.answer_format)
        answer = f"THINK: onwards. ACTION: {expert(env)}"
        observation, done, info = env.step(answer)
        turns.append((text, answer, info["reward"], done))
    assert info["progression"] == 1.0
    return turns


async def test_two_clients_at_once_play_what_is_played_in_process(babyai: str) -> None:
    async def episode(task: str, seed: int) -> None:
        env = build_env_from("envs.babyai", {"task": task, "seed": seed})
        env.reset()
        async with Client(babyai) as client:
            for _ in range(2):
                reply = await client.reset(seed=seed, task=task, episode_id="mine")
                assert (reply["reward"], reply["done"]) == (None, False)
                assert reply["observation"]["instruction"] == env.instruction_prompt
                for text, answer, reward, done in played_in_process(task, seed):
                    assert reply["observation"]["text"] == text
                    reply = await client.step(answer)
                    assert (reply["reward"], reply["done"]) == (reward, done)
                    assert reply["observation"]["instruction"] == ""
                about = reply["metadata"]
                assert about["terminated"] and not about["truncated"] and about["progression"] == 1.0
                assert (await client.ask("state"))[1].items() >= {
                    "episode_id": "mine", "task": task, "seed": seed, "done": True
                }.items()  # fmt: skip

    await asyncio.gather(episode("goto", 3), episode("open", 4))


async def test_without_seed_every_episode_has_another_one_and_the_seed_draws_the_task(babyai: str) -> None:
    async with Client(babyai) as client, Client(babyai) as other:
        found = [(await c.reset())["metadata"] for c in (client, other, client, other, client, other)]
        assert len({about["seed"] for about in found}) == 6
        assert {about["task"] for about in found} == {"goto", "open"}
        for about in found:
            assert (await client.reset(seed=about["seed"]))["metadata"] == about


def run_elsewhere(variable: str, package: str, program: str, *words: str) -> Any:
    """What a program prints as JSON, run by the Python that an environment variable names."""
    python = os.environ.get(variable)
    if python is None or shutil.which(python) is None:
        pytest.skip(f"set {variable} to a Python with {package} (pip install '{package}')")
    command = [python, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_client_of_openenv_wins_an_episode(babyai: str) -> None:
    turns = played_in_process("goto", 5)
    program = """
import json, sys
from openenv import GenericEnvClient
shown = []
with GenericEnvClient(base_url=sys.argv[1]).sync() as client:
    result = client.reset(seed=5, task="goto")
    for answer in json.loads(sys.argv[2]):
        shown.append(result.observation["text"])
        result = client.step({"message": answer})
    state = client.state()
print(json.dumps([shown, result.reward, result.done, state["step_count"]]))
"""
    answers = json.dumps([answer for _, answer, _, _ in turns])
    found = run_elsewhere("SLIME_VERLOG_OPENENV_PYTHON", "openenv==0.10.0", program, babyai, answers)
    assert found == [[text for text, _, _, _ in turns], turns[-1][2], True, len(turns)]


def test_the_openenv_environment_of_verifiers_wins_an_episode(babyai: str) -> None:
    """Its own loop, with scripted answers in place of a model."""
    turns = played_in_process("goto", 5)
    program = """
import asyncio, contextlib, json, sys
from types import SimpleNamespace
from verifiers.v1.tasksets.openenv.taskset import OpenEnvConfig, OpenEnvEnv, OpenEnvTaskset

taskset = object.__new__(OpenEnvTaskset)
taskset.config = OpenEnvConfig(base_url=sys.argv[1], resets=[{"seed": 5, "task": "goto"}])
(task,) = taskset.load()
answers, shown, rewards = json.loads(sys.argv[2]), [], {}

async def turn(text):
    shown.append(json.loads(text)["observation"]["text"])
    return SimpleNamespace(terminated=False, last_reply=answers[len(shown) - 1])

@contextlib.asynccontextmanager
async def interaction(task):
    yield SimpleNamespace(turn=turn, trace=SimpleNamespace(record_reward=rewards.__setitem__))

agents = SimpleNamespace(player=SimpleNamespace(interaction=interaction))
asyncio.run(object.__new__(OpenEnvEnv).run(task, agents))
print(json.dumps([shown, rewards]))
"""
    answers = json.dumps([answer for _, answer, _, _ in turns])
    found = run_elsewhere("SLIME_VERLOG_VERIFIERS_PYTHON", "verifiers[openenv]==0.4.*", program, babyai, answers)
    total = sum(reward for _, _, reward, _ in turns)
    assert found == [[text for text, _, _, _ in turns], {"openenv_reward": pytest.approx(total)}]


@pytest.mark.parametrize(
    ("frame", "code", "words"),
    [
        ("{", "INVALID_JSON", "not JSON"),
        (b"\xff\xfe", "INVALID_JSON", "not JSON"),
        ('{"type": "step", "data": {"message": ' + "1" * 5000 + "}}", "INVALID_JSON", "not JSON"),
        ("[1]", "VALIDATION_ERROR", "must look like"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE", "it has reset, step, state, close"),
        ('{"type": "reset", "data": {"sead": 3}}', "VALIDATION_ERROR", "did you mean 'reset.seed'?"),
        ('{"type": "reset", "data": {"seed": -3}}', "VALIDATION_ERROR", "reset.seed must be at least 0"),
        (
            json.dumps({"type": "reset", "data": {"episode_id": "x" * 256}}),
            "VALIDATION_ERROR",
            "reset.episode_id must have at most 255 characters, got 256",
        ),
        ('{"type": "reset", "data": {"task": "cuont"}}', "VALIDATION_ERROR", "this server has count"),
        (
            '{"type": "step", "data": {"message": "left", "mesage": ""}}',
            "VALIDATION_ERROR",
            "unknown key 'step.mesage'",
        ),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR", "step.message is missing"),
        ('{"type": "step", "data": {"message": "\\ud800"}}', "VALIDATION_ERROR", "half of a surrogate pair"),
        ('{"type": "step", "data": {"message": "left"}}', "EXECUTION_ERROR", "no episode runs; send reset"),
    ],
)
async def test_a_wrong_request_gets_one_sentence_and_the_session_goes_on(
    frame: str | bytes, code: str, words: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as url, Client(url) as client:
        kind, data = await client.send(frame)
        assert (kind, data["code"]) == ("error", code) and words in data["message"]
        assert "\n" not in data["message"]
        await client.reset(seed=1)


async def test_a_reset_to_an_unknown_task_leaves_the_episode_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as url, Client(url) as client:
        await client.reset(seed=1)
        assert (await client.ask("reset", task="cuont"))[1]["code"] == "VALIDATION_ERROR"
        await client.step("left")


async def test_an_episode_that_is_over_takes_no_step_and_a_turn_limit_truncates(tmp_path: Path) -> None:
    async with serving(tmp_path, env={"max_length": 50}, max_turns=2) as url, Client(url) as client:
        await client.reset(seed=1)
        first, last = await client.step("left"), await client.step("dance")
        assert [(r["done"], r["metadata"]["truncated"]) for r in (first, last)] == [(False, False), (True, True)]
        assert not last["metadata"]["terminated"] and not last["metadata"]["valid_action"]
        assert await client.ask("step", message="left") == (
            "error",
            {"message": "the episode is over; send reset", "code": "EXECUTION_ERROR"},
        )


async def test_an_environment_that_breaks_costs_one_episode(tmp_path: Path) -> None:
    env = {"max_length": 50, "raise_at": 1, "raise_seeds": [7]}
    async with serving(tmp_path, env=env, max_env_retries_per_turn=0) as url, Client(url) as client:
        await client.reset(seed=7)
        await client.step("left")
        kind, data = await client.ask("step", message="left")
        assert (kind, data["code"]) == ("error", "EXECUTION_ERROR")
        assert "the game broke" in data["message"] and "\n" not in data["message"]
        assert (await client.ask("step", message="left"))[1]["message"] == "no episode runs; send reset"
        await client.reset(seed=8)
        await client.step("left")


async def test_one_client_too_many_is_told_so_and_a_place_becomes_free(tmp_path: Path) -> None:
    async with serving(tmp_path, capacity=1) as url:
        async with Client(url) as first:
            await first.reset()
            async with Client(url) as second:
                kind, data = await second.receive()
                assert kind == "error"
                assert data.items() >= {"code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}.items()
                await second.socket.wait_closed()
            await first.socket.send('{"type": "close"}')
            await first.socket.wait_closed()
        async with Client(url) as third:
            await third.reset()


def fetch(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            assert response.headers["Content-Type"] == "application/json"
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_the_pages_describe_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        health, schema, about, missing = [
            await asyncio.to_thread(fetch, url + path) for path in ("/health", "/schema", "/metadata", "/reset")
        ]
    assert health == (200, {"status": "healthy"})
    action = schema[1]["action"]
    assert action["required"] == ["message"] and action["properties"]["message"]["type"] == "string"
    assert action["title"] not in ("Action", "CallToolAction", "ListToolsAction")  # these mean MCP tools to clients
    assert {"text", "images", "instruction"} <= schema[1]["observation"]["properties"].keys()
    assert "Tasks: count." in about[1]["description"]
    assert missing == (404, "there is only /ws, /health, /schema, /metadata\n")


def reply_with(messages: Any) -> EnvReply:
    return EnvReply(make_observation("You see a wall."), messages, "Walk.", "Your action?", "left", True)


def test_pictures_are_png_files_and_those_inside_a_text_are_marked() -> None:
    red, blue = Image.new("RGB", (4, 2), "red"), Image.new("RGB", (2, 4), "blue")
    images = [{"type": "image", "image": red}, {"type": "image", "image": blue}]
    text = {"type": "text", "text": "A wall."}
    first = shown(reply_with([{"role": "user", "content": [*images, text]}]), None)
    assert first.text == "A wall.\n\nYour action?" and first.instruction == "Walk."
    assert [image.partition(",")[0] for image in first.images] == ["data:image/png;base64"] * 2
    mixed = shown(reply_with([{"role": "user", "content": [images[0], text, images[1]]}]), "Walk.")
    assert mixed.text == f"{PICTURE_PLACE}A wall.{PICTURE_PLACE}\n\nYour action?" and mixed.instruction == ""
    changed = shown(replace(reply_with([{"role": "user", "content": "A door."}]), instruction_prompt="Run."), "Walk.")
    assert (changed.text, changed.instruction, changed.images) == ("A door.\n\nYour action?", "Run.", [])


ECHO = """
from envs.base import describe_task
from tests.fixtures.counting_env import CountingGame, CountingSettings

class Echo(CountingGame):
    def translate(self, candidate):
        return candidate or None

def build_env(sample, args):
    return Echo(CountingSettings(), describe_task(sample)[1])
"""


async def test_an_answer_that_a_client_read_as_json_becomes_text_again(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    async with serving(tmp_path, rollout_interaction_env_path=str(tmp_path / "echo.py")) as url, Client(url) as client:
        await client.reset(seed=3)
        assert (await client.step(5))["metadata"]["executed_action"] == "5"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.yaml"], "none.yaml cannot be read: No such file or directory"),
        (["served.yaml", "--capacity", "0"], "--capacity must be at least 1, got 0"),
        (["served.yaml", "--idle-timeout", "0"], "--idle-timeout must be above 0, got 0"),
        (["served.yaml", "--idle-timeout", "nan"], "--idle-timeout must be above 0, got nan"),
        (["served.yaml", "--set", "env.sede=3"], "unknown key 'env.sede'"),
        (["served.yaml", "--port", "{taken}"], "--port {taken} cannot be used: "),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served.yaml").write_text("rollout_interaction_env_path: tests.fixtures.counting_env\ntasks: [count]\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = str(listener.getsockname()[1])
        with pytest.raises(SystemExit) as end:
            main(["serve-env", *(word.format(taken=taken) for word in words)])
    assert str(end.value.code).startswith("error: ") and sentence.format(taken=taken) in str(end.value.code)
