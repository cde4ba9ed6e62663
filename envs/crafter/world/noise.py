"""OpenSimplex noise in three dimensions for whole arrays, bit for bit equal to the `opensimplex` package.

A point's value is a sum over up to eight lattice points around it. The choice of points and the order of additions and
subtractions affect the last bits, so both follow the original. `lattice.yaml` holds all of its cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from opensimplex.constants import GRADIENTS3, NORM_CONSTANT3, SQUISH_CONSTANT3, STRETCH_CONSTANT3

Vertex = tuple[int, ...]
"""Three coordinates of a lattice point, relative to the cell's corner."""

_NEAR_ORIGIN: list[Vertex] = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
_NEAR_FAR_END: list[Vertex] = [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
_BETWEEN: list[Vertex] = [*_NEAR_ORIGIN[1:], *_NEAR_FAR_END[:3]]
# A point's case combines the part of the cell that it is in with the closest lattice points, as bit sets.
_FAR_END, _MIDDLE, _CASES = 16, 32, 96
_PART_ENDS = {0: _FAR_END, _FAR_END: _MIDDLE, _MIDDLE: _CASES}


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


# The extra lattice points' early and late offsets, (2, 3, cases), and their squish, (2, cases).
_EARLY, _LATE = np.zeros((2, 2, 3, _CASES))
for _case, _lists in yaml.safe_load(Path(__file__).with_name("lattice.yaml").read_text(encoding="utf-8")).items():
    _LATE[:, :, _case] = _lists[2:] or 0
    _EARLY[:, :, _case] = np.array(_lists[:2]) - _LATE[:, :, _case]
_SQUISH = (_EARLY + _LATE).sum(axis=1) * SQUISH_CONSTANT3
