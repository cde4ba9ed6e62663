"""Draws a Crafter landscape: noise shapes the land, random draws place ores, trees and creatures.

Random numbers are drawn cell by cell in the original's order, x before y. The noise, which takes most of the
original's time, is computed for whole areas at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from envs.crafter_world.noise import Noise
from envs.crafter_world.rules import COW, MATERIAL_ID, SIZE, SKELETON, WALKABLE, ZOMBIE

Creatures = list[tuple[int, int, int]]
"""Kind, x and y of each creature, in the order in which they are added."""

_ID = MATERIAL_ID
_X, _Y = (axis.ravel() for axis in np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij"))
_DISTANCE = np.sqrt((_X - SIZE // 2) ** 2 + (_Y - SIZE // 2) ** 2)
"""Distance of each cell from the center, where the player starts."""


def generate(random: np.random.RandomState) -> tuple[np.ndarray, Creatures]:
    """Draw a world: (material of each cell, flat and x-major, uint8; creatures without the player)."""
    noise = Noise(int(random.randint(0, 2**31 - 1)))
    land, tunnels = _shape_land(noise, random.random_sample)
    return land, _scatter_creatures(land, tunnels, random.random_sample)


def _shape_land(noise: Noise, uniform: Callable[[], float]) -> tuple[np.ndarray, np.ndarray]:
    """Return materials and the mask of tunnels."""
    start, water, mountain = _elevation(noise)
    land = np.full(SIZE * SIZE, _ID["grass"], np.uint8)
    tunnels = np.zeros(SIZE * SIZE, bool)
    wild = start <= 0.5
    rock = np.flatnonzero(wild & (mountain > 0.15))
    land[rock], tunnels[rock], lots = _carve(noise, rock, mountain[rock])
    flat = np.flatnonzero(wild & (mountain <= 0.15))
    water, x, y = water[flat], _X[flat], _Y[flat]
    dunes, woods = _sample(noise, [(x / 9, y / 9, 4), (x / 7, y / 7, 5)])
    sand = (water > 0.25) & (water <= 0.35) & (dunes > -0.2)
    wet = ~sand & (water > 0.3)
    land[flat[sand]], land[flat[wet]] = _ID["sand"], _ID["water"]
    lots.update(dict.fromkeys(flat[~sand & ~wet & (woods > 0)].tolist(), (_TREE,)))
    for cell in sorted(lots):
        for material, threshold in lots[cell]:
            if uniform() > threshold:
                land[cell] = material
                break
    return land, tunnels


def _elevation(noise: Noise) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights of the starting meadow, of water and of mountains for each cell."""
    coarse, fine = (_X / 15, _Y / 15), (_X / 5, _Y / 5)
    layers = [(_X / 3, _Y / 3, 8), (*coarse, 3), (*fine, 3), (*coarse, 0), (*fine, 0)]
    start, water, ripples, mountain, crags = _sample(noise, layers)
    start = 4 - _DISTANCE + 2 * start
    start = 1 / (1 + np.exp(-start))
    water = water + 0.15 * ripples + 0.1 - 2 * start
    mountain = (mountain + 0.3 * crags) / 1.3 - (4 * start + 0.3 * water)
    return start, water, mountain


def _sample(noise: Noise, layers: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> list[np.ndarray]:
    """Return the noise of several layers, each (x, y, z) with one z, computed in one call."""
    x, y = np.concatenate([layer[0] for layer in layers]), np.concatenate([layer[1] for layer in layers])
    z = np.repeat([float(layer[2]) for layer in layers], [len(layer[0]) for layer in layers])
    return np.split(noise(x, y, z), np.cumsum([len(layer[0]) for layer in layers])[:-1])


_Lots = tuple[tuple[int, float], ...]
"""Materials that a cell may become, each with its threshold; the first draw above its threshold decides."""

_TREE = (_ID["tree"], 0.8)
_COAL, _IRON, _DIAMOND = (_ID["coal"], 0.85), (_ID["iron"], 0.75), (_ID["diamond"], 0.994)


def _carve(noise: Noise, rock: np.ndarray, mountain: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, _Lots]]:
    """Return the materials of the rock cells without ores, the mask of tunnels, and the draws for ores."""
    x, y = _X[rock], _Y[rock]
    scales = [(x / 7, y / 7, 6), (2 * x / 3, y / 5 / 3, 7), (x / 5 / 3, 2 * y / 3, 7)]
    scales += [(x / 5, y / 5, 6), (x / 8, y / 8, 1), (x / 6, y / 6, 2)]
    caves, level, upright, pools, coal, iron = _sample(noise, scales)
    cave = (caves > 0.15) & (mountain > 0.3)
    tunnel = ~cave & ((level > 0.4) | (upright > 0.4))
    solid = ~cave & ~tunnel
    lava = solid & (mountain > 0.3) & (pools > 0.35)
    land = np.where(solid, np.where(lava, _ID["lava"], _ID["stone"]), _ID["path"])
    chances = ((solid & (coal > 0), _COAL), (solid & (iron > 0.4), _IRON), (solid & (mountain > 0.18), _DIAMOND))
    lots: dict[int, _Lots] = {}
    for mask, lot in chances:
        for cell in rock[mask].tolist():
            lots[cell] = (*lots.get(cell, ()), lot)
    return land, tunnel, lots


def _scatter_creatures(land: np.ndarray, tunnels: np.ndarray, uniform: Callable[[], float]) -> Creatures:
    creatures: Creatures = []
    far_from_cows, far_from_zombies = (_DISTANCE > 3).tolist(), (_DISTANCE > 10).tolist()
    in_tunnel = (tunnels & (land == _ID["path"])).tolist()
    for cell, material in enumerate(land.tolist()):
        if material not in WALKABLE:
            continue
        if material == _ID["grass"] and far_from_cows[cell] and uniform() > 0.985:
            kind = COW
        elif far_from_zombies[cell] and uniform() > 0.993:
            kind = ZOMBIE
        elif in_tunnel[cell] and uniform() > 0.95:
            kind = SKELETON
        else:
            continue
        creatures.append((kind, *divmod(cell, SIZE)))
    return creatures
