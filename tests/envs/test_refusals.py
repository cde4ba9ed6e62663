"""Tasks and options that cannot work are refused before the first turn, in words that name them and
the fix."""

from typing import Any

import pytest

from envs.errors import ConfigError
from tests.envs.contract import NETHACK, TEXT_WORLDS, Case

CORRIDOR = f"{TEXT_WORLDS}:Corridor"
ROOM = "MiniHack-Room-5x5-v0"
REFUSED: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "envs.alfworld": [
        ("pick", {}, "no task 'pick'; there are all, pick_and_place_simple, "),
    ],
    "envs.babyai": [
        ("goto", {"pay_at_end": True}, r"env\.pay_at_end is a setting of the task errands"),
    ],
    "envs.crafter": [
        ("default", {"shaping": 0.5}, r"env\.shaping: Crafter cannot measure how far its goal is"),
    ],
    "envs.easy_vqa": [("validation", {}, "train and test")],
    "envs.gymnasium_text": [
        ("play", {"id": "builtins.dict"}, "which is not a gymnasium environment"),
        ("play", {"id": CORRIDOR, "kwargs": {"shape": "array"}}, r"set env\.describe"),
        ("play", {"id": CORRIDOR, "actions": ["a", "b"]}, "names 2 actions, but .* has 3"),
        ("MiniHack-Rom-5x5-v0", NETHACK, f"no task 'MiniHack-Rom-5x5-v0'; did you mean {ROOM}"),
        ("NetHackChallenge-v0", NETHACK, r"cannot be seeded.*env\.deterministic: false"),
    ],
    "envs.reasoning_gym": [
        (
            "leg_counting",
            {"options": {"animals": 3}},
            r"refuses {'animals': 3}: .*; its options are min_animals",
        ),
    ],
    "envs.recall": [
        ("recall", {"max_steps": 9}, r"env\.ask_every: 25 is more than env\.max_steps: 9"),
    ],
    "envs.scienceworld": [("find-plants", {}, "no task 'find-plants'; did you mean find-plant")],
    "envs.sokoban": [("one_bx", {}, "did you mean one_box")],
    "envs.textarena": [
        ("TicTacToe-v0", {}, "TicTacToe-v0 is for several players.*choose a single-player game"),
        ("GuessWho-v0", {}, "OPENROUTER_API_KEY"),
        (
            "GuessTheNumber-v0",
            {"kwargs": {"size": 3}},
            "cannot make GuessTheNumber-v0: TypeError.*size",
        ),
    ],
    "envs.textworld": [
        ("treasure", {}, "did you mean .*treasure_hunter"),
        ("treasure_hunter", {"level": 3, "rooms": 5}, r"env\.level sets rooms as well"),
        ("the_cooking_game", {"drop": True, "reward": "dense"}, "which drop: true prevents"),
    ],
}


@pytest.mark.parametrize(
    ("module", "task", "options", "words"),
    [(module, *row) for module, rows in REFUSED.items() for row in rows],
)
def test_what_cannot_work_is_refused(
    module: str, task: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=words) as refused:
        Case(module, task, options).build().reset()
    assert "\n" not in str(refused.value)
