"""The unchanged Codex on templates that refuse a second system message, through slime's hook."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.flags import RolloutFlags
from rollout.data_source import EpisodeSource
from rollout.generate import generate
from rollout.run import close_runtimes, get_runtime
from tests.envs.agent.test_coding_agents import RECIPES
from tests.fixtures.families import family
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine

THOUGHT = {"qwen3.5": "I write.\n</think>\n\n", "glm-4.7": "I write.</think>"}
CALLS = {
    "qwen3.5": "<tool_call>\n<function=exec_command>\n<parameter=cmd>\n{cmd}\n</parameter>\n</function>\n</tool_call>",
    "glm-4.7": "<tool_call>exec_command<arg_key>cmd</arg_key><arg_value>{cmd}</arg_value></tool_call>",
}

GRADE = """
def grade(run):
    return (run.folder / "made.txt").read_text() == "fine\\n"
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 (own template)", "glm-4.7"])
async def test_codex_runs_a_command_that_the_model_writes_in_its_own_form(tmp_path: Path, name: str) -> None:
    program = shutil.which("codex")
    if program is None:
        pytest.skip("codex is not installed; docs/agents.md names its npm package")
    tokenizer = family(name)
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "work").mkdir()
    (tmp_path / "grade.py").write_text(GRADE)
    env = {
        "command": [program, *RECIPES["codex"]["command"][1:]],
        "variables": {"PATH": os.environ["PATH"]},
        "workdir": str(tmp_path / "work"),
        "grader": f"{tmp_path}/grade.py:grade",
        "prompt": "Write the word fine into made.txt.",
        "time_limit_s": 300.0,
    }
    given = {
        "rollout_interaction_env_path": "envs.agent",
        "tasks": ["any"],
        "env": env,
        "rollout_max_context_len": 100_000,
        "rollout_max_response_len": 500,
    }
    kind = name.partition(" ")[0]
    call = CALLS[kind].replace("{cmd}", "echo fine > made.txt")
    answers = [f"{THOUGHT[kind]}{call}", f"{THOUGHT[kind]}Done."]
    async with ScriptedEngine(tokenizer, lambda body, number: answers[min(number, 1)]) as engine:
        args = rollout_args(tmp_path, engine.port, hf_checkpoint=str(tmp_path / "checkpoint"), **given)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        try:
            samples: Any = await generate(args, sample, RolloutFlags.read(args).sampling_params())
            counters = dict((await get_runtime(args)).counters)
        finally:
            await close_runtimes()
    assert len(samples) == 2 and samples[-1].reward == 1.0, [sample.metadata for sample in samples]
    assert counters == {}
    first, second = (tokenizer.decode(body["input_ids"]) for body in engine.requests)
    assert "exec_command" in first and env["prompt"] in first
    assert "Process exited with code 0" in second
