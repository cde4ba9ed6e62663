"""Crafter's plants; in a separate module because both the player and the creatures need it."""

from __future__ import annotations

from envs.crafter.world.grid import Creature, Grid
from envs.crafter.world.rules import COW, PLANT, SKELETON, STRIDE, ZOMBIE

_EATERS = (COW, ZOMBIE, SKELETON)
_RIPE_AFTER = 300


class Plant(Creature):
    """Ripens slowly; animals and monsters next to it eat it."""

    __slots__ = ("grown",)
    kind = PLANT
    full_health = 1

    def __init__(self, world: Grid, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.grown = 0

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
