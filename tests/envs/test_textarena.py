"""TextArena's games by id: what the model sees, rewards, invalid moves, seeds, and the games that
are refused."""

import random
import re
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import MissingDependencyError
from envs.loading import build_env_from

pytest.importorskip("textarena", reason="pip install -e '.[textarena]' enables this test")

from envs.textarena import TextArena

PAGE = (Path(__file__).parents[2] / "docs" / "games.md").read_text(encoding="utf-8")
PLAYED, NEED_WORDS = (
    re.findall(r"\w+", row)
    for row in re.findall(r"^\| (?:play|need NLTK's word lists) \| ([\w, ]+)", PAGE, re.MULTILINE)
)
"""The single-player games that the page says can be played, at once or with NLTK's word lists."""


def make(task: str = "GuessTheNumber-v0", seed: int = 0, **env: Any) -> TextArena:
    return build_env_from("envs.textarena", {"task": task, "seed": seed}, env)


def test_a_game_is_won_with_moves_in_its_own_form() -> None:
    env = make()
    env.reset()
    assert "guess the number between 1 and 20" in env.instruction_prompt
    low, high = 1, 20
    for _ in range(6):
        guess = (low + high) // 2
        observation, done, info = env.step(f"THINK: the [middle].\nACTION: [{guess}]")
        assert info["valid_action"] and info["executed_action"] == f"[{guess}]"
        if done:
            break
        low, high = (guess + 1, high) if "higher" in observation["obs_str"] else (low, guess - 1)
    assert (info["reward"], info["progression"], info["terminated"]) == (1.0, 1.0, True)
    assert "Congratulations" in observation["obs_str"]


def test_an_invalid_move_costs_the_penalty_and_the_game_ends_after_as_many_as_allowed() -> None:
    env = make("TowerOfHanoi-v0", invalid_moves_allowed=2)
    before = env.reset()["text"]["short_term_context"]
    for turn in range(3):
        observation, done, info = env.step("ACTION: B A")
        assert (info["valid_action"], info["reward"], info["executed_action"]) == (
            False,
            -0.1,
            "no move",
        )
        assert "empty tower" in observation["obs_str"] and done == (turn == 2)
        assert observation["text"]["short_term_context"] == before


@pytest.mark.parametrize("task", ["2048-v0-ultra-easy", "Minesweeper-v0-small", "Sokoban-v0"])
def test_episodes_depend_on_their_seed_alone_and_leave_the_generators_as_they_were(
    task: str,
) -> None:
    def play(env: TextArena, disturb: bool) -> list[str]:
        shown = [env.reset()["obs_str"]]
        for turn, move in enumerate(
            ("[up]", "[2 2]", "[left]", "[down]", "[0 0]", "[right]", "[up]")
        ):
            if disturb:
                random.seed(turn)
                np.random.seed(turn)
            observation, done, _ = env.step(move)
            shown.append(observation["obs_str"])
            if done:
                break
        return shown

    random.seed(5)
    numbers = [random.random() for _ in range(2)]
    random.seed(5)
    first = play(make(task, 3, invalid_moves_allowed=9), disturb=False)
    assert [random.random() for _ in range(2)] == numbers
    assert play(make(task, 3, invalid_moves_allowed=9), disturb=True) == first
    assert play(make(task, 4, invalid_moves_allowed=9), disturb=False) != first


@pytest.mark.parametrize("game", [*PLAYED, *NEED_WORDS])
def test_no_game_downloads_anything_when_it_starts(
    game: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import nltk

    attempts: list[Any] = []

    def refuse(*words: Any, **_: Any) -> None:
        attempts.append(words)
        raise OSError("no network")

    for owner, name in (
        *((nltk, "download"), (nltk.downloader.Downloader, "download")),
        *((socket, "getaddrinfo"), (socket.socket, "connect")),
    ):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    named = pytest.raises(
        MissingDependencyError, match=rf"{game}-v0 needs NLTK's data '(\w+)'.*nltk\.downloader \1"
    )
    with named if game in NEED_WORDS else nullcontext():
        make(f"{game}-v0").reset()
    assert not attempts and nltk.download is refuse
