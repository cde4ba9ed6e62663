"""Processes that an environment starts never outlive its worker: children, new sessions and
daemons."""

import os
import signal
from pathlib import Path

from rollout.workers.guard import descendants
from rollout.workers.hosts import ProcessHost
from rollout.workers.pool import EnvPool
from tests.fixtures.waiting import until
from tests.rollout.workers.test_env_pool import config, is_alive, spec


async def _with_children(tmp_path: Path) -> tuple[EnvPool, ProcessHost, list[int]]:
    pool = EnvPool(config("process"))
    await pool.open(spec(children=str(tmp_path / "children")))
    host = pool.workers[0].host
    assert isinstance(host, ProcessHost)
    children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert len(children) == 3 and all(map(is_alive, children))
    return pool, host, children


def await_end(*pids: int) -> None:
    until(lambda: not any(map(is_alive, pids)))


async def test_what_an_environment_starts_ends_when_its_worker_is_given_up(tmp_path: Path) -> None:
    pool, host, children = await _with_children(tmp_path)
    pool.close()
    await_end(*children, host.process.pid)


async def test_what_an_environment_starts_ends_when_its_worker_dies(tmp_path: Path) -> None:
    pool, host, children = await _with_children(tmp_path)
    try:
        (worker,) = (
            pid for pid in descendants(host.process.pid) if set(children) & descendants(pid)
        )
        os.kill(worker, signal.SIGKILL)
        await_end(worker, *children, host.process.pid)
    finally:
        pool.close()


async def test_a_worker_whose_guard_is_killed_ends_too(tmp_path: Path) -> None:
    pool, host, children = await _with_children(tmp_path)
    workers = [pid for pid in descendants(host.process.pid) if set(children) & descendants(pid)]
    os.kill(host.process.pid, signal.SIGKILL)
    await_end(*workers)
    pool.close()
    await_end(children[0])  # what stayed in the worker's process group ends with it
    for pid in children[1:]:
        os.kill(pid, signal.SIGKILL)
