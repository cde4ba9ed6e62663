"""BALROG through its own `make_env`, with a stand-in of the same shape; test_contract.py plays the
real package."""

import sys
from typing import Any

import pytest

from envs import balrog
from envs.errors import ConfigError, MissingDependencyError
from envs.loading import build_env_from
from tests.envs.balrog_stand_in import as_env


def build(
    task: str = "babyai/BabyAI-MixedTrainLocal-v0/goto", seed: int = 0, **options: Any
) -> balrog.Balrog:
    return build_env_from(as_env.__name__, {"task": task, "seed": seed}, options)


def test_without_the_package_one_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "balrog", None)
    for name in [name for name in sys.modules if name.startswith("balrog.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError) as error:
        build_env_from("envs.balrog", {"task": "babyai/x", "seed": 0})
    assert (
        str(error.value) == balrog.INSTALL
        and "pip install 'balrog @ git+https://" in balrog.INSTALL
    )


def test_an_unknown_task_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="did you mean babyai/BabyAI-MixedTrainLocal-v0/goto"):
        build("goto")


def test_a_task_that_the_package_cannot_make_is_refused_with_its_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot make textworld/lost: KeyError: .*balrog-post-install"
    ):
        build("textworld/lost").reset()


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("MiniHack-Boxoban-Hard-v0", MissingDependencyError, "please download maps"),
        ("MiniHack-Quest-Hard-v0", MissingDependencyError, "raqm_layout.*pip install 'pillow<13'"),
        (
            "minihack/MiniHack-Castle-v0",
            ConfigError,
            "its tasks are MiniHack-Corridor-R3-v0, MiniHack-Boxoban-Hard-v0",
        ),
    ],
)
def test_what_keeps_a_family_from_starting_is_said_in_a_sentence(
    task: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"cannot make minihack/.*{message}"):
        build(task).reset()


def test_an_invalid_answer_executes_the_default_and_balrogs_preset_remarks_on_it() -> None:
    for preset, penalty in (("verlog", -0.1), ("balrog", 0.0)):
        env = build(preset=preset)
        env.reset()
        observation, _, info = env.step("ACTION: fly")
        assert (info["valid_action"], info["executed_action"], info["reward"]) == (
            False,
            "Wait",
            penalty,
        )
        remark = "Your previous output did not contain a valid action. Defaulted to action: Wait"
        assert (remark in observation["obs_str"]) == (preset == "balrog")


def test_a_listed_action_that_the_game_refuses_is_invalid() -> None:
    env = build()
    env.reset()
    info = env.step("ACTION: 68")[2]
    assert (info["valid_action"], info["executed_action"], env._turns) == (False, "Wait", 1)


@pytest.mark.parametrize(
    "command",
    [
        "save",
        "script x",
        "quit",
        "?quit",
        "(save)",
        "look! then save?",
        "\x00",
        "a. b",
        "?" * 101,
        "",
    ],
)
def test_where_anything_is_a_command_the_interpreter_is_still_out_of_reach(command: str) -> None:
    env = build("treasure_hunter")
    env.reset()
    assert env.actions == ()
    assert env.step("take lamp")[2]["executed_action"] == "take lamp"
    assert env.step(command)[2]["executed_action"] == "help"


def test_textworlds_running_score_is_paid_once_in_training() -> None:
    paid = {}
    for preset in ("verlog", "balrog"):
        env = build("treasure_hunter", preset=preset)
        env.reset()
        paid[preset] = [env.step(action)[2]["reward"] for action in ("right", "left", "right")]
    assert paid == {"verlog": [1.0, 0.0, 1.0], "balrog": [1.0, 1.0, 2.0]}
