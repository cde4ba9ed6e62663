"""ALFWorld: games of every family, the planner's way to win, and how the data set is read."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "alfworld", reason="ALFWorld: pip install 'slime-verlog[alfworld]' enables this test"
)
pytest.importorskip(
    "fast_downward", reason="ALFWorld needs 'slime-verlog[alfworld]', planner and all"
)

from envs import alfworld
from envs.alfworld import list_games, load_game
from envs.loading import build_env_from
from tests.fixtures.alfworld_rooms import make_game, write_game
from tests.fixtures.games import play_expert


def build(task: str = "pick_and_place_simple", seed: int = 0, **options: Any) -> alfworld.ALFWorld:
    return build_env_from("tests.fixtures.alfworld_rooms", {"task": task, "seed": seed}, options)


NEEDED = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "look_at_obj_in_light": "use",
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
@pytest.mark.parametrize("family", alfworld.FAMILIES)
def test_the_planner_wins_games_of_every_family_by_its_own_means(family: str, seed: int) -> None:
    env = build(family, seed)
    observation = env.reset()
    assert f"Your task is to: {env.mission}." in observation["obs_str"]
    infos = play_expert(env, alfworld)
    assert all(info["valid_action"] for info in infos)
    assert (infos[-1]["terminated"], infos[-1]["truncated"], infos[-1]["progression"]) == (
        True,
        False,
        1.0,
    )
    assert [info["reward"] for info in infos] == [0.0] * (len(infos) - 1) + [1.0]
    played = [info["executed_action"] for info in infos]
    assert sum(command.startswith(NEEDED.get(family, "move")) for command in played) >= (
        2 if "two" in family else 1
    )
    env.close()


@pytest.mark.parametrize("command", ["", "open fridge"])
def test_what_the_game_would_not_accept_now_is_invalid_and_costs_a_turn_of_looking(
    command: str,
) -> None:
    env = build()
    env.reset()
    info = env.step(f"ACTION: {command}")[2]
    assert (info["valid_action"], info["executed_action"], info["reward"]) == (False, "look", -0.1)
    assert env._turns == 1


def test_remembering_parsed_grammar_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from textworld.envs.pddl import textgen

    def play() -> list[Any]:
        env = build("look_at_obj_in_light", 2)
        seen = [env.reset()]
        return [
            *seen,
            *(
                env.step(env._now.commands[index * 5 % len(env._now.commands)])
                for index in range(8)
            ),
        ]

    remembered = play()
    monkeypatch.setattr(textgen, "_parse_and_convert", textgen._parse_and_convert.__wrapped__)
    assert play() == remembered


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """A small data set on disk, in ALFWorld's layout."""
    for family in alfworld.FAMILIES[:2]:
        for number in range(2):
            write_game(
                tmp_path, "train", f"{family}-Mug-None-Desk-{number}", make_game(family, number)
            )
    write_game(
        tmp_path,
        "valid_unseen",
        f"{alfworld.FAMILIES[0]}-Mug-None-Desk-9",
        make_game(alfworld.FAMILIES[0], 9),
    )
    unsolvable = {**make_game(alfworld.FAMILIES[0], 5), "solvable": False}
    write_game(tmp_path, "train", f"{alfworld.FAMILIES[0]}-Mug-None-Desk-5", unsolvable)
    write_game(
        tmp_path,
        "train",
        f"{alfworld.FAMILIES[0]}-MugSliced-None-Desk-6",
        make_game(alfworld.FAMILIES[0], 6),
    )
    return tmp_path


def test_games_of_the_data_set_are_played_and_won(
    data_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(data_set))
    env = build("look_at_obj_in_light", 1, data_path=None)
    observation = env.reset()
    assert (
        "Your task is to: " in observation["obs_str"]
        and play_expert(env, alfworld)[-1]["reward"] == 1.0
    )


def test_the_seed_goes_through_the_solvable_games_of_the_split(data_set: Path) -> None:
    family = alfworld.FAMILIES[0]
    drawn = {load_game(data_set, "train", (family,), seed)["pddl_problem"] for seed in range(9)}
    assert drawn == {make_game(family, number)["pddl_problem"] for number in range(2)}
    held_out = load_game(data_set, "valid_unseen", alfworld.FAMILIES, 123)
    assert held_out["pddl_problem"] == make_game(family, 9)["pddl_problem"]
    assert len(list_games(data_set, "train", alfworld.FAMILIES)) == 5
