"""Draws a Crafter landscape: noise shapes the land, random draws place ores, trees and creatures.

Random numbers are drawn cell by cell in the original's order, x before y. The noise, which takes most of the
original's time, is computed for whole arrays at once, bit for bit equal to the `opensimplex` package: a point's value
is a sum over up to eight lattice points around it. The choice of points and the order of additions and subtractions
affect the last bits, so both follow the original. `lattice.yaml` holds all of its cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from opensimplex.constants import GRADIENTS3, NORM_CONSTANT3, SQUISH_CONSTANT3, STRETCH_CONSTANT3

from envs.crafter.world.rules import COW, MATERIAL_ID, SIZE, SKELETON, WALKABLE, ZOMBIE

Vertex = tuple[int, ...]
"""Three coordinates of a lattice point, relative to the cell's corner."""
_NEAR_ORIGIN: list[Vertex] = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
_NEAR_FAR_END: list[Vertex] = [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
_BETWEEN: list[Vertex] = [*_NEAR_ORIGIN[1:], *_NEAR_FAR_END[:3]]
# A point's case combines the part of the cell that it is in with the closest lattice points, as bit sets.
_FAR_END, _MIDDLE, _CASES = 16, 32, 96
_PART_ENDS = {0: _FAR_END, _FAR_END: _MIDDLE, _MIDDLE: _CASES}

# The extra lattice points' early and late offsets, (2, 3, cases), and their squish, (2, cases).
_EARLY, _LATE = np.zeros((2, 2, 3, _CASES))
for _case, _lists in yaml.safe_load(Path(__file__).with_name("lattice.yaml").read_text(encoding="utf-8")).items():
    _LATE[:, :, _case] = _lists[2:] or 0
    _EARLY[:, :, _case] = np.array(_lists[:2]) - _LATE[:, :, _case]
_SQUISH = (_EARLY + _LATE).sum(axis=1) * SQUISH_CONSTANT3

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


@cache
def _prepare_noise() -> Noise:
    x, y, z = zip(*_LAYERS.values(), strict=True)
    return Noise(np.concatenate(x), np.concatenate(y), np.repeat(np.array(z, np.float64), SIZE * SIZE))


class Noise:
    """The noise at fixed points, for any seed; what does not depend on the seed is computed once."""

    def __init__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
        """Prepare the points of three equally long float64 arrays."""
        place = np.stack([x, y, z])
        stretched = place + (place[0] + place[1] + place[2]) * STRETCH_CONSTANT3
        corner = np.floor(stretched)
        delta = place - (corner + (corner[0] + corner[1] + corner[2]) * SQUISH_CONSTANT3)
        cases = _classify(*(stretched - corner))
        terms = []
        for first, fixed in ((0, _NEAR_ORIGIN), (_FAR_END, _NEAR_FAR_END), (_MIDDLE, _BETWEEN)):
            part = np.flatnonzero((cases >= first) & (cases < _PART_ENDS[first]))
            for offset, distance in _surround(delta[:, part], fixed, cases[part]):
                dx, dy, dz = distance
                falloff = 2 - dx * dx - dy * dy - dz * dz
                near = np.flatnonzero(falloff > 0)
                i, j, k = (corner[:, part] + offset)[:, near].astype(np.int64) & 0xFF
                falloff = falloff[near] * falloff[near]
                terms.append(_Terms(part[near], i << 16 | j << 8 | k, distance[:, near], falloff * falloff))
        self._sort(terms, len(x))

    def _sort(self, terms: list[_Terms], points: int) -> None:
        """Group the terms by their place in their points' sums; points with most terms come first in each group."""
        counts, groups = np.zeros(points, np.intp), []
        for term in terms:
            groups.append(counts[term.point])
            counts[term.point] += 1
        group = np.concatenate(groups)
        self._points = np.argsort(-counts, kind="stable")
        rank = np.empty(points, np.intp)
        rank[self._points] = np.arange(points)
        point, vertex, delta, weight = (np.concatenate(column, axis=-1) for column in zip(*terms, strict=True))
        order = np.lexsort((rank[point], group))
        vertices, vertex = np.unique(vertex[order], return_inverse=True)
        self._vertices = vertices >> 16, vertices >> 8 & 0xFF, vertices & 0xFF
        ends = np.cumsum(np.bincount(group))[:-1]
        columns = [np.split(column[order], ends) for column in (*delta, weight)]
        self._groups = list(zip(np.split(vertex, ends), *columns, strict=True))

    def sample(self, seed: int) -> np.ndarray:
        """Return the noise of this seed at the points, in about [-1, 1]."""
        permutation, (i, j, k) = _permutation(seed), self._vertices
        hashed = permutation[(permutation[(permutation[i] + j) & 0xFF] + k) & 0xFF]
        gradients = GRADIENTS3.reshape(-1, 3)[hashed % (len(GRADIENTS3) // 3)].T.astype(np.float64, order="C")
        value = np.zeros(len(self._points))
        for vertex, dx, dy, dz, weight in self._groups:
            term = gradients[0].take(vertex) * dx
            term += gradients[1].take(vertex) * dy
            term += gradients[2].take(vertex) * dz
            term *= weight
            value[: len(term)] += term
        result = np.empty_like(value)
        result[self._points] = value / NORM_CONSTANT3
        return result


class _Terms(NamedTuple):
    """What one lattice point contributes to each of several points."""

    point: np.ndarray
    vertex: np.ndarray
    """The lattice points' coordinates, 8 bits each."""
    delta: np.ndarray
    """From the lattice points to the points, (3, points)."""
    weight: np.ndarray


def _surround(delta: np.ndarray, fixed: list[Vertex], cases: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield offsets and distances (3, points) of a part's shared lattice points, then of the extra ones."""
    for vertex in fixed:
        offset = np.array(vertex, dtype=np.float64)[:, None]
        yield offset, delta - offset - sum(vertex) * SQUISH_CONSTANT3
    for early, late, squish in zip(_EARLY, _LATE, _SQUISH, strict=True):
        offset, after = early[:, cases], late[:, cases]
        yield offset + after, delta - offset - squish[cases] - after


def _permutation(seed: int) -> np.ndarray:
    def advance(state: int) -> int:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return state - 2**64 if state >= 2**63 else state

    for _ in range(3):
        seed = advance(seed)
    source, result = list(range(256)), [0] * 256
    for last in range(255, -1, -1):
        seed = advance(seed)
        drawn = (seed + 31) % (last + 1)
        result[last] = source[drawn]
        source[drawn] = source[last]
    return np.array(result, dtype=np.int64)


def _classify(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return each point's case from its position in the cell; axes and corners are the bits 1, 2 and 4."""
    total = x + y + z
    sums = (x + y - 1, x + z - 1, y + z - 1)
    first, second = np.where(sums[0] > 0, 3, 4), np.where(sums[1] > 0, 5, 2)
    third = np.where(sums[2] > 0, 6, 1)
    a, b, c = (np.abs(s) for s in sums)
    case = _MIDDLE + 8 * np.where((a <= b) & (a < c), third, first) + np.where((a > b) & (b < c), third, second)
    case = np.where(total >= 2, _FAR_END + _classify_end(-x, -y, -z, total - 3), case)
    return np.where(total <= 1, _classify_end(x, y, z, 1 - total), case)


def _classify_end(x: np.ndarray, y: np.ndarray, z: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Return 8 + the nearest axis if the corner is among the two nearest points, else the two nearest axes."""
    z_beats_y, z_beats_x = (x >= y) & (z > y), (x < y) & (z > x)
    a, b = np.where(z_beats_x, 4, 1), np.where(z_beats_y, 4, 2)
    a_score, b_score = np.where(z_beats_x, z, x), np.where(z_beats_y, z, y)
    with_corner = (corner > a_score) | (corner > b_score)
    return np.where(with_corner, 8 + np.where(b_score > a_score, b, a), a | b)
