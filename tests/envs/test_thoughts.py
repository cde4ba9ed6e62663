"""What scripted players think: what they name is really seen, and the reason they give is what the
plan does."""

import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from envs import babaisai, crafter
from envs.babaisai.levels import TASKS
from tests.cases import some


def play(
    module: ModuleType, task: str, seed: int, most: int = 100, **options: Any
) -> Iterator[tuple[Any, str, str, str]]:
    """Follow the expert: the environment, what it shows, the thought and the action, before each
    step."""
    env = module.build_env(
        SimpleNamespace(metadata={"task": task, "seed": seed}), SimpleNamespace(env=options)
    )
    observation, done = env.reset(), False
    for _ in range(most):
        thought, action = module.explain_action(env), module.expert_action(env)
        yield env, observation["obs_str"], thought, action
        observation, done, info = env.step(action)
        if done:
            break
    env.close()
    if done:
        assert info["progression"] == 1.0 or module is crafter


@pytest.mark.parametrize("task", TASKS)
def test_babaisais_thoughts_name_what_wins_where_it_is_and_what_the_push_is_for(task: str) -> None:
    promised: set[str] = set()
    kept: set[str] = set()
    for env, shown, thought, action in play(babaisai, task, seed=1):
        rules = {f"{noun} is {prop}" for noun, prop in env.world.rules.listed}
        kept |= rules
        seen = re.match(r"(\w+) is win, and I see (.+?)\. ", thought)
        if seen is not None:
            assert f"{seen[1]} is win" in shown and seen[2] in shown.splitlines()
        else:
            unseen = re.match(r"(\w+) is win, but I see none\.|Nothing is win yet\.", thought)
            winners = {rule.removesuffix(" is win") for rule in rules if rule.endswith(" is win")}
            assert unseen is not None and (unseen[1] in winners if winners else unseen[1] is None)
            assert not any(
                line.startswith(f"{noun} ")
                for noun in winners
                for line in shown.split("map:")[1].splitlines()
            )
        assert re.search(rf" go one step (to the )?{action}\.$", thought)
        assert re.search(r"I push|I walk to where I can push|Nothing has to be pushed", thought)
        promised |= set(re.findall(r"to make (\w+ is \w+)", thought))
    assert promised <= kept


def test_crafters_thoughts_name_the_need_and_where_what_it_takes_is_seen() -> None:
    thoughts = []
    for _, shown, thought, action in play(crafter, "default", seed=3, most=300):
        thoughts.append(thought)
        for seen in re.findall(r"I see ([^.]+)\.", thought):
            assert f"- {seen.replace('my', 'your')}" in shown.splitlines()
        for missing in re.findall(r"No ([^.]+) is in sight", thought):
            assert all(f"- {kind} " not in shown for kind in missing.split(" or "))
        assert thought.endswith(f" So I choose {action}.")
    assert any(
        "For a wood pickaxe and the table for it I lack wood; I have 0." in thought
        for thought in thoughts
    )
    told = re.compile(r"I see .* to my |is in sight\.|I am asleep|safe rest|not placed a stone")
    assert all(told.search(thought) for thought in thoughts)
    assert sum("I see" in thought for thought in thoughts) > 100


@pytest.mark.parametrize(
    "task", some(["coin_collector", "treasure_hunter", "the_cooking_game", "custom"], ["custom"])
)
def test_textworlds_thoughts_are_about_commands_of_the_plan(task: str) -> None:
    pytest.importorskip(
        "textworld", reason="TextWorld needs pip install 'slime-verlog[text-games]'"
    )
    from envs import textworld

    for _, shown, thought, action in play(textworld, task, seed=0):
        assert f": {action}." in thought
        for seen in re.findall(r"I see the ([^.]+)\.", thought):
            assert seen.lower() in shown.lower()
