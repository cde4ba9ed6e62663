"""The examples of docs/tools.md are tools that load and run."""

import re
from pathlib import Path

import yaml

from envs.loading import build_env_from
from tests.envs.tools.test_tool_env import call

PAGE = Path(__file__).parents[3] / "docs" / "tools.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_load_and_run(tmp_path: Path) -> None:
    function, state = blocks("python")
    (tmp_path / "my_tools.py").write_text(function)
    (tmp_path / "state.py").write_text(state)
    (tmp_path / "questions.jsonl").write_text('{"question": "50 F?", "answer": "10.0"}\n')
    config, _ = map(yaml.safe_load, blocks("yaml"))
    options = config["env"] | {"data": str(tmp_path / "questions.jsonl")}
    options["tools"] = [str(tmp_path / "my_tools.py"), str(tmp_path / "state.py")]
    env = build_env_from(
        config["rollout_interaction_env_path"], {"task": config["tasks"][0], "seed": 0}, options
    )
    assert env.reset()["obs_str"] == "50 F?\n\nThe notebook is empty."
    observation, *_ = env.step(call("celsius", fahrenheit=50) + call("notebook", line="ten"))
    assert observation["obs_str"] == "celsius: 10.0\n\nnotebook: 1 lines"
    assert env.step("Answer: 10.0")[2]["reward"] == 1.1
