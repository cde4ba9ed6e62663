"""Finds the games of a downloaded ALFWorld data set: `json_2.1.1/SPLIT/FAMILY-.../TRIAL/game.tw-pddl`."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

from envs.errors import ConfigError

_DEFAULT_ROOT = Path("~/.cache/alfworld")


def find_root(data_path: str | None) -> Path | None:
    """The folder of the data set: `data_path`, else `$ALFWORLD_DATA`, else alfworld's own; None if there is none.

    Raises:
        ConfigError: a folder was named, but there are no games in it.
    """
    named = data_path or os.environ.get("ALFWORLD_DATA")
    root = Path(named).expanduser() if named else _DEFAULT_ROOT.expanduser()
    if (root / "json_2.1.1").is_dir():
        return root
    # Importing alfworld sets the variable to its default and makes that folder, so this one says nothing.
    if data_path is None and root == _DEFAULT_ROOT.expanduser():
        return None
    key = "env.data_path" if data_path else "ALFWORLD_DATA"
    raise ConfigError(
        f"{key}: there is no json_2.1.1 in {root}; run alfworld-download, or leave it unset to play demo games"
    )


@functools.cache
def list_games(root: Path, split: str, families: tuple[str, ...]) -> tuple[Path, ...]:
    """All games of the split and families, in one fixed mixed order, so that neighbouring seeds differ.

    Games with movable receptacles or slicing are left out, as ALFWorld itself leaves them.
    """
    found = [game for family in families for game in (root / "json_2.1.1" / split).glob(f"{family}-*/*/game.tw-pddl")]
    games = sorted(game for game in found if "movable" not in str(game) and "Sliced" not in str(game))
    random.Random(0).shuffle(games)
    return tuple(games)


def load_game(root: Path, split: str, families: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Read the game that the seed chooses; one that is not marked solvable gives way to the next.

    Raises:
        ConfigError: there is no solvable game of this split and these families, or a file is damaged.
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
