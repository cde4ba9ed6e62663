"""Crafter as the agent meets it: parity with the recordings, answers, prompt, options, endings and metrics."""

from typing import Any

import pytest

pytest.importorskip("crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this test")

from crafter import constants

from envs import crafter
from envs.crafter.rules import ACHIEVEMENTS
from envs.crafter.vocabulary import translate
from envs.loading import build_env_from


def build(seed: int = 0, **options: Any) -> crafter.Crafter:
    return build_env_from("envs.crafter", {"task": "default", "seed": seed}, options)


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("MAKE IRON SWORD.", "Make Iron Sword"),
        ("Move South 3 steps,", "Move South"),
        ("do (collect wood) ", "Do"),
        ("chop_tree", "Do"),
        ("Make Crafting Table", "Place Table"),
        ("Move_West", None),
        ("Sleep (now)", None),
        (" Sleep", None),
    ],
)
def test_answers_are_understood_as_verlog_understands_them(answer: str, action: str | None) -> None:
    assert translate(answer, 0) == action


def test_a_diagonal_becomes_its_two_directions_by_turns() -> None:
    assert [translate("move northwest", turn) for turn in range(3)] == ["Move North", "Move West", "Move North"]


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
