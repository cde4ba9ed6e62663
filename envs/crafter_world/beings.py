"""What moves, shoots and grows in Crafter's world; the order of random draws is the original's."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from envs.crafter_world.rules import ARROW, COW, MATERIAL_ID, PLANT, SKELETON, STRIDE, WALKABLE, ZOMBIE

if TYPE_CHECKING:
    from envs.crafter_world.player import Player
    from envs.crafter_world.world import World

Direction = tuple[int, int]

_COMPASS: tuple[Direction, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
_CREATURES = (COW, ZOMBIE, SKELETON)
_BREAKABLE = (MATERIAL_ID["table"], MATERIAL_ID["furnace"])
_PATH = MATERIAL_ID["path"]
_RIPE_AFTER = 300


class Being:
    """Something on a cell. One that was removed in this step still takes its turn, as in the original."""

    __slots__ = ("cell", "removed", "world", "x", "y")
    kind: ClassVar[int]
    walkable: ClassVar[frozenset[int]] = WALKABLE
    health: int

    def __init__(self, world: World, x: int, y: int) -> None:
        self.world, self.x, self.y, self.cell = world, x, y, x * STRIDE + y
        self.removed = False

    def update(self) -> None:
        """Take one turn."""
        raise NotImplementedError

    def hurt(self, damage: int) -> None:
        self.health = max(0, self.health - damage)

    def move(self, direction: Direction) -> bool:
        """Go one step if the cell there is free; return whether it was."""
        target = self.cell + direction[0] * STRIDE + direction[1]
        if not self.world.is_free(target, self.walkable):
            return False
        if not self.removed:
            self.world.move(self, direction, target)
        return True

    def distance(self, x: int, y: int) -> int:
        return abs(x - self.x) + abs(y - self.y)

    def toward(self, other: Being, long_axis: bool = True) -> Direction:
        """Return the step to another being along the longer axis of the way, or along the shorter one."""
        dx, dy = other.x - self.x, other.y - self.y
        if (abs(dx) > abs(dy)) if long_axis else (abs(dx) <= abs(dy)):
            return (dx > 0) - (dx < 0), 0
        return 0, (dy > 0) - (dy < 0)

    def move_randomly(self) -> None:
        self.move(_COMPASS[self.world.draw_word() & 3])


class Cow(Being):
    __slots__ = ("health",)
    kind = COW

    def __init__(self, world: World, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.health = 3

    def update(self) -> None:
        if self.health <= 0:
            self.world.remove(self)
        if self.world.uniform() < 0.5:
            self.move_randomly()


class Zombie(Being):
    """Comes for the player; its blow falls every sixth turn beside them, and hurts a sleeper most."""

    __slots__ = ("cooldown", "health", "player")
    kind = ZOMBIE

    def __init__(self, world: World, x: int, y: int, player: Player) -> None:
        super().__init__(world, x, y)
        self.player, self.health, self.cooldown = player, 5, 0

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


class Skeleton(Being):
    """Backs away from a player who is close, and shoots or comes nearer from farther away."""

    __slots__ = ("health", "player", "reload")
    kind = SKELETON

    def __init__(self, world: World, x: int, y: int, player: Player) -> None:
        super().__init__(world, x, y)
        self.player, self.health, self.reload = player, 3, 0

    def update(self) -> None:
        player, uniform = self.player, self.world.uniform
        if self.health <= 0:
            self.world.remove(self)
        self.reload = max(0, self.reload - 1)
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
        if self.reload > 0 or direction == (0, 0):
            return
        x, y = self.x + direction[0], self.y + direction[1]
        if self.world.is_free(x * STRIDE + y, Arrow.walkable):
            self.world.add(Arrow(self.world, x, y, direction))
            self.reload = 4


class Arrow(Being):
    """Flies on until it hits; it breaks tables and furnaces."""

    __slots__ = ("facing", "health")
    kind = ARROW
    walkable = WALKABLE | {MATERIAL_ID["water"], MATERIAL_ID["lava"]}

    def __init__(self, world: World, x: int, y: int, facing: Direction) -> None:
        super().__init__(world, x, y)
        self.facing, self.health = facing, 0

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


class Plant(Being):
    """Ripens slowly; any creature beside it eats it."""

    __slots__ = ("grown", "health")
    kind = PLANT

    def __init__(self, world: World, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.health, self.grown = 1, 0

    @property
    def ripe(self) -> bool:
        return self.grown > _RIPE_AFTER

    def update(self) -> None:
        self.grown += 1
        beings_at, cell = self.world.beings_at, self.cell
        around = (beings_at[cell - STRIDE], beings_at[cell + STRIDE], beings_at[cell - 1], beings_at[cell + 1])
        if any(being and being.kind in _CREATURES for being in around):
            self.hurt(1)
        if self.health <= 0:
            self.world.remove(self)
