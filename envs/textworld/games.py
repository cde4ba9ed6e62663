"""Provides game files: builds them in a separate process and caches them on disk, or finds them in
the user's folder.

A `GameRecipe` determines its game completely, so its key identifies the built game on any machine.
All workers of a machine share the cache. A game's folder appears complete or not at all.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from envs.errors import ConfigError, EnvironmentFault, check_known

REVISION = 1
"""Increase it whenever the builder makes a different game from the same recipe."""


@dataclass(frozen=True)
class Theme:
    """A kind of game: default parameters, step limit, and the prompt's commands and tips."""

    parameters: Mapping[str, Any]
    max_steps: int
    commands: Mapping[str, str]
    tips: tuple[str, ...] = ()


_DATA = yaml.safe_load(Path(__file__).with_name("themes.yaml").read_text(encoding="utf-8"))


def _read_theme(theme: dict[str, Any]) -> Theme:
    sections = [_DATA["command_sections"][section] for section in theme["commands"]]
    commands = {command: text for section in sections for command, text in section.items()}
    tips = tuple(
        tip for entry in theme["tips"] for tip in ([entry] if isinstance(entry, str) else entry)
    )
    return Theme(theme["parameters"], theme["max_steps"], commands, tips)


THEMES = {name: _read_theme(theme) for name, theme in _DATA["themes"].items()}
_ALIASES = _DATA["aliases"]
_MODES = _DATA["modes"]


@dataclass(frozen=True)
class GameRecipe:
    """One generated game. Its objective names every step (`goal="detailed"`) or the last one
    (`"brief"`)."""

    theme: str
    seed: int
    goal: str
    parameters: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def key(self, version: str) -> str:
        """Return the name of the built game; `version` is TextWorld's."""
        digest = hashlib.blake2b(
            f"{REVISION}/{version}/{self.to_json()}".encode(), digest_size=10
        ).hexdigest()
        return f"{self.theme}-{digest}"


def find_theme(task: str, otherwise: str | None = None) -> str:
    """Return the theme of a task's name, ours, BALROG's or `tw-make`'s.

    An unknown name stands for the theme `otherwise`; raises ConfigError without one.
    """
    theme = _ALIASES.get(task, task)
    if theme not in THEMES and otherwise:
        return otherwise
    known = [*THEMES, *_ALIASES]
    check_known(
        theme, known, f"TextWorld has no task {task!r}", f"there are {', '.join(THEMES)}", n=2
    )
    return theme


def make_recipe(theme: str, seed: int, goal: str, given: Mapping[str, Any]) -> GameRecipe:
    """Complete the parameters with the theme's defaults; raises ConfigError for unknown ones.

    `build_game` refuses impossible ones.
    """
    known = THEMES[theme].parameters
    chosen = {key: value for key, value in given.items() if value is not None}
    for key in chosen:
        if key not in known:
            raise ConfigError(f"TextWorld's {theme} has no env.{key}; it has {', '.join(known)}")
    parameters = {**known, **chosen}
    mode = parameters.get("mode")
    if mode is not None and mode not in _MODES[theme]:
        raise ConfigError(
            f"env.mode of {theme} must be one of {', '.join(_MODES[theme])}, got {mode!r}"
        )
    both = [key for key in ("rooms", "quest_length", "mode") if key in chosen]
    if parameters.get("level") is not None and both:
        raise ConfigError(f"env.level sets {both[0]} as well; remove one of them")
    return GameRecipe(theme, seed % 2**32, goal, parameters)


GAME_FILE = "game.z8"
_FILES = (GAME_FILE, "game.json")
_BUILD_TIMEOUT_S = 240.0
_IN_USE_S = 600.0
"""A game used this recently is not evicted, since a worker may be about to open it."""


class GameCache:
    """A folder of built games; beyond `limit_gb` the games unused for longest are deleted."""

    def __init__(self, root: Path, limit_gb: float) -> None:
        self.root = root
        self.limit_bytes = int(limit_gb * 1e9)
        try:
            (root / ".locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"games cannot be cached in {root} ({error.strerror}); set SLIME_VERLOG_CACHE to a writable folder"
            raise ConfigError(why) from error

    def fetch(self, key: str, build: Callable[[Path], None]) -> Path:
        """Return the game file of `key`; if it is missing, `build` is called with an empty
        folder."""
        folder = self.root / key
        if not is_complete(folder):
            with self._lock(key):
                # Another worker may have built it in the meantime.
                if not is_complete(folder):
                    self._rebuild(folder, build)
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder)
        return folder / GAME_FILE

    def _rebuild(self, folder: Path, build: Callable[[Path], None]) -> None:
        fresh = Path(tempfile.mkdtemp(prefix=".building-", dir=self.root))
        try:
            build(fresh)
            for extra in set(os.listdir(fresh)) - set(_FILES):
                (fresh / extra).unlink()
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._evict()

    def _evict(self) -> None:
        """Delete the games unused for longest beyond the limit."""
        with contextlib.suppress(FileNotFoundError):  # another worker deletes, too
            games: list[tuple[float, int, Path]] = []
            for folder in filter(is_complete, self.root.iterdir()):
                size = sum(file.stat().st_size for file in folder.iterdir())
                games.append((folder.stat().st_mtime, size, folder))
            excess = sum(size for _, size, _ in games) - self.limit_bytes
            for used, size, folder in sorted(games):
                if excess <= 0 or used > time.time() - _IN_USE_S:
                    return
                shutil.rmtree(folder, ignore_errors=True)
                excess -= size

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # 256 lock files serve all games. The system releases the lock of a process that dies.
        with open(
            self.root / ".locks" / hashlib.blake2b(key.encode(), digest_size=1).hexdigest(), "w"
        ) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds a whole game."""
    return all((folder / name).is_file() for name in _FILES)


def default_root() -> Path:
    """Return the folder for games in `$SLIME_VERLOG_CACHE`, else in the user's cache folder."""
    own = os.environ.get("SLIME_VERLOG_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(own) if own else base / "slime-verlog") / "textworld"


def build_game(recipe: GameRecipe, folder: Path) -> None:
    """Build into `folder`, in another process, from the recipe alone; raises ConfigError for
    impossible ones."""
    path = os.pathsep.join(path for path in [str(Path(__file__).parents[2]), *sys.path] if path)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "envs.textworld.build", str(folder)]
    try:
        done = subprocess.run(
            command,
            input=recipe.to_json(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"TextWorld took over {_BUILD_TIMEOUT_S:.0f} s to build {recipe}"
        ) from error
    if done.returncode == 3:
        raise ConfigError(
            f"TextWorld cannot build {recipe}: {done.stderr.strip()[-400:]}; relax its parameters"
        )
    if done.returncode:
        raise EnvironmentFault(f"TextWorld failed to build {recipe}: {done.stderr.strip()[-800:]}")


def find_game(folder: Path, task: str, seed: int) -> Path:
    """Return the seed's game of `folder/task`, or of `folder`; raises ConfigError if it has none
    with its `.json`."""
    here = (
        folder.expanduser() / task if (folder.expanduser() / task).is_dir() else folder.expanduser()
    )
    games = sorted(here.rglob("*.z8"))
    if not games:
        raise ConfigError(
            f"env.games_path: no games in {here}; games are files *.z8 (TextWorld 1.7 plays no "
            "Glulx)"
        )
    game = games[seed % len(games)]
    if not game.with_suffix(".json").is_file():
        raise ConfigError(
            f"env.games_path: {game} needs its .json in the same folder; copy it there"
        )
    return game
