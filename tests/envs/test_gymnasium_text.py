"""Any gymnasium environment with text becomes one of ours: observations, actions, endings,
settings."""

from typing import Any

import gymnasium
import pytest

from envs.errors import EnvironmentFault, MissingDependencyError
from envs.gymnasium_text import GymnasiumText, name_colors
from envs.loading import build_env_from

WORLDS = "tests.envs.textworld.text_worlds"
CORRIDOR, ECHO = f"{WORLDS}:Corridor", f"{WORLDS}:Echo"


def build(seed: int = 0, task: str = "play", **options: Any) -> GymnasiumText:
    return build_env_from("envs.gymnasium_text", {"task": task, "seed": seed}, options)


def test_a_plain_text_environment_works_by_import_path_alone() -> None:
    env = build(id=CORRIDOR)
    text = env.reset()["obs_str"]
    assert text.startswith("you stand at 1 of 8")
    assert list(env.actions) == ["step back", "step ahead", "wait"]
    assert env.mission in env.instruction_prompt and env.mission.startswith("reach door")
    observation, done, info = env.step("THINK: on\nACTION: Step_Ahead")
    assert (info["executed_action"], info["valid_action"], done) == ("step ahead", True, False)
    assert observation["obs_str"].startswith("you stand at 2")


@pytest.mark.parametrize(
    ("shape", "options", "long_term", "short_term"),
    [
        ("dict", {}, "you stand at 1", ""),
        ("two_texts", {}, "sound: silence\nview: you stand at 1", ""),
        ("balrog", {}, "you stand at 1", "turn 0"),
        ("array", {"describe": f"{WORLDS}.describe_places"}, "at 1, door", ""),
    ],
)
def test_observations_of_many_shapes_become_text(
    shape: str, options: dict, long_term: str, short_term: str
) -> None:
    text = build(id=CORRIDOR, kwargs={"shape": shape}, **options).reset()["text"]
    assert (
        text["long_term_context"].startswith(long_term) and text["short_term_context"] == short_term
    )


def test_free_text_goes_to_the_environment_as_it_was_said() -> None:
    env = build(id=ECHO, format_penalty=0.5)
    env.reset()
    assert env.actions == () and "own" in env.instruction_prompt
    assert env.step("THINK: hm\nACTION: open the box")[0]["obs_str"] == "you said: open the box"
    observation, _, info = env.step("ACTION: 42!")
    assert (observation["obs_str"], info["reward"], info["valid_action"]) == (
        "you said: nothing",
        -0.5,
        False,
    )
    assert env.step("end")[1]


def test_the_users_actions_describe_or_restrict_the_environments() -> None:
    named = build(id=CORRIDOR, actions={"back": "go left", "on": "go right", "stay": "do nothing"})
    named.reset()
    assert "on: go right" in named.instruction_prompt
    assert named.step("ON")[0]["obs_str"].startswith("you stand at 2")
    few = build(id=ECHO, actions=["hello", "end"], default_action="hello")
    few.reset()
    assert not few.step("something else")[2]["valid_action"]
    assert few.step("end")[1]


def test_a_missing_package_of_the_environment_is_named() -> None:
    gymnasium.register("NeedsMore-v0", "a_package_that_is_not_there:Env")
    try:
        with pytest.raises(MissingDependencyError, match="a_package_that_is_not_there"):
            build(id="NeedsMore-v0")
    finally:
        del gymnasium.registry["NeedsMore-v0"]


def test_an_observation_that_is_no_text_is_the_environments_fault() -> None:
    with pytest.raises(EnvironmentFault, match="as the text of an observation"):
        build(id=CORRIDOR, describe="builtins.len").reset()


@pytest.mark.parametrize(
    ("name", "first", "answers"),
    [
        ("FrozenLake-v1", "[red S]FFF\nFHFH\nFFFH\nHFFG", 4),
        ("CliffWalking-v", "\nx  C  C", 4),
        ("Taxi-v3", "[yellow  ]", 6),
        ("Blackjack-v1", "20, 7, 0", 2),
    ],
)
def test_environments_without_text_are_played_by_what_they_print_or_by_their_numbers(
    name: str, first: str, answers: int
) -> None:
    env = build(seed=1, id=max(known for known in gymnasium.registry if known.startswith(name)))
    assert first in env.reset()["obs_str"] and len(env.actions) == answers
    done = False
    for _ in range(3):
        if not done:
            observation, done, info = env.step("ACTION: 1")
            assert observation["obs_str"] and info["valid_action"]


def test_colors_become_words_and_other_escapes_go() -> None:
    assert name_colors("\x1b[2J\x1b[43m \x1b[0m|\x1b[1;34mB\x1b[0m") == "[yellow  ]|[blue B]"
