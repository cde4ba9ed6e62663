"""Sokoban: generated and written levels, moves, rewards and endings, the search, and the scripted
player."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import sokoban
from envs.errors import ConfigError
from envs.loading import build_env_from
from envs.sokoban import Sokoban, expert_action, explain_action
from envs.sokoban.board import SYMBOLS, find_pushes, is_stuck, moves_of, read_room
from envs.sokoban.levels import TASKS, make_level
from tests.fixtures.games import play_expert

LEVELS_OF_SEED_7 = {
    "one_box": """\
######
#  . #
# @  #
#  $ #
#  ###
######""",
    "two_boxes": """\
########
# .   ##
#     ##
#. #  ##
#@  $ ##
#   $ ##
#     ##
########""",
    "three_boxes": """\
##########
######   #
######.  #
######  ##
####### ##
######@$ #
######$  #
###### $ #
####. .  #
##########""",
    "four_boxes": """\
##########
#    #####
# .$ # ###
#  ..  ###
# $  $ ###
##### ####
###    ###
#  $ .@###
#    #####
##########""",
}
CORRIDOR = "######\n#@$ .#\n######"


def make(task: str = "one_box", seed: int = 0, **env: Any) -> Sokoban:
    return build_env_from("envs.sokoban", {"task": task, "seed": seed}, env)


def played(folder: Path, level: str, **env: Any) -> Sokoban:
    """The environment of a level that is given as text, after its reset."""
    path = folder / "levels.txt"
    path.write_text(f"; 0\n{level}\n")
    env = make("files", levels_path=str(path), symbols="xsb", **env)
    env.reset()
    return env


def shown(observation: Any) -> str:
    return observation["text"]["short_term_context"]


@pytest.mark.parametrize("task", TASKS)
def test_every_level_is_new_can_be_solved_in_time_and_has_what_its_task_says(task: str) -> None:
    shape, levels = TASKS[task], set()
    for seed in range(5):
        room, state = make_level(shape, seed)
        levels.add((room, state))
        pushes = find_pushes(room, state)
        assert pushes and len(pushes) >= shape.least_pushes
        moves = moves_of(room, state, pushes)
        assert len(moves) <= shape.max_steps
        assert (room.width, room.height) == (shape.width, shape.height)
        assert state.boxes.bit_count() == room.targets.bit_count() == shape.boxes
        assert not room.placed(state.boxes) and not room.floor & room.edge
        for move in moves:
            state = room.move(state, move)
        assert state.boxes == room.targets
    assert len(levels) == 5


@pytest.mark.parametrize("task", TASKS)
def test_the_levels_of_a_seed_stay_the_same_from_version_to_version(task: str) -> None:
    env = make(task, seed=7, symbols="xsb")
    assert shown(env.reset()) == LEVELS_OF_SEED_7[task]


@pytest.mark.parametrize(("width", "height", "boxes"), [(14, 8, 2), (4, 20, 1), (20, 20, 5)])
def test_a_level_of_another_size_can_be_solved(width: int, height: int, boxes: int) -> None:
    env = make("two_boxes", width=width, height=height, boxes=boxes)
    rows = shown(env.reset()).splitlines()
    assert (len(rows), {len(row) for row in rows}, "".join(rows).count("X")) == (
        height,
        {width},
        boxes,
    )
    assert "Next I push the box" in explain_action(env)
    end = play_expert(env, sokoban)[-1]
    assert end["terminated"] and end["reward"] == 1.0


def test_the_map_is_written_with_ragens_symbols_or_those_of_level_files(tmp_path: Path) -> None:
    level = "#######\n#+$*  #\n#     #\n#######"
    assert shown(played(tmp_path, level).reset()) == level
    ragen = level.translate(str.maketrans(SYMBOLS["xsb"], SYMBOLS["ragen"]))
    path = str(tmp_path / "levels.txt")
    assert (
        shown(make("files", levels_path=path).reset())
        == ragen
        == "#######\n#SX√__#\n#_____#\n#######"
    )
    assert shown(make("files", levels_path=path, spaced=True).reset()).startswith(
        "# # # # # # #\n# S X √ _ _ #"
    )


@pytest.mark.parametrize(
    ("answer", "row", "event"),
    [
        ("right", "# @$ #", "You pushed a box to the right."),
        ("ACTION: Move Right.", "# @$ #", "You pushed a box to the right."),
        ("up", "#@$  #", "You could not go up"),
    ],
)
def test_an_action_moves_pushes_or_says_what_was_in_the_way(
    tmp_path: Path, answer: str, row: str, event: str
) -> None:
    env = played(tmp_path, CORRIDOR)
    observation, _, info = env.step(answer)
    assert info["valid_action"] and observation["text"]["long_term_context"].startswith(event)
    assert shown(observation).splitlines()[1] == row.replace(" #", ".#")


def test_native_rewards_are_gym_sokobans(tmp_path: Path) -> None:
    env = played(tmp_path, "########\n#@$.  .#\n#  $   #\n########", reward="native")
    rewards = [env.step(move)[2]["reward"] for move in ("stay", "right", "right", "left")]
    assert rewards == pytest.approx([-0.1, 0.9, -1.1, -0.1])
    solving = played(tmp_path, CORRIDOR, reward="native")
    outcomes = [solving.step("right")[2] for _ in range(2)]
    assert [info["reward"] for info in outcomes] == pytest.approx([-0.1, 10.9])
    assert outcomes[-1]["terminated"]


@pytest.mark.parametrize(
    ("level", "stuck"),
    [
        ("#####\n#@  #\n# . #\n#  $#\n#####", True),  # a corner
        ("######\n#@   #\n# .$ #\n#. $ #\n#    #\n######", False),
        # Four boxes in a square.
        ("########\n#      #\n# $$   #\n# $$ @ #\n#  ....#\n#      #\n########", True),
        ("#####\n#@$.#\n#####", False),
    ],
)
def test_a_stuck_box_is_recognized_and_ends_the_episode_on_request(
    tmp_path: Path, level: str, stuck: bool
) -> None:
    room, state = read_room(level)
    assert is_stuck(room, state.boxes) == stuck
    assert (find_pushes(room, state) is None) == stuck
    assert not played(tmp_path, level).step("stay")[1]
    observation, done, info = played(tmp_path, level, end_when_stuck=True).step("stay")
    assert (done, info["terminated"], info["metrics"]["stuck"]) == (stuck, stuck, float(stuck))
    assert ("can no longer reach" in observation["obs_str"]) == stuck


def test_the_expert_waits_where_no_way_is_left(tmp_path: Path) -> None:
    env = played(tmp_path, "#####\n#@  #\n# . #\n#  $#\n#####", shaping=0.5)
    assert (
        expert_action(env) == "stay"
        and "no way" in explain_action(env)
        and env.distance_left() == 1.0
    )


def test_pictures_show_the_room_and_follow_the_moves() -> None:
    env = make(vlm=True)
    image = env.reset()["multi_modal_data"]["image"][0]
    assert image.size == (192, 192) and (np.asarray(image) == env.render()).all()
    _, _, info = env.step(expert_action(env))
    assert info["valid_action"] and (np.asarray(image) != env.render()).any()
    assert "as a picture" in _prompt(make(vlm="only")) and "√ is a box on a target" in _prompt(
        make()
    )


def _prompt(env: Sokoban) -> str:
    env.reset()
    return env.instruction_prompt


@pytest.mark.parametrize(
    ("level", "sentence"),
    [
        ("#####\n# $.#\n#####", "0 players, 1 boxes and 1 targets"),
        ("####\n#@ x\n####", "symbol 'x'"),
        ("######\n @$. #\n######", "gap in its outer wall"),
        ("#######\n#@#$.##\n#######", "behind walls"),
    ],
)
def test_a_malformed_level_file_is_refused_with_the_file_and_the_level(
    tmp_path: Path, level: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=rf"levels\.txt, level 0: .*{sentence}"):
        played(tmp_path, level)
