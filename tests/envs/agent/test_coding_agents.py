"""The coding agents of docs/agents.md, as it starts them, correct a small repository in the
sandbox."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from envs.loading import build_env_from
from tests.envs.swe.tiny_repository import TASK, needs_sandbox, tiny_options
from tests.envs.tools.test_tool_env import call

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
RECIPES: dict[str, dict[str, Any]] = {
    name: yaml.safe_load(text)
    for name, text in re.findall(
        r'```yaml title="(\w+)"\n(command: .*?)```', PAGE.read_text("utf-8"), re.DOTALL
    )
}
CORRECT = "sed -i 's/prices.1:./prices/' shop/prices.py"
SHELLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
}
"""The agents' tools for a command, and the parameter that takes it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_it_works_in_the_sandbox_and_every_request_is_a_turn(name: str) -> None:
    needs_sandbox()
    if not (shutil.which(name) or "").startswith("/usr/"):
        pytest.skip(f"{name} is not installed below /usr; docs/agents.md names its npm package")
    keys = {
        "prepare": "envs.agent.swe.prepare",
        "grader": "envs.agent.swe.grade",
        "grade_timeout_s": 240.0,
    }
    keys |= {"options": tiny_options(), "sandbox": True, "time_limit_s": 240.0, **RECIPES[name]}
    env = build_env_from("envs.agent", {"task": TASK, "seed": 0}, keys)
    env.reset()
    assert "The first price is left out" in str(env.format_observation({"obs_str": "", "text": {}}))
    done, is_corrected, info = False, False, {}
    while not done:
        tools = [tool["function"]["name"] for tool in env.tools]
        shell = next((tool for tool in tools if tool in SHELLS), None)
        answer = "Done."
        if shell is not None and not is_corrected:
            answer, is_corrected = (
                "I try.\n" + call(shell, **{SHELLS[shell]: CORRECT, "description": "correct"}),
                True,
            )
        _, done, info = env.step(answer)
    env.close()
    assert is_corrected and info["reward"] == 1.0, (env.run.output, info)
    assert info["metrics"]["refused"] == 0.0
