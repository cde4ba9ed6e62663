"""ALFWorld by verl-agent's protocol."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.alfworld import FAMILIES
from envs.alfworld.verl_agent import PROMPTS, load_templates, read_answer, write_prompt

TEMPLATES = '''
ALFWORLD_TEMPLATE_NO_HIS = """See {current_observation}. Do one of {admissible_actions}."""
ALFWORLD_TEMPLATE = """{task_description}|{step_count}|{history_length}|{action_history}|{current_step}|"""\\
    """{current_observation}|{admissible_actions}"""
'''


def write_checkout(folder: Path) -> Path:
    path = folder / PROMPTS
    path.parent.mkdir(parents=True)
    path.write_text("import a_package_that_nobody_has\n" + TEMPLATES)
    return folder


def test_a_first_prompt_has_no_past_and_help_is_not_listed(tmp_path: Path) -> None:
    templates = load_templates(write_checkout(tmp_path))
    assert (
        write_prompt(templates, [], "a room", ["help", "look", "wait"])
        == "See a room. Do one of 'look'\n 'wait'."
    )


def test_later_prompts_show_the_task_and_the_last_two_steps(tmp_path: Path) -> None:
    templates = load_templates(write_checkout(tmp_path))
    past = [("Hall. Your task is to: wash.\n", "look"), ("a sink", "wait"), ("a cup", "go")]
    steps = "[Observation 2: 'a sink', Action 2: 'wait']\n[Observation 3: 'a cup', Action 3: 'go']"
    assert write_prompt(templates, past, "a room", ["look"]) == f"wash.|3|2|{steps}|4|a room|'look'"


GOOD = "<think>so</think><action> Go To Desk 1 </action>"
ANSWERS = {
    GOOD: ("go to desk 1", True),
    GOOD + "<action>look</action>": ("go to desk 1", True),
    GOOD.upper(): ("go to desk 1", False),
    GOOD.replace("<think>", ""): ("go to desk 1", False),
    GOOD.replace("so", "\u4e00"): ("go to desk 1", False),
    "</action>" + GOOD: ("", True),
    "x" * 40: ("x" * 30, False),
    "": ("", False),
}


def test_answers_are_read_by_their_tags() -> None:
    for response, expected in ANSWERS.items():
        action, valid, span = read_answer(response)
        assert (action, valid) == expected
        assert span is None or response[slice(*span)].lower() == action


@pytest.fixture
def rooms() -> Any:
    pytest.importorskip(
        "alfworld", reason="ALFWorld: pip install 'slime-verlog[alfworld]' enables this test"
    )
    pytest.importorskip(
        "fast_downward", reason="ALFWorld needs 'slime-verlog[alfworld]', planner and all"
    )
    from tests.fixtures import alfworld_rooms

    return alfworld_rooms


def write_data(rooms: Any, folder: Path) -> Path:
    """A split `valid_seen` with two games of each family, one of the first family unsolvable."""
    for number in range(2):
        for family in FAMILIES:
            game = {
                **rooms.make_game(family, number),
                "solvable": (family, number) != (FAMILIES[0], 1),
            }
            rooms.write_game(folder, "valid_seen", f"{family}-Mug-None-Desk-{number}", game)
    for game in folder.rglob("game.tw-pddl"):
        game.with_name("traj_data.json").write_text(
            f'{{"task_type": "{game.parts[-3].partition("-")[0]}"}}'
        )
    return folder


def build(rooms: Any, folder: Path, task: str = "all", **options: Any) -> Any:
    env = {
        "preset": "verl_agent",
        "verl_agent": str(write_checkout(folder / "checkout")),
        "data_path": str(write_data(rooms, folder / "data")),
        "split": "valid_seen",
    }
    sample = SimpleNamespace(metadata={"task": task, "seed": 1000})
    return rooms.build_env(sample, SimpleNamespace(env={**env, **options}))


def test_the_expert_wins_ten_and_the_last_step_names_the_family(rooms: Any, tmp_path: Path) -> None:
    env = build(rooms, tmp_path, "look")
    observation = env.reset()
    assert env.whole_prompts and env.format_observation(observation)["content"].startswith(
        "See -= Welcome"
    )
    rewards, done, info = [], False, {}
    while not done:
        observation, done, info = env.step(rooms.expert_action(env))
        rewards.append(info["reward"])
        assert (
            info["valid_action"]
            and info["executed_action"] in env.format_observation(observation)["content"]
        )
    assert rewards == [0.0] * (len(rewards) - 1) + [10.0]
    assert info["metrics"] == {"success/look_at_obj_in_light": 1.0} and info["terminated"]


def test_an_answer_in_bad_form_is_charged_and_still_played(rooms: Any, tmp_path: Path) -> None:
    env = build(rooms, tmp_path, max_steps=3)
    env.reset()
    observation, _, info = env.step("<action>inventory</action>")
    assert (info["valid_action"], info["reward"], info["executed_action"]) == (
        False,
        -0.1,
        "inventory",
    )
    assert "carrying" in observation["obs_str"]
    observation, _, info = env.step("<think></think><action>fly</action>")
    assert (info["valid_action"], info["reward"], observation["obs_str"]) == (
        True,
        0.0,
        "Nothing happens.",
    )
    _, done, info = env.step("look")
    assert (done, info["truncated"], info["action"], list(info["metrics"].values())) == (
        True,
        True,
        None,
        [0.0],
    )
