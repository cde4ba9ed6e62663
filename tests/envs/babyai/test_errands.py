"""BabyAI's errands: one mission after another until the time is up, alike at any length."""

import random
import re
from typing import Any

import pytest

pytest.importorskip(
    "minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test"
)

from envs import babyai
from envs.loading import build_env_from
from tests.fixtures.games import play_expert


def build(seed: int = 0, **options: Any) -> babyai.BabyAI:
    return build_env_from("envs.babyai", {"task": "errands", "seed": seed}, options)


def play(env: babyai.BabyAI, actions: list[str] | None = None) -> list[Any]:
    """The infos of a whole episode of the expert, or of these actions."""
    env.reset()
    if actions is None:
        return play_expert(env, babyai)
    return [env.step(action)[2] for action in actions]


@pytest.mark.parametrize("turns", [7, 25, 100, 400])
def test_an_episode_lasts_exactly_as_long_as_asked_and_the_end_of_the_time_is_the_tasks_own(
    turns: int,
) -> None:
    infos = play(build(max_steps=turns))
    assert len(infos) == turns
    assert [info["terminated"] for info in infos] == [False] * (turns - 1) + [True]
    assert not any(info["truncated"] for info in infos)


def test_missions_and_rooms_do_not_depend_on_how_the_errands_before_were_done() -> None:
    """So every policy that is tested on a seed gets the same errands."""
    rng = random.Random(1)

    def missions(detours: bool) -> list[str]:
        env = build(seed=4)
        observation, done, seen = env.reset(), False, [""]
        while not done:
            errand = (
                observation["text"]["short_term_context"].partition(",")[0]
                + env.game.grid.encode().tobytes().hex()
            )
            if errand != seen[-1]:
                seen.append(errand)
            turn_aside = detours and rng.random() < 0.2
            observation, done, _ = env.step(
                "turn left" if turn_aside else babyai.expert_action(env)
            )
        return seen

    direct, slow = missions(False), missions(True)
    assert len(slow) < len(direct) and slow == direct[: len(slow)]


def test_prompts_tell_the_time_in_tenths_so_a_longer_episode_brings_no_new_words() -> None:
    words = {}
    for turns in (25, 100, 400):
        env, seen = build(max_steps=turns), []
        observation, done = env.reset(), False
        while not done:
            seen.append(observation["text"]["short_term_context"])
            observation, done, _ = env.step("turn left")
        times = [
            int(found[1]) for text in seen if (found := re.fullmatch(r"go to .+, time (\d)", text))
        ]
        assert (
            len(times) == turns
            and times == sorted(times, reverse=True)
            and (times[0], times[-1]) == (9, 0)
        )
        words[turns] = env.instruction_prompt
    assert len(set(words.values())) == 1


def test_pay_at_the_end_adds_up_to_the_same_and_still_charges_penalties_at_once() -> None:
    actions = [info["executed_action"] for info in play(build())]
    actions[10] = "dance"
    at_once, late = play(build(), actions), play(build(pay_at_end=True), actions)
    rewards = [info["reward"] for info in late]
    assert rewards[10] == -0.1 and set(rewards[:10] + rewards[11:-1]) == {0.0}
    assert sum(rewards) == pytest.approx(sum(info["reward"] for info in at_once))
    assert rewards[-1] > 10
