"""Provides game files: builds them in a separate process, or finds them in the user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from envs.errors import ConfigError, EnvironmentFault
from envs.textworld.recipes import GameRecipe

_BUILD_TIMEOUT_S = 240.0


def build_game(recipe: GameRecipe, folder: Path) -> None:
    """Build the recipe's game into `folder`, in a separate process so that it depends on the recipe alone.

    Raises:
        ConfigError: these parameters allow no game.
        EnvironmentFault: the builder hung or crashed.
    """
    environment: Mapping[str, str] = {
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
