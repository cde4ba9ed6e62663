"""`env_backend: ray` on a real local cluster of two nodes, one of which is killed."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.settings import RolloutSettings
from rollout.spec import EnvSpec
from rollout.workers.pool import EnvPool
from tests.fixtures.playing import content, play_batches
from tests.fixtures.ray_cluster import two_nodes

ENV = "tests.fixtures.counting_env"
LONG = {"length_of": "tests.fixtures.counting_env.always_long"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as nodes:
        yield nodes


@pytest.mark.slow
async def test_batches_are_the_same_bytes_on_ray_as_on_threads(
    cluster: Any, tmp_path: Path
) -> None:
    runs = [
        await play_batches(
            tmp_path,
            2,
            lambda number: number % 3 * 0.005,
            turn_quota="per_env",
            env_backend=backend,
            env_workers=2,
        )
        for backend in ("inline", "ray")
    ]
    inline, ray_run = (content(*outputs) for outputs, _ in runs)
    assert inline == ray_run


@pytest.mark.slow
async def test_episodes_go_on_after_a_node_is_killed(cluster: Any) -> None:
    nodes, second = cluster
    config = RolloutSettings(
        rollout_interaction_env_path=ENV, env_backend="ray", env_workers=4, env_step_timeout_s=60.0
    )
    pool = EnvPool(config)
    sessions = [await pool.open(EnvSpec(ENV, {"task": "count", "seed": s}, LONG)) for s in range(4)]
    nodes.remove_node(second, allow_graceful=False)
    count = 0
    # Ray ends a dead node's workers only after a while: play until it did, on every session.
    deadline = time.monotonic() + 180
    while pool.faults["worker_died"] < 1 and count < 800 and time.monotonic() < deadline:
        count += 1
        for seed, session in enumerate(sessions):
            reply = await session.step("ACTION: left")
            shown = reply.observation["text"]["long_term_context"]
            assert shown.startswith(f"seed {seed} count {count} path {'l' * min(8, count)}")
        await asyncio.sleep(0.2)
    assert pool.faults["worker_died"] > 0 and pool.faults["replayed"] > 0
    pool.close()
