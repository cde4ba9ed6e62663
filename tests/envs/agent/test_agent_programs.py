"""The programs of agents: in commands, in a sandbox, with public clients, and what is left of
them."""

import importlib.util
import os
import shutil
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.agent import AgentEnv, AgentRun
from envs.loading import build_env_from
from rollout.spec import EnvSpec
from rollout.workers.guard import descendants
from tests.cases import some
from tests.envs.agent.test_agent import FIXTURES, PROGRAM, built, options, started, texts
from tests.envs.swe.tiny_repository import TASK, needs_sandbox, tiny_options
from tests.envs.tools.test_tool_env import call
from tests.fixtures.killed_worker import check_that_nothing_outlives_the_worker
from tests.fixtures.waiting import until
from tests.rollout.workers.test_env_pool import is_alive

__all__ = ["started"]


async def test_nothing_is_left_running_when_a_worker_is_killed_and_its_episode_is_given_up() -> (
    None
):
    spec = EnvSpec("envs.agent", {"task": "any", "seed": 0}, options("edits 9"))
    await check_that_nothing_outlives_the_worker(spec, "one", PROGRAM.name)


needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="apt-get install -y bubblewrap enables this test"
)


@needs_bwrap
def test_in_a_sandbox_the_agent_reaches_the_model_and_nothing_else(tmp_path: Path) -> None:
    secret, workdir = tmp_path / "secret.txt", tmp_path / "work"
    secret.write_text("secret")
    workdir.mkdir()
    shutil.copy(PROGRAM, workdir)
    env = built(
        command=f"python {PROGRAM.name} looks {secret}",
        workdir=str(workdir),
        sandbox=True,
        grader="tests.envs.agent.test_agent_programs:saw",
    )
    env.reset()
    assert texts(env) == [("user", "FileNotFoundError OSError /testbed")]
    _, done, info = env.step("nothing")
    assert done and info["reward"] == 1.0, info
    env.close()


@pytest.mark.parametrize(
    "sandbox", [False, pytest.param(True, marks=needs_bwrap)], ids=["plain", "sandbox"]
)
def test_a_signal_to_the_programs_group_does_not_reach_what_ends_its_processes(
    sandbox: bool, tmp_path: Path
) -> None:
    shutil.copy(PROGRAM, tmp_path)
    command = f"python {PROGRAM.name} signals"
    others = set(descendants(os.getpid()))
    env = built(command=command, workdir=str(tmp_path), sandbox=sandbox)
    env.reset()
    running = set(descendants(os.getpid())) - others
    assert env.step("yes")[2]["reward"] == 1.0 and running
    until(lambda: not any(map(is_alive, running)))


@needs_bwrap
def test_in_a_sandbox_scripts_of_a_linked_virtual_environment_start(tmp_path: Path) -> None:
    venv.create(tmp_path / "real", symlinks=True)
    shutil.copy(PROGRAM, tmp_path / "real" / "bin" / "asker")
    script = tmp_path / "real" / "bin" / "asker"
    script.write_text(f"#!{tmp_path}/real/bin/python\n{script.read_text()}")
    script.chmod(0o755)
    (tmp_path / "linked").symlink_to("real")
    python = str(tmp_path / "linked" / "bin" / "python")
    assert played(built(python=python, command="asker asks 1", sandbox=True), ["yes"]) == 1.0


@needs_bwrap
def test_a_limit_of_the_sandbox_ends_the_episode_also_while_the_program_waits(
    tmp_path: Path,
) -> None:
    shutil.copy(PROGRAM, tmp_path)
    command = f"python {PROGRAM.name} grows"
    env = built(command=command, workdir=str(tmp_path), sandbox=True, tree_mb=8)
    env.reset()
    until(lambda: env._episode.session.end is not None)
    _, done, info = env.step("late")
    assert done and info["terminated"] and info["reward"] == 0.0, info


@pytest.mark.slow
@needs_bwrap
def test_a_repository_is_prepared_and_judged_as_in_swe_tasks(tmp_path: Path) -> None:
    needs_sandbox()
    shutil.copy(PROGRAM, tmp_path)
    keys = {"command": f"python {PROGRAM.name} shell", "workdir": str(tmp_path), "sandbox": True}
    keys |= {
        "prepare": "envs.agent.swe.prepare",
        "grader": "envs.agent.swe.grade",
        "grade_timeout_s": 240.0,
    }
    env = build_env_from(
        "envs.agent", {"task": TASK, "seed": 0}, {**keys, "options": tiny_options()}
    )
    for commands, reward in (
        (["ls shop", "done"], 0.0),
        (["sed -i 's/prices.1:./prices/' shop/prices.py", "done"], 1.0),
    ):
        env.reset()
        assert "The first price is left out" in texts(env)[0][1]
        assert not env.step(commands[0])[1]
        _, done, info = env.step(commands[1])
        assert done and info["reward"] == reward, info
    env.close()


def saw(run: AgentRun) -> float:
    return float((run.folder / "seen.txt").read_text() == "nothing")


def client_agent(package: str, *words: str) -> AgentEnv:
    """The program with the client of a package; skips the test if that is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install {package} enables this test")
    command = [sys.executable, str(FIXTURES / "client_agents.py"), *words]
    return built(command=command, time_limit_s=60.0)


def played(env: AgentEnv, answers: Sequence[str]) -> float:
    """The reward of the last of these answers, which must end the episode."""
    env.reset()
    for answer in answers:
        _, done, info = env.step(answer)
    assert done, env.run
    return info["reward"]


@pytest.mark.parametrize("package", some(["openai", "anthropic"], ["openai"]))
def test_the_clients_of_both_apis_read_text_reasoning_and_calls(package: str) -> None:
    """Once whole and once as a stream, by one program: importing a client takes seconds."""
    env = client_agent(package, package, "whole", "stream")
    answers = ["<think>sum</think>I add.\n" + call("add", a=2, b=3), "It is 5."]
    assert played(env, answers * 2) == 1.0


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_the_client_of_the_responses_api_continues_by_name_and_with_items(mode: str) -> None:
    """Both give the model the same prompt, which is that of chat completions."""
    env = client_agent("openai", "responses", mode)
    env.reset()
    env.step("<think>sum</think>I add.\n" + call("add", a=2, b=3))
    system, question, answer, result = env.format_observation({"obs_str": "", "text": {}})
    assert (system, question["content"]) == ({"role": "system", "content": "Use tools."}, "2 + 3?")
    assert (answer["content"], answer["reasoning_content"]) == ("I add.", "sum")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (result["role"], result["content"]) == ("tool", "5")
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"]
    _, done, info = env.step(call("note", input="It is 5."))
    assert done and info["reward"] == 1.0, env.run
