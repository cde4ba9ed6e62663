"""Crafter's animals, monsters and arrows; random draws are in the order of the original."""

from envs.crafter.world.grid import Creature, Direction, Grid
from envs.crafter.world.player import Player
from envs.crafter.world.rules import ARROW, COW, MATERIAL_ID, SKELETON, STRIDE, WALKABLE, ZOMBIE

_BREAKABLE = (MATERIAL_ID["table"], MATERIAL_ID["furnace"])
_PATH = MATERIAL_ID["path"]


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
            self._shoot(self.toward(player))
        elif distance <= 8 and uniform() < 0.3:
            self.move(self.toward(player, uniform() < 0.6))
        elif uniform() < 0.2:
            self.move_randomly()

    def _shoot(self, direction: Direction) -> None:
        if self.cooldown > 0 or direction == (0, 0):
            return
        x, y = self.x + direction[0], self.y + direction[1]
        if self.world.is_free(x * STRIDE + y, Arrow.walkable):
            self.world.add(Arrow(self.world, x, y, direction))
            self.cooldown = 4


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
