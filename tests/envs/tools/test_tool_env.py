"""The tool environment: calls run, results shown, final answers graded, and nothing that a tool
does stops it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import EnvironmentFault, EpisodeOverError
from envs.loading import build_env_from
from envs.tools import Tool, ToolEnv, ToolEpisode
from tests.envs.tools import toolbox

TOOLBOX = "tests.envs.tools.toolbox"
ASK = [{"question": "What is 2 + 3?", "answer": "5"}]


def build(seed: int = 0, **options: Any) -> ToolEnv:
    options = {"tools": [TOOLBOX], "data": ASK, **options}
    return build_env_from("envs.tools", {"task": "sums", "seed": seed}, options)


def started(**options: Any) -> ToolEnv:
    env = build(**options)
    env.reset()
    return env


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_runs_and_its_result_is_shown_in_both_histories() -> None:
    env = build(grader="exact")
    first = env.reset()
    assert env.format_observation(first) == [{"role": "user", "content": "What is 2 + 3?"}]
    assert first["text"] == {"long_term_context": "", "short_term_context": "What is 2 + 3?"}
    answer = "I add them.\n" + call("add", a=2, b=3)
    observation, done, info = env.step(answer)
    assert not done and info["valid_action"] and info["reward"] == 0.0
    assert env.format_observation(observation) == [
        {"role": "tool", "content": "5", "tool_call_id": "call00100"}
    ]
    assert observation["text"] == {
        "long_term_context": "add: 5",
        "short_term_context": "What is 2 + 3?",
    }
    assert (
        answer[slice(*info["action_span"])]
        == info["action"]
        == info["executed_action"]
        == call("add", a=2, b=3)
    )
    observation, done, info = env.step("So the answer is: 5")
    assert done and info["terminated"] and info["reward"] == info["progression"] == 1.0
    assert info["executed_action"] == info["action"] == "5"
    with pytest.raises(EpisodeOverError):
        env.step("5")


def test_several_calls_run_in_order_with_one_message_each() -> None:
    env = started()
    text = call("counter") + "\n" + call("pay", amount=0.5) + "\n" + call("counter", step=4)
    observation, _, info = env.step(text)
    messages = env.format_observation(observation)
    assert [m["content"] for m in messages] == ["count 1", '{"paid": 0.5}', "count 5"]
    assert [m["role"] for m in messages] == ["tool"] * 3
    assert len({m["tool_call_id"] for m in messages}) == 3 and {
        len(m["tool_call_id"]) for m in messages
    } == {9}
    assert info["reward"] == 0.5
    assert info["metrics"] == {"tool_calls": 3.0, "pay/amount": 0.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
        (call("add", a=1) * 5, "at most 4 calls"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999 is too large"),
        ("<think>\nhm", "neither a call nor an answer"),
    ],
)
def test_an_invalid_answer_runs_nothing_costs_the_penalty_and_is_explained(
    text: str, words: str
) -> None:
    env = started()
    observation, done, info = env.step(text)
    assert not done and not info["valid_action"]
    assert info["reward"] == -0.1 and info["executed_action"] == env.default_action
    assert words in observation["obs_str"]
    assert env.format_observation(observation) == [
        {"role": "user", "content": observation["obs_str"]}
    ]
    observation, *_ = env.step(call("counter"))
    assert observation["obs_str"] == "counter: count 1", (
        "nothing of the invalid answer was executed"
    )


MISHAPS = {
    "raise": "ValueError: no luck",
    "timeout": "asleep",
    "hang": "did not end within 1 s",
    "broken picture": "cannot be read",
    "object": "returned a object, which has no text",
}


@pytest.mark.parametrize("how", MISHAPS)
def test_a_failing_call_is_shown_to_the_model_and_counted(how: str) -> None:
    toolbox.release.clear()
    env = started(timeout_s=1.0 if how == "hang" else 20.0)
    observation, done, info = env.step(call("misbehave", how=how))
    toolbox.release.set()
    assert not done and info["valid_action"], "the model's call was right"
    assert (
        observation["obs_str"].startswith("misbehave: error: ")
        and MISHAPS[how] in observation["obs_str"]
    )
    assert info["reward"] == 0.0
    assert info["metrics"]["tool_errors"] == 1.0
    assert info["metrics"].get("tool_timeouts", 0.0) == float(how == "hang")
    observation, *_ = env.step(call("add", a=1))
    assert observation["obs_str"] == "add: 1"


def test_the_calls_of_one_turn_share_its_time() -> None:
    toolbox.release.clear()
    env = started(turn_timeout_s=0.2, max_calls=2)
    observation, _, info = env.step(call("misbehave", how="hang") + call("add", a=1))
    toolbox.release.set()
    assert (
        "add: error: not run" in observation["obs_str"] and info["metrics"]["tool_timeouts"] == 2.0
    )


def test_a_stateful_tool_lives_for_one_episode_and_is_always_released(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tools = [
        {
            "path": f"{TOOLBOX}:Counter",
            "config": {"log": str(log), "greeting": "The counter stands at 0."},
        }
    ]
    env = build(tools=tools)
    first = env.reset()
    assert first["obs_str"] == "What is 2 + 3?\n\nThe counter stands at 0."
    env.step(call("counter", step=3))
    _, done, info = env.step("done")
    assert done and info["reward"] == pytest.approx(0.3), "calc_reward is paid with the last turn"
    assert log.read_text().split() == ["create", "execute", "release"]
    env.reset()
    env.close()
    env.close()
    assert log.read_text().split()[3:] == ["create", "release"]
    with pytest.raises(
        EnvironmentFault, match="could not begin the episode: RuntimeError: no counter left"
    ):
        build(tools=[{**tools[0], "config": {"log": str(log), "fail_create": True}}]).reset()
    assert log.read_text().split()[-1] == "release"


class Stock(Tool):
    """Takes from what its question and its entry bring."""

    async def create(self, episode: ToolEpisode) -> str:
        self.episode = episode
        return ""

    async def execute(self) -> list[int]:
        """Take one of each."""
        lists = (self.episode.metadata["cards"], self.episode.answer, self.config["more"])
        return [values.pop() for values in lists]


def test_what_a_tool_changes_is_unchanged_in_the_next_episode(tmp_path: Path) -> None:
    row = {"question": "?", "answer": [1, 2], "metadata": {"cards": [3, 4]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    entry = {"path": f"{__name__}:Stock", "config": {"more": [5, 6]}}
    for _ in range(2):
        env = build(data=str(tmp_path / "rows.jsonl"), tools=[entry])
        for _ in range(2):
            env.reset()
            assert env.step(call("stock"))[0]["obs_str"] == "stock: [4, 2, 6]"


def test_a_wrong_answer_may_be_corrected_answer_retries_times() -> None:
    env = started(grader="exact", answer_retries=1)
    observation, done, info = env.step("Answer: 4")
    assert (
        not done
        and info["reward"] == 0.0
        and info["valid_action"]
        and "wrong" in observation["obs_str"]
    )
    _, done, info = env.step("Answer: 6")
    assert done and info["terminated"] and info["reward"] == 0.0
    env = started(grader="exact", answer_retries=1)
    env.step("Answer: 4")
    assert env.step("Answer: 5")[2]["reward"] == 1.0


def graded_by_words(answer: str, question: Any) -> tuple[float, str]:
    return (1.0, "") if answer == question.answer else (0.2, f"Not {answer}; think of fingers.")


def bad_grader(answer: str, question: Any) -> Any:
    return "very good" if answer == "5" else np.float32(0.5) if answer == "6" else 1 / 0


def test_a_custom_grader_gives_score_and_feedback() -> None:
    env = started(grader=f"{__name__}:graded_by_words", answer_retries=1)
    observation, _, info = env.step("4")
    assert observation["obs_str"] == "Not 4; think of fingers." and info["reward"] == 0.0
    assert env.step("3")[2]["reward"] == 0.2
    for answer, words in (("5", "not a number"), ("4", "ZeroDivisionError")):
        with pytest.raises(EnvironmentFault, match=words):
            started(grader=f"{__name__}:bad_grader").step(answer)
    assert started(grader=f"{__name__}:bad_grader").step("6")[2]["reward"] == 0.5


def test_tools_are_shown_by_the_template_or_by_the_prompt() -> None:
    env = started()
    assert [schema["function"]["name"] for schema in env.tools][:2] == ["add", "paint"]
    assert "<tools>" not in env.instruction_prompt
    env = started(tools_in="prompt")
    assert (
        env.tools == ()
        and '{"name": "add"' in env.instruction_prompt
        and "<tool_call>" in env.instruction_prompt
    )
    observation, *_ = env.step(call("add", a=1))
    assert env.format_observation(observation) == [{"role": "user", "content": "Result of add:\n1"}]


ADD_OF_THE_ROW = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum, as this data set puts it.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


@pytest.mark.parametrize(
    ("of_sample", "of_row"),
    [
        ({"tools": [ADD_OF_THE_ROW]}, {}),
        ({}, {"tools": json.dumps([ADD_OF_THE_ROW])}),
        ({}, {"metadata": {"tools": [ADD_OF_THE_ROW["function"]]}}),
    ],
)
def test_a_sample_chooses_its_tools_and_their_schemas(
    of_sample: dict[str, Any], of_row: dict[str, Any]
) -> None:
    metadata = {"task": "sums", "seed": 0, **of_sample}
    env = build_env_from(
        "envs.tools", metadata, {"tools": [TOOLBOX], "data": [{**ASK[0], **of_row}]}
    )
    env.reset()
    assert [schema["function"] for schema in env.tools] == [ADD_OF_THE_ROW["function"]]
    assert env.step(call("add", a=2))[0]["obs_str"] == "add: 2"
    for text, words in (
        (call("paint", colour="red"), "there is no tool 'paint'; there are add"),
        (call("add"), "'a'"),
    ):
        assert words in env.step(text)[0]["obs_str"]
    assert "'b' is not an argument" in env.step(call("add", a=2, b=3))[0]["obs_str"], (
        "the row's schema counts"
    )
