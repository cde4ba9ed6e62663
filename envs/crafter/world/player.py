"""The player: effects of actions, of hunger, thirst, fatigue and damage, and the achievements; and plants to eat."""

from envs.crafter.world import rules
from envs.crafter.world.grid import Being, Creature, Direction, Grid

_LAVA, _WATER = rules.MATERIAL_ID["lava"], rules.MATERIAL_ID["water"]
_SWORD_DAMAGE = (("iron_sword", 5), ("stone_sword", 3), ("wood_sword", 2))
_COW_FOOD, _PLANT_FOOD = 6, 4
_RIPE_AFTER = 300


class Plant(Creature):
    """Ripens slowly; animals and monsters next to it eat it."""

    __slots__ = ("grown",)
    kind = rules.PLANT
    full_health = 1

    def __init__(self, world: Grid, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.grown = 0

    @property
    def ripe(self) -> bool:
        return self.grown > _RIPE_AFTER

    def update(self) -> None:
        self.grown += 1
        around = [self.world.beings_at[self.cell + step] for step in (-rules.STRIDE, rules.STRIDE, -1, 1)]
        if any(being and being.kind in (rules.COW, rules.ZOMBIE, rules.SKELETON) for being in around):
            self.hurt(1)
        if self.health <= 0:
            self.world.remove(self)


class Player(Being):
    """`inventory` includes the vitals; `achievements` counts how often each was reached."""

    kind = rules.PLAYER
    walkable = rules.WALKABLE | {_LAVA}

    def __init__(self, world: Grid, x: int, y: int) -> None:
        super().__init__(world, x, y)
        self.inventory = dict(rules.INITIAL_ITEMS)
        self.achievements = dict.fromkeys(rules.ACHIEVEMENTS, 0)
        self.facing: Direction = (0, 1)
        self.action = "Noop"
        self.sleeping = False
        self._last_health = self.health
        self._since = {"food": 0.0, "drink": 0.0}
        self._fatigue = self._recover = 0.0

    @property
    def health(self) -> int:
        return self.inventory["health"]

    @health.setter
    def health(self, value: int) -> None:
        self.inventory["health"] = max(0, value)

    def hurt(self, damage: int) -> None:
        self.health -= damage

    def update(self) -> None:
        if self.sleeping and self.inventory["energy"] >= rules.ITEM_LIMITS["energy"]:
            self.sleeping = False
            self.achievements["wake_up"] += 1
        self._act("Sleep" if self.sleeping else self.action)
        self._tire()
        self._heal_or_suffer()
        for name, amount in self.inventory.items():
            if not 0 <= amount <= rules.ITEM_LIMITS[name]:
                self.inventory[name] = max(0, min(amount, rules.ITEM_LIMITS[name]))
        if self.health < self._last_health:
            self.sleeping = False
        self._last_health = self.health

    def _act(self, action: str) -> None:
        target = self.cell + self.facing[0] * rules.STRIDE + self.facing[1]
        if action in rules.MOVES:
            self.facing = rules.MOVES[action]
            self.move(self.facing)
            if self.world.materials[self.cell] == _LAVA:
                self.health = 0
        elif action == "Do":
            being = self.world.beings_at[target]
            if being:
                self._meet(being)
            else:
                self._collect(target)
        elif action == "Sleep":
            if self.inventory["energy"] < rules.ITEM_LIMITS["energy"]:
                self.sleeping = True
        elif action in rules.PLACE:
            self._place(rules.PLACE[action], target)
        elif action in rules.MAKE:
            self._make(rules.MAKE[action])

    def _meet(self, being: Being) -> None:
        if isinstance(being, Plant) and being.ripe:
            being.grown = 0
            self.inventory["food"] += _PLANT_FOOD
            self.achievements["eat_plant"] += 1
        if not isinstance(being, Creature) or being.kind not in (rules.ZOMBIE, rules.SKELETON, rules.COW):
            return
        being.hurt(next((damage for sword, damage in _SWORD_DAMAGE if self.inventory[sword]), 1))
        if being.health > 0:
            return
        if being.kind == rules.COW:
            self.inventory["food"] += _COW_FOOD
            self._since["food"] = 0
            self.achievements["eat_cow"] += 1
        else:
            self.achievements["defeat_zombie" if being.kind == rules.ZOMBIE else "defeat_skeleton"] += 1

    def _collect(self, target: int) -> None:
        material = self.world.materials[target]
        if material == _WATER:
            self._since["drink"] = 0
        rule = rules.COLLECT.get(material)
        if rule is None or not self._has(rule.needs):
            return
        self.world.set_material(target, rule.leaves)
        if self.world.uniform() <= rule.probability:
            for name, amount in rule.gives:
                self.inventory[name] += amount
                self.achievements[f"collect_{name}"] += 1

    def _place(self, rule: rules.Placing, target: int) -> None:
        if not self.world.is_free(target, rule.where) or not self._has(rule.uses):
            return
        self._spend(rule.uses)
        if rule.material is None:
            self.world.add(Plant(self.world, *divmod(target, rules.STRIDE)))
        else:
            self.world.set_material(target, rule.material)
        self.achievements[f"place_{rule.name}"] += 1

    def _make(self, rule: rules.Making) -> None:
        if not rule.nearby <= self.world.materials_around(self.x, self.y) or not self._has(rule.uses):
            return
        self._spend(rule.uses)
        self.inventory[rule.name] += rule.gives
        self.achievements[f"make_{rule.name}"] += 1

    def _has(self, amounts: rules.Amounts) -> bool:
        return all(self.inventory[name] >= amount for name, amount in amounts)

    def _spend(self, amounts: rules.Amounts) -> None:
        for name, amount in amounts:
            self.inventory[name] -= amount

    def _tire(self) -> None:
        pace = 0.5 if self.sleeping else 1
        for need, most in (("food", 25), ("drink", 20)):
            self._since[need] += pace
            if self._since[need] > most:
                self._since[need] = 0
                self.inventory[need] -= 1
        self._fatigue = min(self._fatigue - 1, 0) if self.sleeping else self._fatigue + 1
        if self._fatigue < -10:
            self._fatigue = 0
            self.inventory["energy"] += 1
        if self._fatigue > 30:
            self._fatigue = 0
            self.inventory["energy"] -= 1

    def _heal_or_suffer(self) -> None:
        have = self.inventory
        if have["food"] > 0 and have["drink"] > 0 and (have["energy"] > 0 or self.sleeping):
            self._recover += 2 if self.sleeping else 1
        else:
            self._recover -= 0.5 if self.sleeping else 1
        if self._recover > 25:
            self._recover = 0
            self.health += 1
        if self._recover < -15:
            self._recover = 0
            self.health -= 1
