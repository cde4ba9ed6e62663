"""Draws solvable levels from a seed: carve a room, pull the boxes off their targets, and solve the
result by search."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from envs.errors import ConfigError
from envs.sokoban.board import (
    Room,
    State,
    each,
    find_pushes,
    moves_of,
    push_distances,
    read_room,
    shift,
)

_MAX_DRAWS = 3000
_MAX_NODES = 2000
_TURNING = 0.35
"""Chance that the walk which carves a room turns before a step."""

_SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((-1, 0), (1, 0)),
    ((0, -1), (0, 1)),
    ((-1, 0), (0, 1)),
    ((1, 0), (0, -1)),
    ((1, 0), (0, 1), (1, 1)),
)
"""Cells (dx, dy) that a step of this walk may open beside its own."""


@dataclass(frozen=True)
class Shape:
    """What the levels of a task have in common."""

    width: int
    height: int
    boxes: int
    least_pushes: int
    """Levels that the search solves with fewer pushes are not used."""
    max_steps: int
    """Limit of the episode; the search's solution needs at most as many moves."""


TASKS = {
    "one_box": Shape(6, 6, 1, 2, 100),
    "two_boxes": Shape(8, 8, 2, 6, 100),
    "three_boxes": Shape(10, 10, 3, 10, 120),
    "four_boxes": Shape(10, 10, 4, 16, 120),
}
"""Tasks from easy to hard. RAGEN trains on the first two sizes; gym-sokoban's are 10 x 10 with
three to five boxes."""


@lru_cache(maxsize=64)
def make_level(shape: Shape, seed: int) -> tuple[Room, State]:
    """Return the seed's level, solvable within `shape.max_steps` moves; raises ConfigError if none
    is found."""
    # RandomState, because its numbers are the same in all versions of NumPy. It is seeded with 32
    # bits.
    rng = np.random.RandomState(seed % 2**32)
    for _ in range(_MAX_DRAWS):
        drawn = _draw(shape, rng)
        if drawn is None:
            continue
        pushes = find_pushes(*drawn, _MAX_NODES) or ()
        if len(pushes) >= shape.least_pushes and len(moves_of(*drawn, pushes)) <= shape.max_steps:
            return drawn
    raise ConfigError(
        f"no Sokoban level of {shape.width} x {shape.height} cells with {shape.boxes} boxes and at "
        f"least {shape.least_pushes} pushes was found for seed {seed}; use larger rooms, fewer "
        "boxes or fewer pushes"
    )


def _draw(shape: Shape, rng: np.random.RandomState) -> tuple[Room, State] | None:
    """Return a level whose boxes were pulled off their targets; None if there was no place for
    that."""
    floor = _carve(shape, rng)
    cells = list(each(floor))
    if len(cells) < 2 * shape.boxes + 1:
        return None
    chosen = [cells[place] for place in rng.permutation(len(cells))[: shape.boxes + 1]]
    player, *targets = chosen
    room = Room(shape.width, shape.height, floor, sum(1 << cell for cell in targets))
    return _pull_apart(room, 1 << player, rng)


def _carve(shape: Shape, rng: np.random.RandomState) -> int:
    """Return connected floor cells, opened along a random walk of 1.7 * (width + height) steps."""
    width = shape.width
    height = shape.height
    x = rng.randint(1, width - 1)
    y = rng.randint(1, height - 1)
    turns = ((1, 0), (0, 1), (-1, 0), (0, -1))
    dx, dy = turns[rng.randint(4)]
    floor = 0
    for _ in range(int(1.7 * (width + height))):
        if rng.random_sample() < _TURNING:
            dx, dy = turns[rng.randint(4)]
        x = min(max(x + dx, 1), width - 2)
        y = min(max(y + dy, 1), height - 2)
        for right, down in ((0, 0), *_SHAPES[rng.randint(len(_SHAPES))]):
            if 0 < x + right < width - 1 and 0 < y + down < height - 1:
                floor |= 1 << int((y + down) * width + x + right)
    return floor


def _pull_apart(room: Room, player: int, rng: np.random.RandomState) -> tuple[Room, State] | None:
    """Pull the boxes at random from their targets; keep the state whose boxes are furthest away,
    all off targets."""
    boxes = room.targets
    region = room.flood(player, room.floor & ~boxes)
    best: tuple[int, int, int] | None = None
    last = ""
    for _ in range(30 * boxes.bit_count()):
        free = room.floor & ~boxes
        pulls = []  # the direction in which the player drags, and the box's cell before
        for name, stride in room.strides.items():
            movable = boxes & shift(region, -stride) & shift(free, -2 * stride)
            pulls += [(name, cell) for cell in each(movable)]
        if not pulls:
            break
        same = [pull for pull in pulls if pull[0] == last] if rng.randint(2) else []
        choices = same or pulls
        last, cell = choices[rng.randint(len(choices))]
        stride = room.strides[last]
        boxes ^= 1 << cell | 1 << cell + stride
        region = room.flood(1 << cell + 2 * stride, room.floor & ~boxes)
        away = sum(push_distances(room)[box] for box in each(boxes))
        if not boxes & room.targets and (best is None or away > best[0]):
            best = away, boxes, region
    if best is None:
        return None
    places = list(each(best[2]))
    return room, State(places[rng.randint(len(places))], best[1])


def read_level(path: str, seed: int) -> tuple[Room, State]:
    """Return the seed's level of a text file, or of the `.txt` files of a folder, in Boxoban's
    format.

    Levels are separated by lines that begin with a semicolon, or by empty lines. Raises
    ConfigError, which names the file and the level, if the file is missing, is empty, or holds a
    malformed level.
    """
    place = Path(path).expanduser()
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"env.levels_path: {path} has no .txt files")
    file = files[seed % len(files)]
    try:
        drawings = _drawings(file, file.stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.levels_path: {file} cannot be read: {error}") from error
    if not drawings:
        raise ConfigError(f"env.levels_path: {file} has no Sokoban levels")
    number = seed // len(files) % len(drawings)
    try:
        return read_room(drawings[number])
    except ConfigError as error:
        raise ConfigError(f"env.levels_path: {file}, level {number}: {error}") from error


@lru_cache(maxsize=32)
def _drawings(file: Path, edited: int) -> list[str]:
    """Return the levels of a file as text; `edited`, its modification time, makes an edited file be
    read again."""
    lines = [
        "" if line.startswith(";") else line.rstrip()
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    return [drawing for drawing in "\n".join(lines).split("\n\n") if drawing.strip()]
