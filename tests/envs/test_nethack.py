"""NetHack and MiniHack in words: what is shown, names and keys of actions, seeds, endings, and what
is refused."""

from typing import Any

import pytest

from envs.gymnasium_text import GymnasiumText
from envs.loading import build_env_from
from tests.envs.contract import NETHACK

pytest.importorskip("minihack", reason="pip install -e '.[nethack]' enables this test")

ROOM = "MiniHack-Room-5x5-v0"


def make(task: str = ROOM, seed: int = 6, **env: Any) -> GymnasiumText:
    return build_env_from("envs.gymnasium_text", {"task": task, "seed": seed}, {**NETHACK, **env})


def test_the_seed_decides_over_the_moon_and_not_the_date() -> None:
    """NetHack's luck follows the moon of the day; by the date, two games of one day cannot have
    different moons."""
    greetings = [
        make(seed=seed).reset()["text"]["long_term_context"].split("\n")[0] for seed in (0, 3, 6)
    ]
    assert ["Full moon" in line for line in greetings] == [True, False, False]
    assert ["New moon" in line for line in greetings] == [False, True, False]


def test_reaching_the_stairs_wins() -> None:
    env = make(format_penalty=0.2)
    env.reset()
    assert env.step("jump over it")[2]["reward"] == -0.2
    env.reset()
    for _ in range(4):
        _, done, info = env.step("ACTION: southeast")
    assert done and (info["terminated"], info["truncated"]) == (True, False)
    assert (info["reward"], info["progression"]) == (1.0, 1.0)
    env.close()
