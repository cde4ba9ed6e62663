"""The `crafter` package as the reference: its own step, with chunks that keep their objects in order of arrival."""

from typing import Any

import numpy as np
import pytest

crafter = pytest.importorskip("crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this")

from crafter import engine  # noqa: E402

from envs.crafter.world.rules import ACTION_NAMES, KIND_NAMES, SIZE, STRIDE  # noqa: E402
from envs.crafter.world.world import NOISE_SHAPE, World  # noqa: E402


class _OrderedSet(dict):
    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class _OrderedWorld(engine.World):
    """A plain set is iterated in address order, which differs from run to run."""

    def reset(self, seed: int | None = None) -> None:
        super().reset(seed)
        self._chunks.default_factory = _OrderedSet


class Reference(crafter.Env):
    """Steps as BALROG does, with two pictures a step; by day, when they draw no random numbers, they are left out.

    Without `pictures` those of the night are left out too, but not the random numbers that they draw.
    """

    def __init__(self, seed: int, pictures: bool = False) -> None:
        super().__init__(size=(256, 256), seed=seed)
        self._pictures = pictures
        self._world.__class__ = _OrderedWorld
        self.reset()
        self.picture = np.zeros(0)
        self.act("Noop")

    def act(self, action: str) -> float:
        """Take one step, draw BALROG's own picture too, and return the reward."""
        reward = self.step(ACTION_NAMES.index(action))[1]
        self.picture = self.render()
        return reward

    def render(self, size: Any = None) -> np.ndarray:
        if self._world.daylight >= 0.5:
            return np.zeros(0)
        if self._pictures:
            return super().render(size)
        self._world.random.uniform(size=NOISE_SHAPE)
        return np.zeros(0)

    def draw(self) -> np.ndarray:
        """Return the picture that BALROG shows now."""
        return self.picture if self._world.daylight < 0.5 else super().render()

    def describe_view(self) -> str:
        """Put the surroundings into words, cell by cell from the 9 x 7 crop, with NumPy's own slicing at borders."""
        (x, y), (dx, dy) = self._player.pos, self._player.facing
        view = self._sem_view()[x - 4 : x + 5, y - 3 : y + 4]
        places: dict[str, tuple[int, str]] = {}
        for i, j in np.ndindex(view.shape):
            east, south = i - 4, j - 3
            name, steps = KIND_NAMES[view[i, j]], abs(east) + abs(south)
            sides = ["north"] * (south < 0) + ["south"] * (south > 0) + ["west"] * (east < 0) + ["east"] * (east > 0)
            if name != "player" and steps < places.get(name, (99, ""))[0]:
                places[name] = (steps, f"- {name} {steps} step{'s' * (steps > 1)} to your {'-'.join(sides)}")
        in_view = 4 + dx < view.shape[0] and 3 + dy < view.shape[1]
        front = KIND_NAMES[view[4 + dx, 3 + dy]] if in_view else "nothing"
        seen = "\n".join(["You see:", *(line for _, line in places.values())]) if places else ""
        return f"{seen or 'You see nothing away from you.'}\n\nYou face {front} at your front."


def assert_same(world: World, reference: Reference) -> None:
    """Compare the whole state, the random generator's included."""
    theirs, player = reference._world, reference._player
    land = np.frombuffer(bytes(world.materials), np.uint8).reshape(STRIDE, STRIDE)[:SIZE, :SIZE]
    assert np.array_equal(land, theirs._mat_map)
    ours = [(type(being).__name__, being.x, being.y, being.health) for being in world.beings]
    assert ours == [(type(obj).__name__, *obj.pos.tolist(), obj.health) for obj in theirs.objects]
    assert world.player.inventory == player.inventory
    assert world.player.achievements == player.achievements
    assert (world.player.sleeping, tuple(world.player.facing)) == (player.sleeping, tuple(player.facing))
    assert (world.steps, world.daylight) == (reference._step, theirs.daylight)
    assert _state(world.random) == _state(theirs.random)


def _state(random: np.random.RandomState) -> tuple:
    _, key, position, *_ = random.get_state()
    return key.tobytes(), position
