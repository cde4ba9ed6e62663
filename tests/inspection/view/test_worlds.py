"""Worlds: what environments draw, and replays of records."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.loading import build_env_from, load_env_module
from inspection.view.replay import Worlds, replay
from tests.cases import some
from tests.fixtures.command import slime_verlog
from tests.fixtures.played_episodes import invented_episode, record_episode, write_run

pytest.importorskip("PIL", reason="pictures need Pillow")
WORLDS = {
    "envs.babyai": "goto",
    "envs.babaisai": "goto_win",
    "envs.crafter": "default",
    "envs.sokoban": "one_box",
}


@pytest.fixture(params=some(WORLDS, [path for path in WORLDS if path != "envs.crafter"]))
def env_path(request: pytest.FixtureRequest) -> str:
    """The environments that draw themselves."""
    if request.param not in ("envs.babaisai", "envs.sokoban"):
        pytest.importorskip("crafter", reason="needs pip install 'slime-verlog[envs]'")
    return request.param


def play(env_path: str, *, render: bool) -> tuple[list[str], list[np.ndarray]]:
    env = build_env_from(env_path, {"task": WORLDS[env_path], "seed": 11})
    texts = [env.reset()["obs_str"]]
    frames = []
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
    assert all(
        frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 for frame in frames
    )
    assert any((frame != frames[0]).any() for frame in frames[1:])


def test_the_page_gets_every_frame_as_it_was_drawn(env_path: str) -> None:
    from PIL import Image

    episode = record_episode(env_path, WORLDS[env_path], 5, skill=0.7, max_turns=30)
    replayed = replay(episode)
    assert replayed is not None and replayed.note is None
    assert len(replayed.frames) == episode["turns"] + 1
    world = Worlds(1).draw(episode)
    assert world is not None
    for key, frame in zip(world["frames"], replayed.frames, strict=True):
        file = io.BytesIO(base64.b64decode(world["pictures"][key].partition(",")[2]))
        assert (np.asarray(Image.open(file).convert("RGB")) == frame).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"executed_action": "drop"}, "another action in turn 1"),
        ({"reward": 9.0}, "another reward in turn 1"),
        ({"response": "ACTION: drop", "executed_action": None}, "another observation in turn"),
    ],
)
def test_a_replay_that_differs_from_the_record_says_so_and_is_not_drawn(
    change: dict[str, Any], words: str
) -> None:
    pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
    episode = record_episode("envs.babyai", "goto", 3)
    episode["story"][0] |= change
    world = Worlds(5).draw(episode)
    assert world is not None and words in world["note"] and "frames" not in world


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
        (
            "def render(self): return np.zeros((4, 4), np.uint8)",
            "must return an array (height, width, 3)",
        ),
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
    notes = {
        **episode["story"][1],
        "response": "a box",
        "executed_action": "",
        "reward": 0.0,
        "summary": {},
    }
    episode["story"].insert(1, notes)
    replayed = replay(episode)
    assert (
        replayed is not None
        and replayed.note is None
        and len(replayed.frames) == len(episode["story"]) + 1
    )
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
    folder = tmp_path / "downloaded"
    proof = tmp_path / "proof"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    code = f"open({str(proof)!r}, 'w')"
    for path in (folder / "world.py", tmp_path / "world.py"):
        path.write_text(f"{code}\ndef build_env(sample, args): {code}\n")
    (folder / "prompt.j2").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ '" + str(proof) + "') }}"
    )
    (folder / "levels.txt").write_text("secret")
    write_run(folder, [invented_episode(task="goto", env_path=env_path, options=options)])
    assert slime_verlog("view", folder) == 0 and not proof.exists()
    assert "secret" not in (folder / "episodes.html").read_text()
