"""Tasks and options that cannot work are refused before the first turn, in words that name them and the fix."""

from typing import Any

import pytest

from envs.errors import ConfigError
from tests.envs.contract import NETHACK, TEXT_WORLDS, Case

CORRIDOR, ECHO = f"{TEXT_WORLDS}:Corridor", f"{TEXT_WORLDS}:Echo"
ROOM = "MiniHack-Room-5x5-v0"
REFUSED: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "envs.alfworld": [
        ("pick", {}, "no task 'pick'; did you mean pick_and_place_simple or"),
        ("all", {"vlm": True}, "ALFWorld has no pictures here"),
    ],
    "envs.babaisai": [("env/two_room-make_wal", {}, "two_room-make_wal.*two_room-make_wall_win")],
    "envs.babyai": [
        ("BabyAI-MixedTrainLocal-v0/pick_up", {}, "BabyAI-MixedTrainLocal-v0/pickup"),
        ("qqqqqqqq", {}, "for example goto"),
        ("OpenDoor", {"num_dists": 2}, r"'OpenDoor' has no env\.num_dists"),
        ("goto", {"pay_at_end": True}, r"env\.pay_at_end is a setting of the task errands"),
    ],
    "envs.crafter": [
        ("default", {"max_steps": 10_001}, r"env\.max_steps"),
        ("default", {"shaping": 0.5}, r"env\.shaping: Crafter cannot measure how far its goal is"),
    ],
    "envs.easy_vqa": [("validation", {}, "train and test")],
    "envs.geo3k": [("train", {"data": [{"problem": "x"}]}, "needs an answer to compare with.*--label-key")],
    "envs.gymnasium_text": [
        ("play", {"id": "NoSuchGame-v0"}, "gymnasium cannot make 'NoSuchGame-v0'"),
        ("play", {"id": "builtins.dict"}, "which is not a gymnasium environment"),
        ("play", {"id": CORRIDOR, "kwargs": {"shape": "array"}}, r"set env\.describe"),
        ("play", {"id": CORRIDOR, "kwargs": {"shape": "two_texts"}}, "which of sound, view is the text"),
        ("play", {"id": CORRIDOR, "kwargs": {"shape": "dict"}, "text_key": "veiw"}, "'veiw'; did you mean view"),
        ("play", {"id": CORRIDOR, "actions": ["a", "b"]}, "names 2 actions, but .* has 3"),
        ("play", {"id": ECHO, "default_action": "NO"}, "does not fit the action space"),
        ("play", {"id": "Pendulum-v1", "describe": f"{TEXT_WORLDS}.describe_places"}, "only Discrete and Text"),
        ("MiniHack-Rom-5x5-v0", NETHACK, f"no task 'MiniHack-Rom-5x5-v0'; did you mean {ROOM}"),
        ("NetHackChallenge-v0", NETHACK, r"cannot be seeded.*env\.deterministic: false"),
        (ROOM, {**NETHACK, "vlm": True}, r"env\.vlm: NetHack is shown as text"),
    ],
    "envs.reasoning_gym": [
        ("leg_counting", {"options": {"animals": 3}}, "leg_counting has no option 'animals'; it has min_animals"),
        ("composite", {"level": 1}, "no levels for composite"),
        ("leg_counting", {"vlm": True}, "have no pictures"),
    ],
    "envs.recall": [
        ("forget", {}, "task 'forget' is unknown"),
        ("recall", {"max_steps": 9}, r"env\.ask_every: 25 is more than env\.max_steps: 9"),
    ],
    "envs.scienceworld": [("find-plants", {}, "no task 'find-plants'; did you mean find-plant")],
    "envs.sokoban": [
        ("two_box", {}, "unknown Sokoban task 'two_box'; did you mean two_boxes"),
        ("one_box", {"levels_path": "x", "boxes": 2}, r"env\.boxes shapes generated levels"),
        ("one_box", {"width": 4, "height": 4, "boxes": 8}, "use larger rooms, fewer boxes or fewer pushes"),
    ],
    "envs.textarena": [
        ("GuesTheNumber-v0", {}, "did you mean GuessTheNumber-v0"),
        ("TicTacToe-v0", {}, "TicTacToe-v0 is for several players.*choose a single-player game"),
        ("GuessWho-v0", {}, "OPENROUTER_API_KEY"),
        ("GuessTheNumber-v0", {"kwargs": {"size": 3}}, "cannot make GuessTheNumber-v0: TypeError.*size"),
    ],
    "envs.textworld": [
        ("treasure", {}, "did you mean .*treasure_hunter"),
        ("treasure_hunter", {"level": 3, "rooms": 5}, r"env\.level sets rooms as well"),
        ("coin_collector", {"rooms": 3, "quest_length": 4}, "quest_length <= rooms"),
        ("the_cooking_game", {"rooms": 5}, "1, 6, 9 or 12 rooms, got 5"),
        ("the_cooking_game", {"drop": True, "reward": "dense"}, "which drop: true prevents"),
        ("custom", {"games_path": "/nowhere", "rooms": 3}, r"env\.rooms shapes generated games"),
    ],
    "envs.verifiers": [("any", {}, "id")],
}


@pytest.mark.parametrize(
    ("module", "task", "options", "words"), [(module, *row) for module, rows in REFUSED.items() for row in rows]
)
def test_what_cannot_work_is_refused(
    module: str, task: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=words) as refused:
        Case(module, task, options).build().reset()
    assert "\n" not in str(refused.value)
