"""Crafter as the agent meets it: parity with the recordings, answers, prompt, options, endings and
metrics."""

from typing import Any

import pytest

pytest.importorskip(
    "crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this test"
)


from envs import crafter
from envs.crafter.vocabulary import translate
from envs.loading import build_env_from
from tests.fixtures.games import play_expert


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
    assert [translate("move northwest", turn) for turn in range(3)] == [
        "Move North",
        "Move West",
        "Move North",
    ]


def test_achievements_are_paid_as_they_come_or_all_at_the_end() -> None:
    paid = {}
    for reward in ("native", "achievements", "final"):
        env = build(seed=1, reward=reward, max_steps=60)
        env.reset()
        infos = play_expert(env, crafter)
        paid[reward] = [info["reward"] for info in infos]
    reached = infos[-1]["metrics"]["achievements"]
    assert reached > 1 and sum(paid["achievements"]) == reached
    assert paid["final"] == [0.0] * (len(paid["final"]) - 1) + [reached]
    assert [round(r) for r in paid["native"] if r >= 0.5] == [1 for r in paid["achievements"] if r]
