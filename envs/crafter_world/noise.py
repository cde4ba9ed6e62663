"""OpenSimplex noise in three dimensions for whole arrays, bit for bit equal to the `opensimplex` package.

A point's value is a sum over up to eight lattice points around it. The choice of points and the order of additions and
subtractions affect the last bits, so both follow the original. One table holds all of its cases.
"""

from __future__ import annotations

import numpy as np
from opensimplex.constants import GRADIENTS3, NORM_CONSTANT3, SQUISH_CONSTANT3, STRETCH_CONSTANT3

Vertex = tuple[int, ...]
"""Three coordinates of a lattice point, relative to the cell's corner."""

_NEAR_ORIGIN: list[Vertex] = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
_NEAR_FAR_END: list[Vertex] = [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
_BETWEEN: list[Vertex] = [*_NEAR_ORIGIN[1:], *_NEAR_FAR_END[:3]]
# A point's case combines the part of the cell that it is in with the closest lattice points, as bit sets.
_FAR_END, _MIDDLE, _CASES = 16, 32, 96
_PART_ENDS = {0: _FAR_END, _FAR_END: _MIDDLE, _MIDDLE: _CASES}
_FAR_POINTS = (3, 5, 6)
_BLOCK = 5000
"""Points per block; their arrays fit into the processor's cache."""


class Noise:
    """The noise field of one seed."""

    def __init__(self, seed: int) -> None:
        self._permutation = _permutation(seed)
        gradients = GRADIENTS3.reshape(-1, 3)[self._permutation % (len(GRADIENTS3) // 3)]
        self._gradients = np.ascontiguousarray(gradients.T, dtype=np.float64)

    def __call__(self, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        """Return the noise in about [-1, 1] at the points of three equally long float64 arrays."""
        places = np.stack([x, y, z])
        blocks = [self._evaluate(places[:, start : start + _BLOCK]) for start in range(0, len(x), _BLOCK)]
        return np.concatenate(blocks) if blocks else np.zeros(0)

    def _evaluate(self, place: np.ndarray) -> np.ndarray:
        stretched = place + (place[0] + place[1] + place[2]) * STRETCH_CONSTANT3
        corner = np.floor(stretched)
        delta = place - (corner + (corner[0] + corner[1] + corner[2]) * SQUISH_CONSTANT3)
        cases = _classify(*(stretched - corner))
        value = np.zeros(len(cases))
        for first, fixed in ((0, _NEAR_ORIGIN), (_FAR_END, _NEAR_FAR_END), (_MIDDLE, _BETWEEN)):
            part = np.flatnonzero((cases >= first) & (cases < _PART_ENDS[first]))
            value[part] = self._sum(corner[:, part], delta[:, part], fixed, cases[part])
        return value / NORM_CONSTANT3

    def _sum(self, corner: np.ndarray, delta: np.ndarray, fixed: list[Vertex], cases: np.ndarray) -> np.ndarray:
        """Sum over the lattice points shared by a part of the cell, and over the two extra ones of each case."""
        value = np.zeros(len(cases))
        for vertex in fixed:
            offset = np.array(vertex, dtype=np.float64)[:, None]
            self._contribute(value, corner, delta - offset - sum(vertex) * SQUISH_CONSTANT3, offset)
        for early, late, squish in zip(_EARLY, _LATE, _SQUISH, strict=True):
            offset, after = early[:, cases], late[:, cases]
            self._contribute(value, corner, delta - offset - squish[cases] - after, offset + after)
        return value

    def _contribute(self, value: np.ndarray, corner: np.ndarray, delta: np.ndarray, offset: np.ndarray) -> None:
        """Add the contribution of the lattice points at `corner + offset` to points `delta` away, if near enough."""
        dx, dy, dz = delta
        falloff = 2 - dx * dx - dy * dy - dz * dz
        near = np.flatnonzero(falloff > 0)
        i, j, k = (corner + offset).take(near, axis=1).astype(np.int64)
        hashed = self._permutation.take((self._permutation.take(i & 0xFF) + j) & 0xFF)
        gx, gy, gz = self._gradients.take((hashed + k) & 0xFF, axis=1)
        dx, dy, dz = delta.take(near, axis=1)
        falloff = falloff.take(near)
        falloff *= falloff
        value[near] += falloff * falloff * (gx * dx + gy * dy + gz * dz)


def _permutation(seed: int) -> np.ndarray:
    """Shuffle 0..255 with a 64-bit linear congruential generator."""

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


def _bits(points: int) -> Vertex:
    return (points & 1, points >> 1 & 1, points >> 2 & 1)


def _replace(vertex: Vertex, axis: int, value: int) -> Vertex:
    return tuple(value if index == axis else old for index, old in enumerate(vertex))


def _end_extras(far_end: bool, with_corner: bool, axes: int) -> list[Vertex]:
    """Return the two extra lattice points of a case in one of a cell's two tetrahedra."""
    points = _bits(7 ^ axes if far_end else axes)
    if not with_corner:
        unset = [axis for axis in range(3) if not points[axis]]
        return [points, tuple(2 * bit for bit in points) if far_end else _replace(points, unset[0], -1)]
    moved = [axis for axis in range(3) if points[axis] == far_end]
    return [_replace(points, axis, 2 if far_end else -1) for axis in moved]


def _middle_extras(a: int, b: int) -> list[Vertex]:
    """Return the two extra lattice points of a case in a cell's octahedron, closest to the points a and b."""
    far = [point for point in (a, b) if point in _FAR_POINTS]
    if len(far) == 2:
        return [(1, 1, 1), tuple(2 * bit for bit in _bits(a & b))]
    if not far:
        return [(0, 0, 0), tuple(2 * bit - 1 for bit in _bits(a | b))]
    (near,) = {a, b} - set(far)
    return [tuple(2 * bit - 1 for bit in _bits(far[0])), tuple(2 * bit for bit in _bits(near))]


def _late_part(case: int, vertex: Vertex) -> Vertex:
    """Return the part of an extra lattice point that the original subtracts after the squish, not before."""
    if _FAR_END + 8 <= case < _MIDDLE and vertex[1] == 2:
        return (0, 1, 0)
    points = divmod(case - _MIDDLE, 8)
    if case >= _MIDDLE and sum(point in _FAR_POINTS for point in points) == 1 and 2 in vertex:
        return vertex
    return (0, 0, 0)


def _tabulate() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the extra lattice points' early and late offsets, (2, 3, cases), and their squish, (2, cases)."""
    extras = {}
    for far_end in (False, True):
        for axis in (1, 2, 4):
            extras[_FAR_END * far_end + 8 + axis] = _end_extras(far_end, True, axis)
            extras[_FAR_END * far_end + 7 - axis] = _end_extras(far_end, False, 7 - axis)
    for a in range(1, 7):
        for b in {1, 2, 3, 4, 5, 6} - {a, 7 - a}:
            extras[_MIDDLE + 8 * a + b] = _middle_extras(a, b)
    early, late = np.zeros((2, 2, 3, _CASES))
    for case, vertices in extras.items():
        for place, vertex in enumerate(vertices):
            late[place, :, case] = _late_part(case, vertex)
            early[place, :, case] = np.array(vertex) - late[place, :, case]
    return early, late, (early + late).sum(axis=1) * SQUISH_CONSTANT3


_EARLY, _LATE, _SQUISH = _tabulate()
