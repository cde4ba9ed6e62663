"""Environments of OpenEnv servers, played on a small server; their faults are in
test_openenv_faults.py."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError
from tests.envs.tools.test_tool_env import call

pytest.importorskip(
    "websockets", reason="websockets is not installed; pip install 'slime-verlog[openenv]'"
)

from tests.fixtures.openenv_play import SEED, built, started, wait_for_sessions
from tests.fixtures.openenv_server import TinyServer

FIRST = "text: Guess my number, from 1 to 14.\nguesses: 0"


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer() as server:
        yield server


def steps(server: TinyServer) -> list[Any]:
    return [request["data"] for request in server.requests if request["type"] == "step"]


def test_a_game_is_played_to_its_end_without_its_state_or_metadata(server: TinyServer) -> None:
    env = built(server, reset={"level": 2})
    assert env.reset()["obs_str"] == FIRST
    observation, done, info = env.step("THINK: in the middle\nACTION: 5")
    assert observation["obs_str"] == "text: lower\nguesses: 1" and not done
    assert (info["reward"], info["valid_action"], info["executed_action"]) == (0.0, True, "5")
    observation, done, info = env.step("3")
    assert done and info["terminated"] and not info["truncated"]
    assert (info["reward"], info["progression"]) == (1.0, 1.0)
    with pytest.raises(EpisodeOverError):
        env.step("3")
    wait_for_sessions(server, 0)
    assert server.requests == [
        {"type": "reset", "data": {"seed": SEED, "level": 2}},
        {"type": "step", "data": {"message": "5"}},
        {"type": "step", "data": {"message": "3"}},
        {"type": "close"},
    ]


def test_an_action_that_the_server_refuses_is_an_invalid_answer(server: TinyServer) -> None:
    env = started(server)
    observation, done, info = env.step("ACTION: three")
    assert (
        observation["obs_str"] == f"Nothing was done: message: not a number.\n{FIRST}" and not done
    )
    assert (info["reward"], info["valid_action"], info["executed_action"]) == (
        -0.1,
        False,
        "nothing",
    )
    assert env.step("x" * (1 << 21))[2]["valid_action"] is False, (
        "a frame that servers would not take"
    )
    assert env.step("\ud83d")[2]["valid_action"] is False and steps(server)[-1] == {"message": "?"}
    assert env.step("3")[1], "the episode went on"
    env = started(server, actions=["1", "3", "word"], default_action="1")
    observation, _, info = env.step("ACTION: 12")
    assert (observation["obs_str"], info["executed_action"]) == ("text: higher\nguesses: 1", "1")
    assert not env.step("word")[2]["valid_action"]
    assert env.step("ACTION: 3")[1]


def test_an_exception_of_the_environment_is_a_fault_or_an_invalid_answer_as_declared(
    server: TinyServer,
) -> None:
    with pytest.raises(
        EnvironmentFault, match="answered step with EXECUTION_ERROR: division by zero"
    ):
        started(server).step("raise")
    env = started(server, execution_error="invalid")
    assert env.step("raise")[2]["valid_action"] is False
    assert env.step("3")[1]


@pytest.mark.parametrize(
    ("game", "options", "answer", "action"),
    [
        ("guess", {}, '```json\n{"message": "4"}\n```', {"message": "4"}),
        ("guess", {"action": "message"}, '{"message": "4"}', {"message": '{"message": "4"}'}),
        ("grid", {}, "ACTION: Left", {"move": "left"}),
        ("bid", {}, "ACTION: 12", {"price": 12}),
        ("bid", {}, 'ACTION: {"price": 12, "lot": "b"}', {"price": 12, "lot": "b"}),
        ("bid", {}, "ACTION: much", None),
        ("bid", {"action": "tests.envs.openenv.test_openenv.bid"}, "I bid 12", {"price": 12}),
    ],
)
def test_answers_become_actions(
    game: str, options: dict[str, Any], answer: str, action: Any
) -> None:
    with TinyServer(game) as server:
        env = started(server, **options)
        info = env.step(answer)[2]
        assert steps(server) == ([action] if action else [])
        assert not info["valid_action"] or action is not None


def bid(text: str) -> dict[str, int] | None:
    words = [word for word in text.split() if word.isdecimal()]
    return {"price": int(words[0])} if words else None


def halves(observation: Mapping[str, Any]) -> dict[str, str]:
    return {
        "long_term_context": observation["text"],
        "short_term_context": f"guess {observation['guesses']}",
    }


def test_observations_become_texts_and_pictures(server: TinyServer) -> None:
    env = built(server, observation="{{ guesses }} guesses{% if text %}, {{ text }}{% endif %}")
    assert env.reset()["obs_str"] == "0 guesses, Guess my number, from 1 to 14."
    env.close()
    env = built(server, observation="tests.envs.openenv.test_openenv:halves", vlm=True)
    observation = env.reset()
    assert observation["text"]["short_term_context"] == "guess 0"
    assert env.step("5")[0]["multi_modal_data"]["image"][0].getpixel((1, 1)) == (1, 1, 1)
    with pytest.raises(
        EnvironmentFault,
        match="env.observation cannot be rendered: 'texts' is undefined; .* text, ",
    ):
        built(server, observation="{{ texts }}").reset()
    with pytest.raises(EnvironmentFault, match="picture 'text' is not base64"):
        built(server, picture="text", vlm=True).reset()
    env.close()
    wait_for_sessions(server, 0)


def test_the_tools_of_an_mcp_environment_are_called_through_steps() -> None:
    with TinyServer("tools") as server:
        env = built(server)
        assert env.reset()["obs_str"] == FIRST
        assert env.tools[0]["function"]["name"] == "guess"
        observation, done, info = env.step(call("guess", number=9))
        assert (observation["obs_str"], done, info["reward"]) == ("guess: lower", False, 0.0)
        observation, _, info = env.step(call("guess", number="x"))
        assert "is not of type 'integer'" in observation["obs_str"] and info["reward"] == -0.1
        observation, _, info = env.step(call("guess", number=-1))
        assert (
            observation["obs_str"] == "guess: error: negative"
            and info["metrics"]["tool_errors"] == 1
        )
        observation, done, info = env.step(call("guess", number=3) + call("guess", number=4))
        assert done and info["terminated"] and (info["reward"], info["progression"]) == (1.0, 1.0)
        assert (
            observation["obs_str"]
            == "guess: right\n\nguess: error: the episode is over, so the tool was not called"
        )
        with pytest.raises(EpisodeOverError):
            env.step("more")
        wait_for_sessions(server, 0)
        assert [request["type"] for request in server.requests[-6:]] == [
            "step",
            "reset",
            *["step"] * 3,
            "close",
        ]
        env.reset()
        _, done, info = env.step("I give up.")
        assert done and info["terminated"] and info["reward"] == 0.0


def test_a_setting_that_means_nothing_for_tools_is_refused() -> None:
    with (
        TinyServer("tools") as server,
        pytest.raises(ConfigError, match="env.binary_reward: the server offers tools"),
    ):
        built(server, binary_reward=True, max_steps=5)
