"""Environments of verifiers play in verifiers' own Python: the one in VERIFIERS_PYTHON, else the
one of the tests."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.agent import AgentEnv, AgentRun
from envs.errors import EnvironmentFault
from envs.loading import build_env_from
from envs.verifiers import PROGRAM, grade, prepare
from tests.envs.tools.test_tool_env import call

ENVS = Path(__file__).parents[1] / "fixtures" / "verifiers_envs"
PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
LOCAL = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


@functools.cache
def needs(module: str) -> None:
    """Skip where the Python for verifiers lacks a module."""
    if subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(
            f"{PYTHON} has no {module}; set VERIFIERS_PYTHON to a Python with verifiers, as "
            "docs/agents.md says"
        )


def build(name: str = "number-games", seed: int = 0, **options: Any) -> AgentEnv:
    options = {"python": PYTHON, "workdir": str(ENVS), "time_limit_s": 120.0, **options}
    return build_env_from("envs.verifiers", {"task": "any", "seed": seed}, {"id": name, **options})


def play(env: AgentEnv, *answers: str) -> tuple[list[str], float]:
    """The last message of each prompt, and the reward of the episode."""
    try:
        env.reset()
        prompts, rewards, done = (
            [env.format_observation({"obs_str": "", "text": {}})[-1]["content"]],
            [],
            False,
        )
        for answer in answers:
            assert not done
            observation, done, info = env.step(answer)
            prompts.append(observation["obs_str"])
            rewards.append(info["reward"])
        assert done and info["terminated"] and not any(rewards[:-1])
        return prompts[:-1], rewards[-1]
    finally:
        env.close()


def test_the_program_and_what_it_plays_are_written_and_a_failure_is_a_fault(tmp_path: Path) -> None:
    run = AgentRun(
        "any", 3, "", tmp_path, build(args={"kind": "guess"}, examples=2).settings.options
    )
    prepare(run)
    assert (tmp_path / PROGRAM.name).is_file()
    assert '"examples": 2' in (tmp_path / "episode.json").read_text()
    assert grade(run) == 0.0, "a limit ended the episode"
    with pytest.raises(EnvironmentFault, match=r"exit code 1; its last line: no gold$"):
        grade(replace(run, exit_code=1, output="Traceback\nno gold\n"))
    (tmp_path / "result.json").write_text('{"score": 0.25}')
    assert grade(replace(run, exit_code=0)) == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "answers", "prompts", "reward"),
    [
        ("guess", ["1", "4", "3"], ["Guess a number from 1 to 4.", "higher", "lower"], 1.0),
        (
            "tools",
            [call("add", a=20, b=22), "It is 42."],
            ["What is 20 + 22? Use the tool.", "42"],
            1.0,
        ),
        (
            "tools",
            [call("broken", a=1), "no idea"],
            ["What is 20 + 22? Use the tool.", "this tool is broken"],
            0.0,
        ),
        (
            "purse",
            [call("put", coins=5), "done"],
            ["Fill the purse with 5.", "The purse holds 5."],
            1.0,
        ),
        ("once", [""], ["Say 1."], 0.0),
    ],
)
def test_every_request_is_a_turn_and_the_rubric_pays(
    kind: str, answers: list[str], prompts: list[str], reward: float
) -> None:
    needs("verifiers.types, datasets")
    assert play(build(args={"kind": kind}, seed=2), *answers) == (prompts, reward)


@pytest.mark.slow
def test_the_held_out_split_is_played_and_a_failed_rollout_is_a_fault() -> None:
    needs("verifiers.types, datasets")
    assert play(build(args={"kind": "once"}, split="eval"), "2") == (["Say 2."], 1.0)
    with pytest.raises(EnvironmentFault, match="the rollout failed: InfraError"):
        play(build(args={"kind": "broken"}), "1")
    with pytest.raises(EnvironmentFault, match="taskset 'no-such' not found"):
        play(build("no-such"), "1")


@pytest.mark.slow
def test_a_taskset_is_played_with_its_tools(tmp_path: Path) -> None:
    """verifiers starts a chat program with uv, which installs its packages from the network the
    first time."""
    needs("verifiers.v1, uv")
    variables = {"HOME": str(tmp_path), "PYTHONPATH": "{folder}"}
    passed = [name for name in ("SSL_CERT_FILE",) if name in os.environ]
    env = build(
        "sums-v1",
        seed=19,
        args={**LOCAL, "taskset": {"size": 16}},
        variables=variables,
        pass_env=passed,
    )
    prompts, reward = play(env, call("calc_add", a=3, b=4), "It is 7.")
    assert prompts == ["What is 3 + 4?", "7"] and reward == 1.0
