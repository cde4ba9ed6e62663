"""The scripted BabyAI player beside minigrid's own bot, on every registered level."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test")

from minigrid.envs.babyai.core.verifier import SeqInstr
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from envs.babyai.expert import NOT_COVERED, Expert
from envs.babyai.levels import MIXED_GOALS, level_names, make_level

LEVELS = [*sorted(set(level_names().values())), *MIXED_GOALS]


class BoundedStack(list):
    """BabyAIBot's stack of subgoals, which in some worlds that cannot be won would grow forever within one turn."""

    def __init__(self, subgoals: list) -> None:
        super().__init__(subgoals)
        self.most = len(subgoals) + 500

    def append(self, subgoal: Any) -> None:
        assert len(self) < self.most, "the bot goes in circles"
        super().append(subgoal)


def play_bot(game: Any) -> float:
    """Follow BabyAIBot to the end of the episode and return the reward; where the bot gives up, the mission is lost."""
    bot, action = BabyAIBot(game), None
    while True:
        bot.stack = BoundedStack(bot.stack)
        try:
            action = bot.replan(action)
        except (AssertionError, DisappearedBoxError):
            return 0.0
        if action == game.actions.done:
            return 0.0
        _, reward, terminated, truncated, _ = game.step(action)
        if terminated or truncated:
            return float(reward)


def play_expert(game: Any) -> float:
    """Follow the expert to the end of the episode and return the reward."""
    expert = Expert(game)
    while True:
        action = expert.advice()
        _, reward, terminated, truncated, _ = game.step(action)
        if terminated or truncated:
            return float(reward)
        expert.watch(action)


def rewards(level: str, seeds: range, play: Callable[[Any], float]) -> list[float]:
    found = []
    for seed in seeds:
        game = make_level(level)
        game.reset(seed=seed)
        found.append(play(game))
    return found


def compare(level: str, seeds: range) -> None:
    """Where the bot wins the expert wins as well, about as soon."""
    bots, experts = rewards(level, seeds, play_bot), rewards(level, seeds, play_expert)
    assert [seed for seed, bot, expert in zip(seeds, bots, experts, strict=True) if bot > 0 and expert <= 0] == []
    assert sum(experts) >= 0.98 * sum(bots)


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_is_as_good_as_minigrids_bot_on_every_registered_level(level: str) -> None:
    compare(level, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_is_as_good_as_minigrids_bot_over_forty_worlds_of_every_level(level: str) -> None:
    compare(level, range(40))


@pytest.mark.parametrize("level", ["KeyInBox", "PutNextS5N2Carrying", "PutNextS6N3Carrying", "PutNextS7N4Carrying"])
def test_the_expert_wins_the_levels_that_the_bot_cannot(level: str) -> None:
    seeds = range(6)
    assert max(rewards(level, seeds, play_bot)) == 0
    assert min(rewards(level, seeds, play_expert)) > 0


@pytest.mark.parametrize("level", NOT_COVERED)
def test_where_a_level_is_not_covered_any_door_loses_a_mission_of_two_doors(level: str) -> None:
    """Stands in front of each door in turn and opens it first: none of them, the right one included, is survived."""
    missions = 0
    for seed in range(12):
        game = make_level(level)
        game.reset(seed=seed)
        if not isinstance(game.instrs, SeqInstr):
            assert rewards(level, range(seed, seed + 1), play_expert)[0] > 0
            continue
        missions += 1
        places = [k for k, cell in enumerate(game.grid.grid) if cell is not None and cell.type == "door"]
        assert len(places) >= 2
        for place in places:
            game.reset(seed=seed)
            y, x = divmod(place, game.grid.width)
            game.agent_pos, game.agent_dir = (x - 1, y), 0
            _, reward, terminated, _, _ = game.step(game.actions.toggle)
            assert terminated and reward == 0
    assert missions >= 2
