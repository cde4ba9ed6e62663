"""Crafter's world step for step against the `crafter` package: land, dynamics, random draws, pictures and words."""

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this test")

import opensimplex
from crafter import objects
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from envs.crafter.expert import advise
from envs.crafter.image import _fade, draw
from envs.crafter.vocabulary import describe
from envs.crafter.world.player import Plant
from envs.crafter.world.rules import ACHIEVEMENTS, ACTION_NAMES, MOVES, SIZE, STRIDE
from envs.crafter.world.terrain import Noise
from envs.crafter.world.world import Arrow, Cow, Skeleton, World, Zombie
from tests.envs.crafter.crafter_reference import Reference, assert_same

BUSY = [1, 3, 3, 3, 3, 12, 0.3] + [1] * 10
"""How often each action is tried: much walking and doing, a nap now and then."""


def begin(seed: int, pictures: bool = False) -> World:
    world = World(seed, pictures)
    world.step("Noop")
    return world


def supply(*players: object) -> None:
    """Keep both players alive, and give them what there is to build and craft with."""
    for player in players:
        player.inventory.update(health=9, food=5, drink=5, wood=9, stone=9, coal=9, iron=9, sapling=9)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31 - 2),
    st.lists(st.tuples(*[st.floats(-70, 70, allow_subnormal=False)] * 2, st.integers(-9, 9)), min_size=1, max_size=40),
)
def test_noise_equals_opensimplex_bit_for_bit(seed: int, points: list[tuple[float, float, int]]) -> None:
    expected = [opensimplex.OpenSimplex(seed).noise3(*point) for point in points]
    x, y, z = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    assert Noise(x, y, z).sample(seed).tolist() == expected


def test_noise_equals_opensimplex_on_the_grid_that_worlds_use() -> None:
    grid = np.arange(SIZE, dtype=np.float64)
    x, y, z = np.repeat(grid, SIZE)[::3] / 15, np.tile(grid, SIZE)[::3] / 5, np.full(SIZE * SIZE, 3.0)[::3]
    original = opensimplex.OpenSimplex(7)
    assert Noise(x, y, z).sample(7).tolist() == [original.noise3(*point) for point in zip(x, y, z, strict=True)]


def test_pictures_and_random_draws_equal_crafters_by_day_at_night_and_asleep() -> None:
    world, reference = begin(3, pictures=True), Reference(3, pictures=True)
    rng = random.Random(3)
    seen: Counter[tuple[bool, bool]] = Counter()
    for step in range(290):
        if step % 20 == 0:
            supply(world.player, reference._player)
        if step in (100, 200):
            world.player.inventory["energy"] = reference._player.inventory["energy"] = 6
        action = "Sleep" if step in (100, 200) else rng.choices(ACTION_NAMES, BUSY)[0]
        assert world.step(action) == reference.act(action)
        assert_same(world, reference)
        seen[world.daylight < 0.5, world.player.sleeping] += 1
        assert np.array_equal(np.asarray(draw(world)), reference.draw()), step
    assert len(seen) == 4 and min(seen.values()) >= 5


def test_every_being_is_drawn_as_crafter_draws_it() -> None:
    world, reference = begin(3), Reference(3)
    theirs, player = reference._world, reference._player
    cells = [(x, y) for x in range(29, 36) for y in range(29, 36) if (x, y) != (32, 32) and not theirs[x, y][1]]
    ripe = objects.Plant(theirs, cells[0])
    ripe.grown = 301
    beings = [ripe, objects.Plant(theirs, cells[1]), objects.Zombie(theirs, cells[2], player)]
    beings += [objects.Skeleton(theirs, cells[3], player), objects.Cow(theirs, cells[4])]
    beings += [objects.Arrow(theirs, cell, facing) for cell, facing in zip(cells[5:], MOVES.values(), strict=False)]
    for being in beings:
        theirs.add(being)
    plants = [Plant(world, *cells[0]), Plant(world, *cells[1])]
    plants[0].grown = 301
    ours = [*plants, Zombie(world, *cells[2], world.player), Skeleton(world, *cells[3], world.player)]
    ours += [Cow(world, *cells[4]), *(Arrow(world, *arrow.pos, arrow.facing) for arrow in beings[5:])]
    for being in ours:
        world.add(being)
    for facing in MOVES.values():
        world.player.facing = player.facing = facing
        assert np.array_equal(np.asarray(draw(world)), reference.draw())
    assert len(ours) == len(beings) == 9


def test_colors_fade_exactly_as_in_pillow() -> None:
    colors = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    colors[:256, :256] = np.stack(np.broadcast_arrays(*np.ogrid[:256, :256], 255), axis=-1)
    expected = ImageEnhance.Color(Image.fromarray(colors)).enhance(0.4)
    assert np.array_equal(np.stack(_fade(*np.moveaxis(colors.astype(np.int32), -1, 0)), axis=-1) // 5, expected)


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(11, 21))])
def test_long_lives_full_of_building_stay_equal_to_crafter(seed: int) -> None:
    world, reference = begin(seed), Reference(seed)
    rng = random.Random(seed)
    for step in range(900):
        if step % 40 == 0:
            supply(world.player, reference._player)
        action = rng.choices(ACTION_NAMES, BUSY)[0]
        assert world.step(action) == reference.act(action), step
        text = describe(world)[0]
        assert text.removeprefix("You died.\n\n\n\n").split("full.\n\n\n\n")[-1] == reference.describe_view()
        if step % 25 == 0:
            assert_same(world, reference)
        if world.player.health <= 0:
            break
    assert_same(world, reference)


@pytest.mark.parametrize("seed", [13, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 5, 8, 10, 12))])
def test_a_whole_game_of_the_scripted_player_stays_equal_to_crafter(seed: int) -> None:
    world, reference = begin(seed), Reference(seed)
    for step in range(1500):
        action = advise(world)
        assert world.step(action) == reference.act(action), step
        if step % 50 == 0:
            assert_same(world, reference)
        if len(world.unlocked) == len(ACHIEVEMENTS) or world.player.health <= 0:
            break
    assert_same(world, reference)
    assert len(world.unlocked) > 20


def test_the_scripted_player_goes_on_from_wherever_others_left_the_game() -> None:
    reached = []
    for seed in range(20, 24):
        world, rng = begin(seed), random.Random(seed)
        while world.steps < 250 and world.player.health > 0:
            action = advise(world)
            assert action in ACTION_NAMES
            world.step(action if rng.random() < 0.8 else rng.choice(ACTION_NAMES))
        reached.append(len(world.unlocked))
    assert sum(reached) / len(reached) > 9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 215))
def test_worlds_are_laid_out_as_crafter_lays_them_out(seed: int) -> None:
    assert_same(begin(seed), Reference(seed))


def test_the_view_at_the_worlds_borders_is_cut_as_balrog_cuts_it() -> None:
    world, reference = begin(4), Reference(4)
    edge = SIZE - 1
    for x, y in [(0, 0), (3, 30), (30, 2), (4, 3), (edge, 30), (30, edge), (edge, edge), (edge - 4, edge - 3), (0, 31)]:
        theirs = reference._world
        if theirs[x, y][1]:
            continue
        world.move(world.player, (x - world.player.x, y - world.player.y), x * STRIDE + y)
        theirs.move(reference._player, (x, y))
        for facing in MOVES.values():
            world.player.facing = reference._player.facing = facing
            assert np.array_equal(np.asarray(draw(world)), reference.draw())
            assert describe(world)[0] == reference.describe_view()
        assert world.materials_around(x, y) - {0} == {theirs._mat_ids[name] for name in theirs.nearby((x, y), 1)[0]}
        assert world.step("Do") == reference.act("Do")
        assert_same(world, reference)


def _digest(seed: int) -> str:
    world = begin(seed)
    rng = random.Random(seed)
    digest = hashlib.sha256()
    for _ in range(400):
        world.player.inventory["health"] = 9
        reward = world.step(rng.choices(ACTION_NAMES, BUSY)[0])
        digest.update(repr((reward, describe(world))).encode())
    return digest.hexdigest()


def test_processes_with_other_hash_seeds_play_the_same_episode() -> None:
    code = "from tests.envs.crafter.test_crafter_world import _digest; print(_digest(5))"
    root = Path(__file__).parents[3]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        result = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
        assert result.stdout.strip() == _digest(5), result.stderr
