"""Environments of slime's own interface: the question is the prompt, pictures keep their place,
endings are read."""

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from envs.loading import call_build_env
from envs.slime_env import SlimeEnv
from rollout.workers.worker import make_reply

PICTURE = Image.new("RGB", (8, 8), "red")


class Slimes:
    """Answers as the environment of slime's geo3k example does."""

    def __init__(self, first: Any = None, info: dict[str, Any] | None = None) -> None:
        self.first, self.info = first, info or {}

    def reset(self) -> Any:
        return self.first or {}, {"ground_truth_available": True}

    def step(self, response_text: str) -> Any:
        seen = {
            "obs_str": "calc_score result: 0.0.",
            "role": "tool",
            "multi_modal_data": {"images": [PICTURE]},
        }
        return seen, response_text == "stop", {"score": 0.0, "tool_executed": True, **self.info}

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        images = [
            {"type": "image", "image": image} for image in observation["multi_modal_data"]["images"]
        ]
        return {
            "role": "user",
            "content": [*images, {"type": "text", "text": f"Tool: {observation['obs_str']}"}],
        }


def built(env: Any, monkeypatch: pytest.MonkeyPatch, **sample: Any) -> SlimeEnv:
    monkeypatch.setattr(
        "envs.loading.load_env_module",
        lambda path: SimpleNamespace(build_env=lambda sample, args: env),
    )
    given = {
        "metadata": {"task": "t", "seed": 0},
        "label": "3",
        "prompt": None,
        "multimodal_inputs": None,
        **sample,
    }
    return call_build_env(
        "examples.env", SimpleNamespace(**given), SimpleNamespace(env={}, max_turns=3)
    )


def test_the_prompt_is_the_first_observation_and_every_reply_keeps_our_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How much is 1 + 2?"},
    ]
    tools = [{"type": "function", "function": {"name": "calc_score"}}]
    metadata = {"task": "t", "seed": 0, "tools": tools}
    env = built(Slimes(), monkeypatch, prompt=prompt, metadata=metadata)
    first = make_reply(env, env.reset())
    assert (
        first.observation["obs_str"] == "How much is 1 + 2?"
        and env.instruction_prompt == "Be brief."
    )
    assert list(first.tools) == tools
    observation, done, info = env.step("3?")
    reply = make_reply(env, observation, 0.0, done, info)
    assert reply.messages[0]["content"][-1]["text"] == "Tool: calc_score result: 0.0."
    assert reply.messages[0]["content"][0]["image"].size == (8, 8)
    assert observation["multi_modal_data"]["image"] == [PICTURE]
    assert (done, info["reward"], info["valid_action"], info["executed_action"]) == (
        False,
        0.0,
        True,
        "3?",
    )
    assert env.step("stop")[2]["terminated"]
    env.close()


@pytest.mark.parametrize(
    ("said", "terminated", "truncated", "progression"),
    [
        ({"reward": 1.0}, True, False, 1.0),
        ({"truncated": True}, False, True, 0.0),
        ({"progression": 0.5}, True, False, 0.5),
    ],
)
def test_reward_and_ending_come_from_info(
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    terminated: bool,
    truncated: bool,
    progression: float,
) -> None:
    env = built(Slimes({"obs_str": "Begin."}, said), monkeypatch)
    make_reply(env, env.reset())
    observation, done, info = env.step("stop")
    make_reply(env, observation, 0.0, done, info)
    assert (info["terminated"], info["truncated"], info["progression"]) == (
        terminated,
        truncated,
        progression,
    )
