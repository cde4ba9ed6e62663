"""What grows in Crafter's world."""

from __future__ import annotations

from envs.crafter_world.grid import Being, Grid
from envs.crafter_world.rules import COW, PLANT, SKELETON, STRIDE, ZOMBIE

_EATERS = (COW, ZOMBIE, SKELETON)
_RIPE_AFTER = 300


class Plant(Being):
    """Ripens slowly; any creature beside it eats it."""

    __slots__ = ("grown", "health")
    kind = PLANT

    def __init__(self, world: Grid, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.health, self.grown = 1, 0

    @property
    def ripe(self) -> bool:
        return self.grown > _RIPE_AFTER

    def update(self) -> None:
        self.grown += 1
        beings_at, cell = self.world.beings_at, self.cell
        around = (beings_at[cell - STRIDE], beings_at[cell + STRIDE], beings_at[cell - 1], beings_at[cell + 1])
        if any(being and being.kind in _EATERS for being in around):
            self.hurt(1)
        if self.health <= 0:
            self.world.remove(self)
