"""Crafter as the agent meets it: parity with the recordings, answers, prompt, options, endings and metrics."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this test")

from crafter import constants

from envs import crafter
from envs.crafter.rules import ACHIEVEMENTS
from envs.crafter.vocabulary import ACTIONS, translate
from envs.errors import ConfigError
from tests.conftest import load_recording

RECORDINGS = ("crafter.json.gz", "crafter_long.json.gz", "crafter_script.json.gz")


def build(seed: int = 0, **options: Any) -> crafter.Crafter:
    sample = SimpleNamespace(metadata={"task": "default", "seed": seed})
    return crafter.build_env(sample, SimpleNamespace(env=options))


def _internals(env: crafter.Crafter) -> dict[str, Any]:
    player = env.world.player
    return {
        "ach": {name: count for name, count in player.achievements.items() if count},
        "inv": {name: count for name, count in player.inventory.items() if count},
        "face": list(player.facing),
        "pos": player.pos.tolist(),
        "sleep": player.sleeping,
        "light": round(env.world.daylight, 6),
    }


@pytest.mark.parametrize("file", RECORDINGS)
def test_every_recorded_step_of_balrog_is_replayed_exactly(file: str) -> None:
    for episode in load_recording(file)["episodes"]:
        env = build(episode["seed"], preset="balrog")
        text = env.reset()["text"]
        assert [text["long_term_context"], text["short_term_context"]] == episode["initial"]
        assert (env.max_steps, env.default_action) == (episode["max_steps"], episode["default_action"])
        assert list(env.actions) == episode["actions"]
        for step in episode["steps"]:
            observation, _, info = env.step(step["a"])
            text = observation["text"]
            assert (text["long_term_context"], text["short_term_context"]) == (step["l"], step["s"])
            assert (info["reward"], info["progression"]) == (step["r"], step["p"])
            assert (info["terminated"], info["truncated"]) == (step["te"], step["tr"])
            assert _internals(env) == step["x"]


def test_answers_are_translated_and_penalized_as_in_verlog() -> None:
    recorded = [e for e in load_recording("verlog_prompts.json.gz")["episodes"] if e["env"] == "crafter"]
    assert recorded
    for episode in recorded:
        env = build(episode["seed"])
        env.reset()
        for step in episode["steps"]:
            _, _, info = env.step(step["response"])
            assert info["valid_action"] == step["is_valid"]
            # Verlog draws one of a diagonal's two directions, and plays random actions while the player sleeps.
            if "-" not in step["response"]:
                assert info["executed_action"] == step["executed"]
            assert (info["reward"] == -0.1) == (step["reward"] == -0.1)


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("move west", "Move West"),
        ("MAKE IRON SWORD.", "Make Iron Sword"),
        ("Move South 3 steps,", "Move South"),
        ("do (collect wood) ", "Do"),
        ("Do(a)(b)", "Do"),
        ("chop_tree", "Do"),
        ("Noop. \nand then Sleep", "Noop"),
        ("Make Crafting Table", "Place Table"),
        ("Move_West", None),
        ("Mine iron", None),
        ("Sleep (now)", None),
        ("Sleep..", None),
        (" Sleep", None),
        ("", None),
    ],
)
def test_answers_are_understood_as_verlog_understands_them(answer: str, action: str | None) -> None:
    assert translate(answer, 0) == action


@pytest.mark.parametrize("answer", ["Move North-West", "move northwest", "Move North West."])
def test_a_diagonal_becomes_its_two_directions_by_turns(answer: str) -> None:
    assert [translate(answer, turn) for turn in range(3)] == ["Move North", "Move West", "Move North"]


def test_a_long_answer_of_open_brackets_is_rejected_in_linear_time() -> None:
    assert translate("Do (x)" + "(" * 1_000_000, 0) is None


def test_the_prompt_lists_only_achievements_that_are_still_open() -> None:
    env = build()
    env.reset()
    title = lambda name: name.replace("_", " ").title()
    listed = lambda: {name for name in ACHIEVEMENTS if f"- {title(name)}\n" in env.instruction_prompt}
    assert listed() == set(ACHIEVEMENTS)
    env.world.player.inventory.update(wood=2)
    _, _, info = env.step("ACTION: Place Table")
    assert info["reward"] == 1.0
    assert listed() == set(ACHIEVEMENTS) - {"place_table"}
    assert (info["metrics"]["achievements"], info["metrics"]["achievement/place_table"]) == (1.0, 1.0)
    assert sum(info["metrics"].values()) == 2.0 and len(info["metrics"]) == 23
    env.reset()
    assert listed() == set(ACHIEVEMENTS)


def test_the_prompt_lists_all_achievements_where_balrog_does() -> None:
    env = build(preset="balrog")
    env.reset()
    before = env.instruction_prompt
    env.world.player.inventory.update(wood=2)
    env.step("Place Table")
    assert env.instruction_prompt == before
    assert "Place Table" in before


def test_the_prompt_says_so_when_everything_is_achieved() -> None:
    env = build()
    env.reset()
    env.world.player.achievements.update(dict.fromkeys(ACHIEVEMENTS, 1))
    _, _, info = env.step("Noop")
    assert (info["progression"], info["reward"]) == (1.0, 1.0)
    assert "You have reached every achievement" in env.instruction_prompt


def test_the_prompt_names_every_cost_and_tool_of_crafters_rules() -> None:
    env = build()
    env.reset()
    lines = dict(line[2:].split(": ", 1) for line in env.instruction_prompt.splitlines() if ": " in line)
    for verb, rules in (("Make", constants.make), ("Place", constants.place)):
        for name, rule in rules.items():
            line = lines[f"{verb} {name.replace('_', ' ').title()}"]
            assert all(f"{amount} {item}" in line for item, amount in rule["uses"].items())
            assert all(f"a {station}" in line for station in rule.get("nearby", ()))
            assert all(ground in line for ground in rule.get("where", ()))
    for material in ("stone", "coal", "iron", "diamond"):
        (tool,) = constants.collect[material]["require"]
        assert f"{tool.replace('_', ' ')} needed" in lines[material]


def test_death_terminates_and_is_told() -> None:
    env = build()
    env.reset()
    env.world.player.health = 1
    env.world.player.inventory.update(food=0, drink=0)
    done, steps = False, 0
    while not done:
        observation, done, info = env.step("Noop")
        steps += 1
        assert steps < 40
    assert (info["terminated"], info["truncated"]) == (True, False)
    assert observation["text"]["long_term_context"].startswith("You died.\n\n\n\nYou see")
    assert info["reward"] == pytest.approx(-0.1)


@pytest.mark.parametrize(("options", "steps"), [({"max_steps": 7}, 7), ({"preset": "balrog", "max_steps": 9}, 9)])
def test_running_out_of_steps_truncates(options: dict[str, Any], steps: int) -> None:
    env = build(**options)
    env.reset()
    infos = [env.step("Noop")[2] for _ in range(steps)]
    assert [info["truncated"] for info in infos] == [False] * (steps - 1) + [True]
    assert not any(info["terminated"] for info in infos)


def test_without_a_limit_the_episode_ends_where_crafter_ends_it() -> None:
    env = build()
    env.reset()
    assert env.max_steps == 10_000
    env.world._step = 9_998
    assert not env.step("Noop")[1]
    _, done, info = env.step("Noop")
    assert done and info["truncated"]


def test_achievements_are_paid_as_they_come_or_all_at_the_end() -> None:
    paid = {}
    for reward in ("native", "achievements", "final"):
        env = build(seed=1, reward=reward, max_steps=60)
        env.reset()
        done, paid[reward] = False, []
        while not done:
            _, done, info = env.step(crafter.expert_action(env))
            paid[reward].append(info["reward"])
    reached = info["metrics"]["achievements"]
    assert reached > 1 and sum(paid["achievements"]) == reached
    assert paid["final"] == [0.0] * (len(paid["final"]) - 1) + [reached]
    assert [round(r) for r in paid["native"] if r >= 0.5] == [1 for r in paid["achievements"] if r]


def test_the_achievements_paid_at_the_end_are_not_lost_by_an_invalid_last_answer() -> None:
    for penalty in (0.25, 0.0):
        env = build(seed=1, reward="final", max_steps=60, format_penalty=penalty)
        env.reset()
        for _ in range(59):
            env.step(crafter.expert_action(env))
        _, done, info = env.step("what?")
        assert done and not info["valid_action"]
        assert info["reward"] == info["metrics"]["achievements"] - penalty > 1


def test_presets_decide_penalty_and_length() -> None:
    for preset, reward, limit in (("verlog", -0.1, 10_000), ("balrog", 0.0, 2000)):
        env = build(preset=preset)
        env.reset()
        assert env.max_steps == limit
        assert env.step("fly away")[2]["reward"] == reward


def test_the_shipped_settings_play() -> None:
    settings = yaml.safe_load((Path(__file__).parents[3] / "custom_configs" / "crafter.yaml").read_text())
    assert settings["rollout_interaction_env_path"] == "envs.crafter"
    (task,) = settings["tasks"]
    env = crafter.build_env(SimpleNamespace(metadata={"task": task, "seed": 0}), SimpleNamespace(env=settings["env"]))
    env.reset()
    assert env.step("ACTION: Move East")[2]["valid_action"]


def test_pictures_are_shown_when_asked_for_and_change_nothing() -> None:
    blind, sighted = build(2), build(2, vlm=True)
    assert "multi_modal_data" not in blind.reset()
    (picture,) = sighted.reset()["multi_modal_data"]["image"]
    assert (picture.size, picture.mode) == ((256, 256), "RGB")
    for step in range(160):
        blind.world.player.health = sighted.world.player.health = 9
        action = list(ACTIONS)[step % 6]
        text, view = blind.step(action)[0]["text"], sighted.step(action)[0]
        assert view["text"] == text
    assert sighted.world.daylight < 0.5
    assert np.asarray(view["multi_modal_data"]["image"][0]).std() > 0


@pytest.mark.parametrize(
    ("metadata", "options", "named"),
    [
        ({"task": "survive", "seed": 0}, {}, "survive"),
        ({"task": "default", "seed": 0}, {"max_steps": 10_001}, "env.max_steps"),
        ({"task": "default", "seed": 0}, {"open_achievments_only": True}, "open_achievements_only"),
        ({"task": "default"}, {}, "seed"),
    ],
)
def test_mistakes_are_refused_by_name(metadata: dict[str, Any], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        crafter.build_env(SimpleNamespace(metadata=metadata), SimpleNamespace(env=options))


def test_the_scripted_player_reaches_most_achievements_through_answers() -> None:
    env = build(5)
    env.reset()
    done = False
    while not done and env._turns < 300:
        _, done, info = env.step(f"THINK: as the script says\nACTION: {crafter.expert_action(env)}")
        assert info["valid_action"]
    assert info["progression"] > 0.5
