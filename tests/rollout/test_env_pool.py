"""Environment workers: faults are done for real, and every session shows the episode that its seed decides."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RolloutConfig
from rollout.env_pool import EnvPool, ProcessHost
from rollout.env_worker import EnvSpec
from rollout.errors import EnvironmentFault

ENV = "tests.fixtures.counting_env"
BACKENDS = ["inline", "process"]


def config(backend: str, **overrides: Any) -> RolloutConfig:
    values = {"env_step_timeout_s": 1.0, "env_reset_timeout_s": 20.0, "env_workers": 1, **overrides}
    return RolloutConfig(rollout_interaction_env_path=ENV, env_backend=backend, **values)


def spec(seed: int = 3, **options: Any) -> EnvSpec:
    return EnvSpec(ENV, {"task": "count", "seed": seed}, {"max_length": 30, **options})


async def play(pool: EnvPool, episode: EnvSpec, steps: int = 6) -> list[str]:
    session = await pool.open(episode)
    assert session.reply is not None
    texts = [session.reply.observation["obs_str"]]
    for k in range(steps):
        reply = await session.step("ACTION: " + ("left", "right")[k % 2])
        texts.append(reply.observation["obs_str"])
    await session.close()
    return texts


async def expected(steps: int = 6) -> list[str]:
    pool = EnvPool(config("inline"))
    try:
        return await play(pool, spec(), steps)
    finally:
        pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["raise_at", "hang_at", "die_at"])
async def test_a_fault_that_happens_once_is_repaired_by_replaying_the_episode(
    backend: str, fault: str, tmp_path: Path
) -> None:
    if backend == "inline" and fault != "raise_at":
        pytest.skip("a thread can neither be killed nor die alone; use env_backend: process for such environments")
    pool = EnvPool(config(backend))
    try:
        texts = await play(pool, spec(**{fault: 4, "once": str(tmp_path / "done")}))
        assert texts == await expected()
        assert pool.faults["replayed"] == 1
    finally:
        pool.close()


@pytest.mark.parametrize("fault", ["raise_at", "hang_at", "die_at"])
async def test_a_fault_that_always_happens_ends_in_an_error_that_reproduces_it(fault: str) -> None:
    pool = EnvPool(config("process", env_step_timeout_s=0.3, max_env_retries_per_turn=1))
    try:
        with pytest.raises(EnvironmentFault) as error:
            await play(pool, spec(**{fault: 2}))
        assert "seed 3" in str(error.value) and ENV in str(error.value)
        assert '["ACTION: left", "ACTION: right", "ACTION: left"]' in str(error.value)
    finally:
        pool.close()


async def test_a_replay_that_shows_something_else_is_reported_and_not_played_on(tmp_path: Path) -> None:
    pool = EnvPool(config("process"))
    try:
        with pytest.raises(EnvironmentFault, match="differs from the first one at step 0"):
            await play(pool, spec(die_at=3, once=str(tmp_path / "done"), lie=True))
        assert pool.faults["replay_mismatch"] == 1
    finally:
        pool.close()


async def test_other_episodes_of_a_dead_worker_go_on_where_they_were(tmp_path: Path) -> None:
    pool = EnvPool(config("process"))
    try:
        bystander = await pool.open(spec())
        for k in range(3):
            await bystander.step("ACTION: " + ("left", "right")[k % 2])
        await play(pool, spec(seed=5, die_at=2, once=str(tmp_path / "done")))
        replies = [await bystander.step("ACTION: " + ("left", "right")[k % 2]) for k in (3, 4, 5)]
        texts = [reply.observation["obs_str"] for reply in replies]
        assert texts == (await expected())[4:]
    finally:
        pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_stepping_never_blocks_the_event_loop(backend: str) -> None:
    pool = EnvPool(config(backend))
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - began)

    watcher = asyncio.create_task(watch())
    try:
        await play(pool, spec(slow_s=0.3), steps=2)
        assert longest < 0.25, "the loop stood still while the environment worked"
    finally:
        watcher.cancel()
        pool.close()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("env_path", "No module named"),
        ("task", "sample.metadata needs task"),
    ],
)
async def test_an_environment_that_cannot_be_built_says_why(bad: str, words: str) -> None:
    episode = EnvSpec("envs.nothing", {"task": "x", "seed": 1}) if bad == "env_path" else EnvSpec(ENV, {"task": 3})
    pool = EnvPool(config("process", max_env_retries_per_turn=0))
    try:
        with pytest.raises(EnvironmentFault) as error:
            await pool.open(episode)
        assert words in str(error.value) or "nothing" in str(error.value)
    finally:
        pool.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent_however_that_ends(how: signal.Signals, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio
        from rollout.env_pool import EnvPool
        from tests.rollout.test_env_pool import config, spec

        async def main():
            pool = EnvPool(config("process", env_workers=2, env_step_timeout_s=600.0))
            one, two = await pool.open(spec()), await pool.open(spec(seed=4, hang_at=0))
            print(*(w.host.process.pid for w in pool.workers), flush=True)
            await two.step("ACTION: left")  # hangs: this worker never reads its closed socket

        asyncio.run(main())
        """
    )
    repo = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": "."}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=repo, env=environment
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.send_signal(how)
    parent.wait(timeout=20)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_process_host_is_reaped_when_it_is_killed() -> None:
    host = ProcessHost()
    await host.call("close", 0)
    host.kill()
    assert host.process.poll() is not None
