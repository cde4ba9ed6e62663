"""Worlds: what environments draw, replays of records, tiles, and animations."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.loading import build_env_from, load_env_module
from inspection.command import main
from inspection.view.replay import Atlas, Worlds, choose_tile_size, replay, with_pictures
from tests.fixtures.played_episodes import record_episode

pytest.importorskip("PIL", reason="pictures need Pillow")
WORLDS = {"envs.babyai": "goto", "envs.babaisai": "goto_win", "envs.crafter": "default", "envs.sokoban": "one_box"}


@pytest.fixture(params=WORLDS)
def env_path(request: pytest.FixtureRequest) -> str:
    """The environments that draw themselves."""
    if request.param not in ("envs.babaisai", "envs.sokoban"):
        pytest.importorskip("crafter", reason="needs pip install 'slime-verlog[envs]'")
    return request.param


def play(env_path: str, *, render: bool) -> tuple[list[str], list[np.ndarray]]:
    env = build_env_from(env_path, {"task": WORLDS[env_path], "seed": 11})
    texts, frames = [env.reset()["obs_str"]], []
    for _ in range(12):
        frames += [env.render()] if render else []
        observation, done, _ = env.step(load_env_module(env_path).expert_action(env))
        texts.append(observation["obs_str"])
        if done:
            break
    return texts, frames


def test_render_returns_pixels_and_does_not_change_the_episode(env_path: str) -> None:
    texts, frames = play(env_path, render=True)
    assert texts == play(env_path, render=False)[0]
    assert all(frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames)
    assert any((frame != frames[0]).any() for frame in frames[1:])


def test_crafter_draws_at_night_and_its_cells_repeat() -> None:
    pytest.importorskip("crafter", reason="needs pip install 'slime-verlog[envs]'")
    env = build_env_from("envs.crafter", {"task": "default", "seed": 3})
    env.reset()
    env.world.daylight = 0.1
    frame = env.render()
    env.world.daylight = 0.12
    assert (env.render() == frame).all()


def decode(world: dict[str, Any], sheet: np.ndarray) -> list[np.ndarray]:
    """The frames of an encoded world, as the page draws them."""
    size, columns, rows = world["tile"], world["columns"], world["rows"]
    tiles = sheet.reshape(-1, size, sheet.shape[1] // size, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    states = [list(world["first"])]
    for change in world["changes"]:
        state = list(states[-1])
        for cell, tile in zip(change[::2], change[1::2], strict=True):
            state[cell] = tile
        states.append(state)
    grids = [tiles[state].reshape(rows, columns, size, size, 3) for state in states]
    return [grid.swapaxes(1, 2).reshape(rows * size, columns * size, 3) for grid in grids]


def test_tiles_give_back_every_frame(env_path: str) -> None:
    from PIL import Image

    episode = record_episode(env_path, WORLDS[env_path], 5, skill=0.7, max_turns=30)
    replayed = replay(episode)
    assert replayed is not None and replayed.note is None
    assert len(replayed.frames) == episode["turns"] + 1
    worlds = Worlds(1)
    world = worlds.draw(episode)
    assert world is not None
    (png,) = worlds.images().values()
    drawn = decode(world, np.asarray(Image.open(io.BytesIO(png)).convert("RGB")))
    assert all((a == b).all() for a, b in zip(drawn, replayed.frames, strict=True))


def test_pictures_without_repeated_tiles_are_stored_whole() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3)).astype(np.uint8)
    assert choose_tile_size(list(noise)) is None
    board = np.zeros((64, 96, 3), np.uint8)
    board[:32, :32] = 200
    assert choose_tile_size([board, board]) in (8, 16, 32)
    assert len(Atlas(32).encode([board, board])["first"]) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"executed_action": "drop"}, "another action in turn 1"),
        ({"reward": 9.0}, "another reward in turn 1"),
        ({"response": "ACTION: drop", "executed_action": None}, "another observation in turn"),
    ],
)
def test_a_replay_that_differs_from_the_record_says_so_and_is_not_drawn(change: dict[str, Any], words: str) -> None:
    pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
    episode = record_episode("envs.babyai", "goto", 3)
    episode["story"][0] |= change
    worlds = Worlds(5)
    world = worlds.draw(episode)
    assert world is not None and words in world["note"] and "first" not in world
    assert worlds.images() == {}


ENV = """
import numpy as np
from tests.fixtures.counting_env import CountingGame, CountingSettings
from envs.base import describe_task, read_env_settings

class Drawn(CountingGame):
    {method}

def build_env(sample, args):
    return Drawn(read_env_settings(CountingSettings, args), describe_task(sample)[1])

def expert_action(env):
    return "right"
"""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("pass", None),
        ("def render(self): raise KeyError('sprite')", "raised KeyError: 'sprite'"),
        ("def render(self): return np.zeros((4, 4), np.uint8)", "must return an array (height, width, 3)"),
    ],
)
def test_an_environment_without_a_usable_render_costs_only_the_pictures(
    tmp_path: Path, method: str, words: str | None
) -> None:
    path = tmp_path / "drawn.py"
    path.write_text(ENV.format(method=method))
    world = Worlds(5, trusted=True).draw(record_episode(str(path), "count", 3))
    assert world is None if words is None else world is not None and words in world["note"]


def test_a_replay_does_not_play_notes() -> None:
    episode = record_episode("envs.sokoban", "one_box", 3)
    notes = {**episode["story"][1], "response": "a box", "executed_action": "", "reward": 0.0, "summary": {}}
    episode["story"].insert(1, notes)
    replayed = replay(episode)
    assert replayed is not None and replayed.note is None and len(replayed.frames) == len(episode["story"]) + 1
    assert (replayed.frames[1] == replayed.frames[2]).all()


HOSTILE = [
    ("downloaded/world.py", {}),
    ("world.py", {}),
    ("envs.agent", {"command": "true", "prepare": "downloaded/world.py:build_env"}),
    ("envs.babyai", {"prompt_template": "downloaded/prompt.j2"}),
    ("envs.sokoban", {"levels_path": "downloaded/levels.txt"}),
    ("envs.babyai", {"more": ["downloaded/world.py"]}),
    ("inspection.view", {}),
    ("os", {}),
]


@pytest.mark.parametrize(("env_path", "options"), HOSTILE)
def test_a_record_runs_no_code_that_it_names(
    tmp_path: Path, env_path: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proof = tmp_path / "downloaded", tmp_path / "proof"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    code = f"open({str(proof)!r}, 'w')"
    for path in (folder / "world.py", tmp_path / "world.py"):
        path.write_text(f"{code}\ndef build_env(sample, args): {code}\n")
    (folder / "prompt.j2").write_text("{{ cycler.__init__.__globals__.os.system('touch ' ~ '" + str(proof) + "') }}")
    (folder / "levels.txt").write_text("secret")
    episode = {"messages": [], "story": [{"prompt": [], "response": "go"}], "task": "goto", "seed": 1}
    given = {**episode, "env_path": env_path, "options": options}
    (folder / "episodes.jsonl").write_text(json.dumps(given) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["view", str(folder)])
    assert ended.value.code == 0 and not proof.exists()
    assert "secret" not in (folder / "episodes.html").read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("messages", [1]), ("messages", {}), ("story", [[]]), ("story", [{"prompt": 3}]),
        ("story", [{"prompt": [None]}]), ("story", [{"response": {}}]), ("story", [{"reward": "high"}]),
        ("story", [{"tokens": []}]), ("story", [{"tokens": {"text": 7}}]), ("options", []), ("pictures", {"a": 1}),
        ("metrics", 3), ("turns", "many"), ("env_path", 7), ("setting", {}), ("player", []),
        ("valid_action_ratio", "x"), ("tools", 3), ("max_turns", []), ("story", [{"metrics": []}]),
    ],
)  # fmt: skip
def test_a_damaged_record_is_one_sentence(tmp_path: Path, key: str, value: Any) -> None:
    episode = {"messages": [], "story": [], "env_path": "envs.babyai", "task": "goto", "seed": 1}
    (tmp_path / "episodes.jsonl").write_text(json.dumps({**episode, key: value}) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path)])
    said = str(ended.value.code)
    assert "episodes.jsonl, line 1, is not an episode: " + key in said and "\n" not in said


def test_each_run_and_each_evaluation_has_its_share_of_drawn_worlds() -> None:
    episode = record_episode("envs.babaisai", "goto_win", 1)
    worlds, drawn = Worlds(6), []
    for most in (6, 12):  # two runs of two evaluations each
        worlds.most = most
        for setting in ("update 0", "update 20"):
            drawn.append(sum(worlds.draw({**episode, "setting": setting}) is not None for _ in range(6)))
    assert drawn == [2, 2, 3, 2]
    assert sum(worlds.draw({**episode, "setting": "-"}) is not None for _ in range(6)) == 3


SEES = """
import numpy as np
from tests.fixtures.counting_env import CountingGame, CountingSettings
from envs.base import describe_task, make_observation, read_env_settings

class Seeing(CountingGame):
    def _picture(self, observation):
        self.number = getattr(self, "number", 0) + 1
        picture = np.full((8, 8, 3), self.number, np.uint8)
        return make_observation(observation["obs_str"], images=[picture])

    def reset(self):
        self.number = 0
        return self._picture(super().reset())

    def step(self, response):
        observation, done, info = super().step(response)
        return self._picture(observation), done, info

def build_env(sample, args):
    return Seeing(read_env_settings(CountingSettings, args), describe_task(sample)[1])

def expert_action(env):
    return "right"
"""


def test_pictures_that_the_record_lacks_come_from_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "sees.py"
    path.write_text(SEES)
    episode = record_episode(str(path), "count", 3)
    parts = [part for message in episode["messages"] for part in message["content"] if isinstance(part, dict)]
    pictures = [part for part in parts if part["type"] == "image"]
    assert pictures
    for part in pictures:
        part["image"] = None
    episode["pictures"] = {}
    world = Worlds(5, trusted=True).draw(episode)
    assert world is not None and "note" not in world
    shown = with_pictures(episode, world["shown"])
    seen = []
    for turn in shown["story"]:
        (part,) = [part for part in shown["messages"][turn["prompt"][-1]]["content"] if part["type"] == "image"]
        seen.append(shown["pictures"][part["image"]])
    assert len(set(seen)) == len(seen) == episode["turns"], "each turn has its own"
    assert episode["pictures"] == {}, "the record is not changed"
