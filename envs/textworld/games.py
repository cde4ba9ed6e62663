"""Provides game files: builds them in a separate process and caches them on disk, or finds them in the user's folder.

All workers of a machine share the cache. A game's folder appears complete or not at all, and is used only if its files
match their checksums; damaged games are built again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from envs.errors import ConfigError, EnvironmentFault
from envs.textworld.recipes import GameRecipe

GAME_FILE = "game.z8"
_FILES = (GAME_FILE, "game.json")
_CHECKSUMS = "checksums.json"
_BUILDING = ".building-"
_BUILD_TIMEOUT_S = 240.0
_IN_USE_S = 600.0
"""A game used this recently is not evicted, since a worker may be about to open it."""


class GameCache:
    """A folder of built games; beyond `limit_gb` the games unused for longest are deleted."""

    def __init__(self, root: Path, limit_gb: float) -> None:
        self.root, self.limit_bytes = root, int(limit_gb * 1e9)
        try:
            (root / ".locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"games cannot be cached in {root} ({error.strerror}); set env.cache_dir to a writable folder"
            raise ConfigError(why) from error

    def fetch(self, key: str, build: Callable[[Path], None]) -> Path:
        """Return the game file of `key`; if it is missing or damaged, `build` is called with an empty folder."""
        folder = self.root / key
        if not is_intact(folder):
            with self._lock(key):
                # Another worker may have built it in the meantime.
                if not is_intact(folder):
                    self._rebuild(folder, build)
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder)
        return folder / GAME_FILE

    def _rebuild(self, folder: Path, build: Callable[[Path], None]) -> None:
        fresh = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.root))
        try:
            build(fresh)
            for extra in set(os.listdir(fresh)) - set(_FILES):
                (fresh / extra).unlink()
            sums = {name: _checksum(fresh / name) for name in _FILES}
            (fresh / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
            if folder.exists():
                os.rename(folder, fresh.with_suffix(".damaged"))
            os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            shutil.rmtree(fresh.with_suffix(".damaged"), ignore_errors=True)
        self._evict(keep=folder.name)

    def _evict(self, keep: str) -> None:
        """Delete the games unused for longest beyond the limit, and the folders of crashed builds."""
        now, games = time.time(), []
        for folder in self.root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                age = now - folder.stat().st_mtime
                if folder.name.startswith(_BUILDING):
                    if age > 6 * _IN_USE_S:
                        shutil.rmtree(folder, ignore_errors=True)
                elif not folder.name.startswith("."):
                    games.append((age, sum(f.stat().st_size for f in folder.iterdir()), folder))
        total = sum(size for _, size, _ in games)
        for age, size, folder in sorted(games, reverse=True):
            if total <= self.limit_bytes or age < _IN_USE_S:
                return
            if folder.name != keep:
                shutil.rmtree(folder, ignore_errors=True)
                total -= size

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # 256 lock files serve all games. The system releases the lock of a process that dies.
        shard = hashlib.blake2b(key.encode(), digest_size=1).hexdigest()
        with open(self.root / ".locks" / shard, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_intact(folder: Path) -> bool:
    """Return whether the folder holds a complete game whose files match their checksums."""
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return all(sums[name] == _checksum(folder / name) for name in _FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def default_root() -> Path:
    """Return the folder for games in `$SLIME_VERLOG_CACHE`, else in the user's cache folder."""
    own = os.environ.get("SLIME_VERLOG_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else base / "slime-verlog") / "textworld"


def build_game(recipe: GameRecipe, folder: Path) -> None:
    """Build the recipe's game into `folder`, in a separate process so that it depends on the recipe alone.

    Raises:
        ConfigError: these parameters allow no game.
        EnvironmentFault: the builder hung or crashed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in [str(Path(__file__).parents[2]), *sys.path] if path),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "envs.textworld.build", str(folder)]
    try:
        done = subprocess.run(
            command, input=recipe.to_json(), env=environment, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"TextWorld took over {_BUILD_TIMEOUT_S:.0f} s to build {recipe}") from error
    if done.returncode == 3:
        raise ConfigError(f"TextWorld cannot build {recipe}: {done.stderr.strip()[-400:]}; relax its parameters")
    if done.returncode:
        raise EnvironmentFault(f"TextWorld failed to build {recipe}: {done.stderr.strip()[-800:]}")


def find_game(folder: Path, task: str, seed: int) -> Path:
    """Return the seed's game among the `.z8` files under `folder/task`, or under `folder` if that is missing.

    Raises:
        ConfigError: there are no games, or the game's `.json` is missing.
    """
    here = folder.expanduser() / task if (folder.expanduser() / task).is_dir() else folder.expanduser()
    games = sorted(here.rglob("*.z8"))
    if not games:
        glulx = next(here.rglob("*.ulx"), None) if here.is_dir() else None
        hint = f"{glulx.name} is Glulx, which TextWorld 1.7 cannot play" if glulx else "games are files *.z8"
        raise ConfigError(f"env.games_path: no games in {here}; {hint}")
    game = games[seed % len(games)]
    if not game.with_suffix(".json").is_file():
        raise ConfigError(f"env.games_path: {game} needs its .json in the same folder; copy it there")
    return game
