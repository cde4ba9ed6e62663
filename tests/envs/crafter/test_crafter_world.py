"""Crafter's episodes against recorded digests of text, reward, state and images."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "crafter", reason="Crafter needs crafter; pip install 'slime-verlog[envs]' enables this test"
)

from envs import crafter
from envs.crafter.vocabulary import ACTIONS
from envs.loading import build_env_from
from tests.cases import some

ROOT = Path(__file__).parents[3]
DIGESTS = json.loads((ROOT / "tests" / "recordings" / "crafter_digests.json").read_text())
Policy = Callable[[crafter.Crafter, random.Random], str]
BUSY = [1, 3, 3, 3, 3, 12, 0.3] + [1] * 10
"""How often each action is tried: much walking and doing, a nap now and then."""
SLEEPY = [1, 3, 3, 3, 3, 12, 3] + [1] * 10
EDGES = [
    (0, 0),
    (3, 30),
    (30, 2),
    (4, 3),
    (63, 30),
    (30, 63),
    (63, 63),
    (59, 60),
    (0, 31),
    (63, 0),
    (1, 1),
    (4, 30),
]


def draw_from(weights: Sequence[float]) -> Policy:
    return lambda env, rng: rng.choices(list(ACTIONS), weights)[0]


def follow(env: crafter.Crafter, rng: random.Random) -> str:
    return crafter.expert_action(env)


def follow_mostly(env: crafter.Crafter, rng: random.Random) -> str:
    return rng.choice(list(ACTIONS)) if rng.random() < 0.2 else crafter.expert_action(env)


def build(seed: int, vlm: bool) -> crafter.Crafter:
    return build_env_from("envs.crafter", {"task": "default", "seed": seed}, {"vlm": vlm})


def observe(env: crafter.Crafter, observation: Any, info: Any) -> bytes:
    """Return all that a turn shows: text, reward, metrics, endings, the player's state, and
    BALROG's image."""
    player = env.world.player
    inventory = {name: int(amount) for name, amount in player.inventory.items()}
    scores = (
        float(info["reward"]),
        float(info["progression"]),
        info["terminated"],
        info["truncated"],
        info["metrics"],
    )
    images = observation.get("multi_modal_data", {}).get("image", [])
    state = (
        observation["text"],
        scores,
        inventory,
        [int(step) for step in player.facing],
        player.sleeping,
    )
    return repr(state).encode() + b"".join(np.asarray(image).tobytes() for image in images)


def play(
    policy: Policy, seed: int, turns: int, *, supplied: bool = False, vlm: bool = False
) -> list[str]:
    """Play an episode; return a digest after every 50th turn and the last one, each of all turns so
    far.

    With `supplied`, the player is healed every turn and given things to build with every 40 turns.
    Every 50 turns, the digest includes the view for people.
    """
    env, rng, digest, digests = build(seed, vlm), random.Random(seed), hashlib.sha256(), []
    env.reset()
    for turn in range(turns):
        if supplied:
            env.world.player.inventory["health"] = 9
            if turn % 40 == 0:
                env.world.player.inventory.update(
                    food=5, drink=5, wood=9, stone=9, coal=9, iron=9, sapling=9
                )
        observation, done, info = env.step(policy(env, rng))
        digest.update(observe(env, observation, info))
        if done or turn == turns - 1 or turn % 50 == 49:
            digest.update(np.asarray(env.render()).tobytes())
            digests.append(digest.hexdigest()[:16])
        if done:
            break
    return digests


def put(env: crafter.Crafter, x: int, y: int) -> bool:
    """Move the player to a cell, unless something else is on it."""
    world: Any = env.world._world
    if world[x, y][1]:
        return False
    world.move(env.world.player, (x, y))
    return True


def walk_the_edges(seed: int) -> list[str]:
    """Turn, act and craft at the borders of the world; return a digest per cell."""
    env, digests = build(seed, vlm=True), []
    env.reset()
    for x, y in EDGES:
        digest = hashlib.sha256(str(put(env, x, y)).encode())
        for action in (
            "Move West",
            "Move East",
            "Move North",
            "Move South",
            "Do",
            "Place Table",
            "Make Wood Pickaxe",
        ):
            env.world.player.inventory.update(health=9, wood=9)
            observation, _, info = env.step(action)
            digest.update(observe(env, observation, info) + np.asarray(env.render()).tobytes())
        digests.append(digest.hexdigest()[:16])
    return digests


GAMES: dict[str, Callable[[], list[str]]] = {
    "busy, with images, through a night": lambda: play(
        draw_from(BUSY), 3, 290, supplied=True, vlm=True
    ),
    "sleepy, with images, through a night": lambda: play(
        draw_from(SLEEPY), 4, 290, supplied=True, vlm=True
    ),
    "scripted player": lambda: play(follow, 13, 1200),
    "scripted player with mistakes": lambda: play(follow_mostly, 0, 400),
    "edges of the world": lambda: walk_the_edges(4),
}


@pytest.mark.parametrize("game", some(GAMES, [*GAMES][3:]))
def test_episodes_equal_the_recorded_ones_turn_by_turn(game: str) -> None:
    assert GAMES[game]() == DIGESTS[game]


def test_processes_with_other_hash_seeds_and_addresses_play_the_same_episode() -> None:
    code = "from tests.envs.crafter.test_crafter_world import *; print(play(draw_from(BUSY), 5, 300, supplied=True))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.stdout.strip() == str(play(draw_from(BUSY), 5, 300, supplied=True)), result.stderr
