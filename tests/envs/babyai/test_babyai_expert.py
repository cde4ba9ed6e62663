"""The scripted BabyAI player beside minigrid's own bot, on every registered level."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip(
    "minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test"
)

from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from envs.babyai.expert import Expert
from envs.babyai.levels import MIXED_GOALS, level_names, make_level

LEVELS = [*sorted(set(level_names().values())), *MIXED_GOALS]


class BoundedStack(list):
    """BabyAIBot's stack of subgoals, which in some worlds that cannot be won would grow forever
    within one turn."""

    def __init__(self, subgoals: list) -> None:
        super().__init__(subgoals)
        self.most = len(subgoals) + 500

    def append(self, subgoal: Any) -> None:
        assert len(self) < self.most, "the bot goes in circles"
        super().append(subgoal)


def play_bot(game: Any) -> float:
    """Follow BabyAIBot to the end of the episode and return the reward; where the bot gives up, the
    mission is lost."""
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
    assert [
        seed
        for seed, bot, expert in zip(seeds, bots, experts, strict=True)
        if bot > 0 and expert <= 0
    ] == []
    assert sum(experts) >= 0.98 * sum(bots)


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_is_as_good_as_minigrids_bot_on_every_registered_level(level: str) -> None:
    compare(level, range(1))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_is_as_good_as_minigrids_bot_over_forty_worlds_of_every_level(
    level: str,
) -> None:
    compare(level, range(40))
