"""Draws a Crafter landscape: noise shapes the land, random draws place ores, trees and creatures.

Random numbers are drawn cell by cell in the original's order, x before y. The noise, which takes most of the
original's time, is computed for all cells at once.
"""

from functools import cache

import numpy as np

from envs.crafter.world.noise import Noise
from envs.crafter.world.rules import COW, MATERIAL_ID, SIZE, SKELETON, WALKABLE, ZOMBIE

Creatures = list[tuple[int, int, int]]
"""Kind, x and y of each creature, in the order in which they are added."""

_ID = MATERIAL_ID
_X, _Y = (axis.ravel() for axis in np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij"))
_DISTANCE = np.sqrt((_X - SIZE // 2) ** 2 + (_Y - SIZE // 2) ** 2)
"""Distance of each cell from the center, where the player starts."""
_IS_WALKABLE = np.isin(np.arange(len(_ID) + 1), list(WALKABLE))


_LAYERS = {
    "start": (_X / 3, _Y / 3, 8),
    "water": (_X / 15, _Y / 15, 3),
    "ripples": (_X / 5, _Y / 5, 3),
    "mountain": (_X / 15, _Y / 15, 0),
    "crags": (_X / 5, _Y / 5, 0),
    "caves": (_X / 7, _Y / 7, 6),
    "level": (2 * _X / 3, _Y / 5 / 3, 7),
    "upright": (_X / 5 / 3, 2 * _Y / 3, 7),
    "pools": (_X / 5, _Y / 5, 6),
    "coal": (_X / 8, _Y / 8, 1),
    "iron": (_X / 6, _Y / 6, 2),
    "dunes": (_X / 9, _Y / 9, 4),
    "woods": (_X / 7, _Y / 7, 5),
}
"""Where each layer of the landscape takes its noise from: x, y and z of all cells."""

_Lots = tuple[tuple[int, float], ...]
"""Materials that a cell may become, each with its threshold; the first draw above its threshold decides."""

_TREE: _Lots = ((_ID["tree"], 0.8),)
_COAL, _IRON, _DIAMOND = (_ID["coal"], 0.85), (_ID["iron"], 0.75), (_ID["diamond"], 0.994)


@cache
def _prepare_noise() -> Noise:
    x, y, z = zip(*_LAYERS.values(), strict=True)
    return Noise(np.concatenate(x), np.concatenate(y), np.repeat(np.array(z, np.float64), SIZE * SIZE))


def generate(random: np.random.RandomState) -> tuple[np.ndarray, Creatures]:
    """Draw a world: (material of each cell, flat and x-major, uint8; creatures without the player)."""
    noise = _prepare_noise().sample(int(random.randint(0, 2**31 - 1)))
    layers, uniform = dict(zip(_LAYERS, noise.reshape(len(_LAYERS), -1), strict=True)), random.random_sample
    start = 1 / (1 + np.exp(-(4 - _DISTANCE + 2 * layers["start"])))  # weight of the starting meadow
    water = layers["water"] + 0.15 * layers["ripples"] + 0.1 - 2 * start
    mountain = (layers["mountain"] + 0.3 * layers["crags"]) / 1.3 - (4 * start + 0.3 * water)
    land = np.full(SIZE * SIZE, _ID["grass"], np.uint8)
    wild = start <= 0.5
    tunnels, lots = _carve(layers, land, wild & (mountain > 0.15), mountain)
    flat = wild & (mountain <= 0.15)
    sand = flat & (water > 0.25) & (water <= 0.35) & (layers["dunes"] > -0.2)
    wet = flat & ~sand & (water > 0.3)
    land[sand], land[wet] = _ID["sand"], _ID["water"]
    lots.update(dict.fromkeys(np.flatnonzero(flat & ~sand & ~wet & (layers["woods"] > 0)).tolist(), _TREE))
    for cell in sorted(lots):
        for material, threshold in lots[cell]:
            if uniform() > threshold:
                land[cell] = material
                break
    cows = (land == _ID["grass"]) & (_DISTANCE > 3)
    zombies = _IS_WALKABLE[land] & (_DISTANCE > 10)
    skeletons = (land == _ID["path"]) & tunnels
    creatures: Creatures = []
    chances = ((cows.tolist(), COW, 0.985), (zombies.tolist(), ZOMBIE, 0.993), (skeletons.tolist(), SKELETON, 0.95))
    for cell in np.flatnonzero(cows | zombies | skeletons).tolist():
        # The first draw above its threshold decides.
        kinds = (kind for mask, kind, threshold in chances if mask[cell] and uniform() > threshold)
        if (kind := next(kinds, None)) is not None:
            creatures.append((kind, *divmod(cell, SIZE)))
    return land, creatures


def _carve(
    layers: dict[str, np.ndarray], land: np.ndarray, rock: np.ndarray, mountain: np.ndarray
) -> tuple[np.ndarray, dict[int, _Lots]]:
    """Write the rock cells without ores into `land`; return the mask of tunnels and the draws for ores."""
    cave = rock & (layers["caves"] > 0.15) & (mountain > 0.3)
    tunnel = rock & ~cave & ((layers["level"] > 0.4) | (layers["upright"] > 0.4))
    solid = rock & ~cave & ~tunnel
    land[cave | tunnel], land[solid] = _ID["path"], _ID["stone"]
    land[solid & (mountain > 0.3) & (layers["pools"] > 0.35)] = _ID["lava"]
    lots: dict[int, _Lots] = {}
    for mask, lot in ((layers["coal"] > 0, _COAL), (layers["iron"] > 0.4, _IRON), (mountain > 0.18, _DIAMOND)):
        for cell in np.flatnonzero(solid & mask).tolist():
            lots[cell] = (*lots.get(cell, ()), lot)
    return tunnel, lots
