"""TextWorld: what is generated, understood, shown and paid; the expert; games of the user's own."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "textworld",
    reason="TextWorld needs textworld; pip install 'slime-verlog[text-games]' enables this test",
)

from envs import textworld
from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.textworld.games import build_game, make_recipe
from tests.cases import some
from tests.fixtures.games import play_expert

TASKS = ["custom", "treasure_hunter", "the_cooking_game", "coin_collector", "simple"]
REWARDS = ["sparse", "score", "dense"]


def build(task: str = "custom", seed: int = 0, **options: Any) -> textworld.TextWorld:
    return build_env_from("envs.textworld", {"task": task, "seed": seed}, options)


@pytest.mark.parametrize(
    "played", some(product(TASKS, REWARDS), [("custom", "sparse"), ("coin_collector", "dense")])
)
def test_the_expert_wins_and_every_kind_of_reward_adds_up_to_one(
    played: tuple[str, str],
) -> None:
    task, reward = played
    env = build(task, reward=reward)
    env.reset()
    infos = play_expert(env, textworld)
    assert all(info["valid_action"] for info in infos)
    assert (infos[-1]["terminated"], infos[-1]["truncated"], infos[-1]["progression"]) == (
        True,
        False,
        1.0,
    )
    assert sum(info["reward"] for info in infos) == pytest.approx(1.0)
    paid = [info["reward"] > 0 for info in infos]
    if reward == "sparse":
        assert paid == [False] * (len(paid) - 1) + [True]
    if reward == "dense":
        assert all(paid)
    env.close()


def test_episodes_begin_in_several_threads_at_once() -> None:
    """As they do with `env_backend: inline`."""
    envs = [build(seed=seed, games=1) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda env: str(env.reset()), envs))) == 1
    for env in envs:
        env.close()


def test_dense_reward_is_taken_back_for_steps_away_and_still_adds_up_to_one() -> None:
    env = build("coin_collector", reward="dense")
    env.reset()
    there = textworld.expert_action(env)
    back = {
        "go north": "go south",
        "go south": "go north",
        "go east": "go west",
        "go west": "go east",
    }[there]
    rewards = [env.step(command)[2]["reward"] for command in (there, back, "look", there, back)]
    assert rewards[0] > 0 and rewards[1] == -rewards[0] == -rewards[3] and rewards[2] == 0
    assert sum(rewards) + sum(
        info["reward"] for info in play_expert(env, textworld)
    ) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_expert_finds_its_way_from_wherever_the_agent_went() -> None:
    env = build("simple")
    env.reset()
    for command in (
        "look",
        "open chest drawer",
        "close chest drawer",
        "open antique trunk",
        "dance",
        "inventory",
    ):
        env.step(command)
    assert play_expert(env, textworld)[-1]["progression"] == 1.0


@pytest.mark.slow
def test_losing_a_game_terminates_it_without_the_win() -> None:
    env = build("the_cooking_game", reward="sparse", admissible_commands=True)
    env.reset()
    for command in ("eat", "cook", "eat"):
        for _ in range(env.max_steps):
            wrong = [c for c in env._now.commands if c.startswith(command)]
            if env._now.lost or wrong:
                break
            env.step(textworld.expert_action(env))
        if not env._now.lost and wrong:
            _, done, info = env.step(wrong[0])
        if env._now.lost:
            break
    assert done and info["terminated"] and not info["truncated"]
    assert info["reward"] == 0.0 and info["progression"] < 1.0 and info["metrics"]["lost"] == 1.0


INTERPRETER_COMMANDS = [
    "save",
    "restart",
    "script_on",
    "undo",
    "verbose",
    "tw-print",
    "restrict_commands",
]


@pytest.mark.parametrize("command", INTERPRETER_COMMANDS)
def test_commands_to_the_interpreter_never_reach_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = build()
    env.reset()
    files = sorted(os.listdir(env._game_file().parent))
    first = env.step("look")[0]
    observation, done, info = env.step(command.replace("_", " "))
    assert (info["valid_action"], info["executed_action"], info["reward"], done) == (
        False,
        "look",
        -0.1,
        False,
    )
    assert observation == first
    assert os.listdir(tmp_path) == [] and sorted(os.listdir(env._game_file().parent)) == files


@pytest.mark.parametrize("task", ["custom", "simple"])
def test_every_listed_command_works_and_is_shown_with_the_current_observation_only(
    task: str,
) -> None:
    env = build(task, admissible_commands=True)
    text = env.reset()["text"]
    listed = (
        text["short_term_context"]
        .removeprefix("Commands that work now: ")
        .removesuffix(".")
        .split(", ")
    )
    assert "look" in listed and text["long_term_context"].startswith("-=")
    assert list(env.actions) == listed
    for command in listed:
        env.reset()
        assert env.step(command)[2]["valid_action"], command
    assert build(task).reset()["text"]["short_term_context"] == ""


@pytest.mark.slow
def test_a_recipe_is_the_same_game_whatever_the_building_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("the_cooking_game", 11, "brief", {})
    games = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        (tmp_path / seed).mkdir()
        build_game(recipe, tmp_path / seed)
        games.append((tmp_path / seed / "game.ni").read_text())
    assert games[0] == games[1]


def test_recipes_that_differ_never_share_a_game() -> None:
    recipe = make_recipe("custom", 0, "brief", {})
    others = [make_recipe("custom", 1, "brief", {}), make_recipe("custom", 0, "detailed", {})]
    others.append(make_recipe("custom", 0, "brief", {"rooms": 4}))
    assert len({recipe.key("1.8.0"), *(one.key("1.7.0") for one in (recipe, *others))}) == 5
    assert make_recipe("custom", 0, "brief", {"rooms": 3, "objects": None}).key(
        "1.7.0"
    ) == recipe.key("1.7.0")


def test_seeds_fold_into_the_wanted_number_of_games_but_held_out_ones_stay_apart() -> None:
    folded = [build(seed=seed, games=4)._recipe.seed for seed in (0, 4, 7, 10**9, 10**9 + 5)]
    assert folded == [0, 0, 3, 10**9, 10**9 + 1]


@pytest.mark.slow
def test_games_of_the_users_own_are_played_the_seed_choosing(tmp_path: Path) -> None:
    for name, seed in (("b", 1), ("a", 0)):
        source = build("simple", seed)._game_file().parent
        (tmp_path / "kitchens").mkdir(exist_ok=True)
        for suffix in (".z8", ".json"):
            shutil.copy(source / f"game{suffix}", tmp_path / "kitchens" / f"{name}{suffix}")
    envs = [build("kitchens", seed, games_path=str(tmp_path)) for seed in (0, 1, 2)]
    first, _, third = [env.reset()["obs_str"] for env in envs]
    assert first == third == build("simple", 0).reset()["obs_str"]
    assert play_expert(envs[1], textworld)[-1]["progression"] == 1.0
    (tmp_path / "kitchens" / "a.json").unlink()
    with pytest.raises(ConfigError, match=r"a\.z8 needs its \.json in the same folder"):
        build("kitchens", 0, games_path=str(tmp_path)).reset()
