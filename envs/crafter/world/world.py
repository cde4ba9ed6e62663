"""One Crafter world: its animals, monsters and arrows, its steps, day and night, and the numbers of creatures.

All random draws of the original are made in the same order from the same generator, including those of the images
that BALROG renders. So the same seed and actions give the same episode as in BALROG.
"""

from functools import cache
from typing import Any, cast

import numpy as np

from envs.crafter.world.grid import Being, Chunk, Creature, Direction, Grid
from envs.crafter.world.player import Player
from envs.crafter.world.rules import ARROW, COW, MATERIAL_ID, SIZE, SKELETON, STRIDE, WALKABLE, ZOMBIE
from envs.crafter.world.terrain import generate

_BREAKABLE = (MATERIAL_ID["table"], MATERIAL_ID["furnace"])
_GRASS, _PATH = MATERIAL_ID["grass"], MATERIAL_ID["path"]
NOISE_SHAPE = (252, 196)
"""Random numbers per image at night: BALROG's 256 x 256 pixels without border and inventory."""
_IMAGES_PER_STEP = 2
_ACTIVE_DISTANCE = 18
_BALANCE_EVERY = 10


class Cow(Creature):
    __slots__ = ()
    kind = COW
    full_health = 3

    def update(self) -> None:
        if self.health <= 0:
            self.world.remove(self)
        if self.world.uniform() < 0.5:
            self.move_randomly()


class Monster(Creature):
    """A creature that attacks the player; `cooldown` counts the turns until it can do so again."""

    __slots__ = ("cooldown", "player")

    def __init__(self, world: Grid, x: int, y: int, player: Player) -> None:
        super().__init__(world, x, y)
        self.player, self.cooldown = player, 0


class Zombie(Monster):
    """Follows the player, and hits every sixth turn when next to the player; a sleeping player is hurt most."""

    __slots__ = ()
    kind = ZOMBIE
    full_health = 5

    def update(self) -> None:
        player, uniform = self.player, self.world.uniform
        if self.health <= 0:
            self.world.remove(self)
        if self.distance(player.x, player.y) <= 8 and uniform() < 0.9:
            self.move(self.toward(player, uniform() < 0.8))
        else:
            self.move_randomly()
        if self.distance(player.x, player.y) > 1:
            return
        if self.cooldown:
            self.cooldown -= 1
        else:
            player.hurt(7 if player.sleeping else 2)
            self.cooldown = 5


class Skeleton(Monster):
    """Moves away from a player who is close; from farther away it shoots or comes nearer."""

    __slots__ = ()
    kind = SKELETON
    full_health = 3

    def update(self) -> None:
        player, uniform = self.player, self.world.uniform
        if self.health <= 0:
            self.world.remove(self)
        self.cooldown = max(0, self.cooldown - 1)
        distance = self.distance(player.x, player.y)
        if distance <= 3:
            dx, dy = self.toward(player, uniform() < 0.6)
            if self.move((-dx, -dy)):
                return
        if distance <= 5 and uniform() < 0.5:
            dx, dy = self.toward(player)
            x, y = self.x + dx, self.y + dy
            if not self.cooldown and (dx or dy) and self.world.is_free(x * STRIDE + y, Arrow.walkable):
                self.world.add(Arrow(self.world, x, y, (dx, dy)))
                self.cooldown = 4
        elif distance <= 8 and uniform() < 0.3:
            self.move(self.toward(player, uniform() < 0.6))
        elif uniform() < 0.2:
            self.move_randomly()


class Arrow(Creature):
    """Flies until it hits something; breaks tables and furnaces."""

    __slots__ = ("facing",)
    kind = ARROW
    full_health = 0
    walkable = WALKABLE | {MATERIAL_ID["water"], MATERIAL_ID["lava"]}

    def __init__(self, world: Grid, x: int, y: int, facing: Direction) -> None:
        super().__init__(world, x, y)
        self.facing = facing

    def update(self) -> None:
        world = self.world
        target = self.cell + self.facing[0] * STRIDE + self.facing[1]
        hit, material = world.beings_at[target], world.materials[target]
        if hit:
            hit.hurt(2)
            world.remove(self)
        elif material not in self.walkable:
            world.remove(self)
            if material in _BREAKABLE:
                world.set_material(target, _PATH)
        else:
            self.move(self.facing)


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
            light = self.daylight
            monsters = 3.5 - 3 * light
            for chunk in list(self.settled):
                grass, paths = chunk.counts[_GRASS], chunk.counts[_PATH]
                self._regulate(chunk, ZOMBIE, _GRASS, (6, 0), (0.3, 0.4), (0 if grass < 50 else monsters, monsters))
                self._regulate(chunk, SKELETON, _PATH, (7, 7), (0.1, 0.1), (0 if paths < 6 else 1, 2))
                self._regulate(chunk, COW, _GRASS, (5, 5), (0.01, 0.1), (0 if grass < 30 else 1, 1.5 + light))
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
