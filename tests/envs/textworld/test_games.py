"""The cache of built games: whole or absent, shared by workers, bounded."""

import os
import threading
import time
from pathlib import Path

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


def test_workers_that_want_one_game_at_once_build_it_once(tmp_path: Path) -> None:
    build = Builder(seconds=0.05)
    threads = [
        threading.Thread(target=lambda: GameCache(tmp_path, 1.0).fetch("a", build))
        for _ in range(8)
    ]
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
