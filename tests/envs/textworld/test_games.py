"""The cache of built games: whole or absent, shared by workers, bounded."""

import os
import threading
import time
from pathlib import Path

import pytest

from envs.errors import ConfigError
from envs.textworld.games import GameCache


class Builder:
    """Writes a fake game, and counts how often it had to."""

    def __init__(self, size: int = 1000, seconds: float = 0.0) -> None:
        self.size, self.seconds, self.built = size, seconds, 0

    def __call__(self, folder: Path) -> None:
        assert not list(folder.iterdir())
        time.sleep(self.seconds)
        self.built += 1
        (folder / "game.z8").write_bytes(b"z" * self.size)
        (folder / "game.json").write_text("{}")
        (folder / "game.ni").write_text("source that nobody needs")


def test_a_game_is_built_once_and_then_found(tmp_path: Path) -> None:
    build, cache = Builder(), GameCache(tmp_path, 1.0)
    first = cache.fetch("a", build)
    assert cache.fetch("a", build) == first == GameCache(tmp_path, 1.0).fetch("a", build)
    assert build.built == 1
    assert sorted(os.listdir(first.parent)) == ["game.json", "game.z8"]


def test_a_game_that_lacks_a_file_is_built_again(tmp_path: Path) -> None:
    build, cache = Builder(), GameCache(tmp_path, 1.0)
    game = cache.fetch("a", build)
    (game.parent / "game.json").unlink()
    assert cache.fetch("a", build).read_bytes() == b"z" * 1000
    assert build.built == 2
    assert sorted(os.listdir(tmp_path)) == [".locks", "a"]


def test_a_build_that_fails_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    cache, build = GameCache(tmp_path, 1.0), Builder()

    def fail(folder: Path) -> None:
        (folder / "game.z8").write_bytes(b"half")
        raise RuntimeError("compiler crashed")

    with pytest.raises(RuntimeError, match="compiler crashed"):
        cache.fetch("a", fail)
    assert os.listdir(tmp_path) == [".locks"]
    assert cache.fetch("a", build).exists()


def test_workers_that_want_one_game_at_once_build_it_once(tmp_path: Path) -> None:
    build = Builder(seconds=0.05)
    threads = [threading.Thread(target=lambda: GameCache(tmp_path, 1.0).fetch("a", build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.built == 1


def test_the_longest_unused_games_make_room_but_never_recent_ones(tmp_path: Path) -> None:
    build, cache = Builder(size=4000), GameCache(tmp_path, 1e-5)
    for number, key in enumerate("abc"):
        cache.fetch(key, build)
        os.utime(tmp_path / key, (time.time() - 10_000 + number, time.time() - 10_000 + number))
    cache.fetch("b", build)
    cache.fetch("d", build)
    assert sorted(name for name in os.listdir(tmp_path) if name != ".locks") == ["b", "d"]
    for key in "ef":
        cache.fetch(key, build)
    assert {"b", "d", "e", "f"} <= set(os.listdir(tmp_path))


def test_only_games_are_deleted_from_a_folder_that_holds_other_things_too(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x" * 20_000)
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("thesis", "notes.txt"):
        os.utime(tmp_path / name, (time.time() - 10_000,) * 2)
    GameCache(tmp_path, 1e-5).fetch("a", Builder(size=4000))
    assert sorted(os.listdir(tmp_path)) == [".locks", "a", "notes.txt", "thesis"]


def test_a_folder_that_cannot_be_written_is_refused_with_the_option_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set env.cache_dir to a writable folder"):
        GameCache(tmp_path / "file", 1.0)
