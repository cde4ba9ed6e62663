"""Reads the games of a downloaded ALFWorld data set: `json_2.1.1/SPLIT/FAMILY-.../TRIAL/game.tw-pddl`."""

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from envs.errors import ConfigError

_DEFAULT_ROOT = Path("~/.cache/alfworld")


def read_rooms() -> dict[str, Any]:
    """Return the scenes and families of the demo rooms; the data set has the same families."""
    return yaml.safe_load(Path(__file__).with_name("rooms.yaml").read_text(encoding="utf-8"))


def find_root(data_path: str | None) -> Path | None:
    """Return the data set's folder: `data_path`, else `$ALFWORLD_DATA`, else `~/.cache/alfworld` or None.

    Raises:
        ConfigError: `data_path` or `$ALFWORLD_DATA` names a folder without games.
    """
    named = data_path or os.environ.get("ALFWORLD_DATA")
    root = Path(named).expanduser() if named else _DEFAULT_ROOT.expanduser()
    if (root / "json_2.1.1").is_dir():
        return root
    # Importing alfworld sets the variable to the default and creates that folder, which is no choice of the user.
    if data_path is None and root == _DEFAULT_ROOT.expanduser():
        return None
    key = "env.data_path" if data_path else "ALFWORLD_DATA"
    raise ConfigError(
        f"{key}: there is no json_2.1.1 in {root}; run alfworld-download, or leave it unset to play demo games"
    )


@functools.cache
def list_games(root: Path, split: str, families: tuple[str, ...]) -> tuple[Path, ...]:
    """Return all games of the split and families in one fixed shuffled order.

    Games with movable receptacles or slicing are left out, as in ALFWorld itself.
    """
    found = [game for family in families for game in (root / "json_2.1.1" / split).glob(f"{family}-*/*/game.tw-pddl")]
    games = sorted(game for game in found if "movable" not in str(game) and "Sliced" not in str(game))
    random.Random(0).shuffle(games)
    return tuple(games)


def load_game(root: Path, split: str, families: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Read the seed's game, or the next one that is marked solvable.

    Raises:
        ConfigError: no solvable game of this split and these families, or a damaged file.
    """
    games = list_games(root, split, families)
    for offset in range(len(games)):
        path = games[(seed + offset) % len(games)]
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"the ALFWorld game {path} cannot be read ({error}); download it again") from error
        if data.get("solvable"):
            return data
    raise ConfigError(
        f"no solvable game of {', '.join(families)} in {root / 'json_2.1.1' / split}; run alfworld-download"
    )
