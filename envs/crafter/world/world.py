"""One Crafter world: its steps, day and night, and the numbers of creatures.

All random draws of the original are made in the same order from the same generator, including those of the images
that BALROG renders. So the same seed and actions give the same episode as in BALROG.
"""

from functools import cache
from typing import Any, cast

import numpy as np

from envs.crafter.world.creatures import Cow, Skeleton, Zombie
from envs.crafter.world.grid import Being, Chunk, Grid
from envs.crafter.world.player import Player
from envs.crafter.world.rules import COW, MATERIAL_ID, SIZE, SKELETON, STRIDE, ZOMBIE
from envs.crafter.world.terrain import generate

NOISE_SHAPE = (252, 196)
"""Random numbers per image at night: BALROG's 256 x 256 pixels without border and inventory."""
_IMAGES_PER_STEP = 2
_ACTIVE_DISTANCE = 18
_BALANCE_EVERY = 10
_GRASS, _PATH = MATERIAL_ID["grass"], MATERIAL_ID["path"]


class World(Grid):
    """The state of one world. With `images`, `noise` holds the random numbers of the last image, None by day."""

    def __init__(self, seed: int, images: bool = False) -> None:
        # The original counts its episodes from 1 and seeds each with this hash.
        seeded = np.random.RandomState(hash((seed, 1)) % (2**31 - 1))
        bits = np.random.MT19937()
        bits.state = cast(Any, seeded.get_state(legacy=False))
        random = np.random.RandomState(bits)
        land, creatures = generate(random)
        super().__init__(land, random, bits.random_raw)
        self.steps = 0
        self.daylight = daylight(0)
        self.noise: np.ndarray | None = None
        self._images = images
        self.player = Player(self, SIZE // 2, SIZE // 2)
        self.add(self.player)
        for kind, x, y in creatures:
            self.add(self._make_creature(kind, x, y))
        self.unlocked: frozenset[str] = frozenset()
        self._last_health = self.player.health

    def _make_creature(self, kind: int, x: int, y: int) -> Being:
        if kind == COW:
            return Cow(self, x, y)
        return (Zombie if kind == ZOMBIE else Skeleton)(self, x, y, self.player)

    def step(self, action: str) -> float:
        """Advance one step; return Crafter's reward: 1 for any new achievement, 0.1 per point of health."""
        self.steps += 1
        self.daylight = daylight(self.steps)
        player = self.player
        player.action = action
        for being in list(self.beings):
            if abs(being.x - player.x) + abs(being.y - player.y) < _ACTIVE_DISTANCE:
                being.update()
        if self.steps % _BALANCE_EVERY == 0:
            for chunk in list(self.settled):
                self._balance(chunk)
        self.noise = None
        if self.daylight < 0.5:
            # Crafter renders one image per step, and BALROG another, which it shows.
            noise = self.random.random_sample((_IMAGES_PER_STEP, *NOISE_SHAPE))
            self.noise = noise[-1] if self._images else None
        reward = (player.health - self._last_health) / 10
        self._last_health = player.health
        unlocked = [name for name, count in player.achievements.items() if count > 0]
        if len(unlocked) > len(self.unlocked):
            self.unlocked = frozenset(unlocked)
            reward += 1.0
        return reward

    def _balance(self, chunk: Chunk) -> None:
        light, grass = self.daylight, chunk.counts[_GRASS]
        monsters = 3.5 - 3 * light
        self._regulate(chunk, ZOMBIE, _GRASS, (6, 0), (0.3, 0.4), (0 if grass < 50 else monsters, monsters))
        self._regulate(chunk, SKELETON, _PATH, (7, 7), (0.1, 0.1), (0 if chunk.counts[_PATH] < 6 else 1, 2))
        self._regulate(chunk, COW, _GRASS, (5, 5), (0.01, 0.1), (0 if grass < 30 else 1, 1.5 + light))

    def _regulate(
        self,
        chunk: Chunk,
        kind: int,
        material: int,
        distances: tuple[int, int],
        chances: tuple[float, float],
        limits: tuple[float, float],
    ) -> None:
        """Add a creature with some chance if there are too few in the region, or remove one if there are too many.

        Pairs hold the values for adding and for removing; `distances` are minimum distances from the player.
        """
        creatures = [being for being in chunk.beings if being.kind == kind]
        if len(creatures) < int(limits[0]) and self.uniform() < chances[0]:
            cells = [cell for cell in chunk.cells if self.materials[cell] == material]
            cell = cells[self.random.randint(0, len(cells))]
            x, y = divmod(cell, STRIDE)
            if self.beings_at[cell] is None and self.player.distance(x, y) >= distances[0]:
                self.add(self._make_creature(kind, x, y))
        elif len(creatures) > int(limits[1]) and self.uniform() < chances[1]:
            creature = creatures[self.random.randint(0, len(creatures))]
            if self.player.distance(creature.x, creature.y) >= distances[1]:
                self.remove(creature)


@cache
def daylight(step: int) -> float:
    """Return the daylight, 0 to 1; a day has 300 steps."""
    progress = (step / 300) % 1 + 0.3
    return float(1 - np.abs(np.cos(np.pi * progress)) ** 3)
