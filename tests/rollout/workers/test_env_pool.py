"""Environment workers under real faults: every session shows the episode that its seed
determines."""

import asyncio
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.spec import EnvSpec
from rollout.workers.guard import descendants
from rollout.workers.hosts import ProcessHost
from rollout.workers.pool import BACKENDS, EnvPool
from tests.cases import some
from tests.fixtures.counting_env import CountingGame
from tests.fixtures.faulty_worker import MALFORMED
from tests.fixtures.waiting import until
from tests.fixtures.warm_python import CONTEXT

ENV = "tests.fixtures.counting_env"
BOTH = ["inline", "process"]
HANG_S = 3.0
"""Time limit of a step that hangs; far more than a normal step takes on a busy machine."""


def config(backend: str, **overrides: Any) -> RolloutSettings:
    values = {"env_step_timeout_s": 60.0, "env_workers": 1, **overrides}
    return RolloutSettings(rollout_interaction_env_path=ENV, env_backend=backend, **values)


def spec(seed: int = 3, **options: Any) -> EnvSpec:
    return EnvSpec(ENV, {"task": "count", "seed": seed}, {"max_length": 30, **options})


@contextmanager
def pool_of(backend: str = "process", **keys: Any) -> Iterator[EnvPool]:
    """A pool with one worker, closed at the end."""
    pool = EnvPool(config(backend, **keys))
    try:
        yield pool
    finally:
        pool.close()


async def play(
    pool: EnvPool,
    episode: EnvSpec,
    steps: int = 6,
    before: Mapping[int, Callable[[], Any]] = MappingProxyType({}),
) -> list[str]:
    """What the episode shows; `before[k]` is called before command k, the reset being 0."""
    before.get(0, lambda: None)()
    session = await pool.open(episode)
    assert session.reply is not None
    texts = [session.reply.observation["obs_str"]]
    for k in range(steps):
        before.get(k + 1, lambda: None)()
        reply = await session.step("ACTION: " + ("left", "right")[k % 2])
        texts.append(reply.observation["obs_str"])
    await session.close()
    return texts


async def expected(steps: int = 6) -> list[str]:
    with pool_of("inline") as pool:
        return await play(pool, spec(), steps)


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("inline", "raise_at"),
        ("process", "raise_at"),
        ("process", "hang_at"),
        ("process", "die_at"),
    ],
)
async def test_a_fault_that_happens_once_is_repaired_by_replaying_the_episode(
    backend: str, fault: str, tmp_path: Path
) -> None:
    with pool_of(backend, env_step_timeout_s=HANG_S if fault == "hang_at" else 60.0) as pool:
        texts = await play(pool, spec(**{fault: 4, "once": str(tmp_path / "done")}))
        assert texts == await expected()
        assert pool.faults["replayed"] == 1


@pytest.mark.parametrize("fault", some(["raise_at", "hang_at", "die_at"], ["die_at"]))
async def test_a_fault_that_always_happens_ends_in_an_error_that_reproduces_it(fault: str) -> None:
    hangs = fault == "hang_at"
    retries = 0 if hangs else 1
    with pool_of(
        env_step_timeout_s=HANG_S if hangs else 60.0, max_env_retries_per_turn=retries
    ) as pool:
        with pytest.raises(EnvironmentFault) as error:
            await play(pool, spec(**{fault: 2}))
        assert (
            pool.faults[
                {"raise_at": "raised", "hang_at": "timeout", "die_at": "worker_died"}[fault]
            ]
            == 1 + retries
        )
        assert "seed 3" in str(error.value) and ENV in str(error.value)
        assert '["ACTION: left", "ACTION: right", "ACTION: left"]' in str(error.value)


@pytest.mark.parametrize(
    ("error", "counted"),
    [("RuntimeError", "raised"), ("ToolError", "tool_raised"), ("JudgeError", "judge_raised")],
)
async def test_a_fault_is_counted_by_the_boundary_that_it_crossed(error: str, counted: str) -> None:
    with pool_of("inline", max_env_retries_per_turn=0) as pool:
        with pytest.raises(EnvironmentFault, match="the game broke"):
            await play(pool, spec(raise_at=1, raise_as=error))
        assert pool.faults == {counted: 1}


async def test_a_replay_that_shows_something_else_is_reported_and_not_played_on(
    tmp_path: Path,
) -> None:
    with pool_of() as pool:
        with pytest.raises(EnvironmentFault, match="differs from the original at step 0"):
            await play(pool, spec(die_at=3, once=str(tmp_path / "done"), lie=True))
        assert pool.faults["replay_mismatch"] == 1


async def test_other_episodes_of_a_dead_worker_go_on_where_they_were(tmp_path: Path) -> None:
    with pool_of() as pool:
        bystander = await pool.open(spec())
        for k in range(3):
            await bystander.step("ACTION: " + ("left", "right")[k % 2])
        await play(pool, spec(seed=5, die_at=2, once=str(tmp_path / "done")))
        replies = [await bystander.step("ACTION: " + ("left", "right")[k % 2]) for k in (3, 4, 5)]
        texts = [reply.observation["obs_str"] for reply in replies]
        assert texts == (await expected())[4:]


def test_an_environment_may_change_its_options_and_metadata(tmp_path: Path) -> None:
    """Episodes share them, and in one process the objects too."""
    file = tmp_path / "stock.py"
    file.write_text(
        "from tests.fixtures.counting_env import build_env as build\n"
        "def build_env(sample, args):\n"
        "    taken = args.env.pop('left').pop() + sample.metadata['more'].pop()\n"
        "    env = build(sample, args)\n"
        "    env.taken = taken\n"
        "    return env\n"
    )
    spec = EnvSpec(str(file), {"task": "count", "seed": 0, "more": [1, 2]}, {"left": [3, 4]})
    assert [spec.build().taken for _ in range(2)] == [6, 6]


async def test_a_signal_to_the_workers_group_leaves_its_guard_alone(tmp_path: Path) -> None:
    file = tmp_path / "signals.py"
    file.write_text(
        "import os, signal, subprocess\n"
        "from tests.fixtures.counting_env import build_env as build\n"
        "def build_env(sample, args):\n"
        "    subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    return build(sample, args)\n"
    )
    others = descendants(os.getpid())
    with pool_of() as pool:
        session = await pool.open(EnvSpec(str(file), {"task": "count", "seed": 0}, {}))
        started = descendants(os.getpid()) - others
        assert await session.step("ACTION: left") and not pool.faults
    assert len(started) >= 3
    until(lambda: not any(map(is_alive, started)))


async def test_a_player_whose_worker_died_is_asked_again_on_another_one() -> None:
    with pool_of() as pool:
        session = await pool.open(spec())
        await session.step("ACTION: left")
        host = pool.workers[0].host
        assert host is not None
        host.kill()
        response = await session.suggest("random", 1)
        assert response in CountingGame.actions
        assert pool.faults["replayed"] == 1
        assert (await session.step(response)).observation["obs_str"]


@pytest.mark.parametrize("backend", BOTH)
async def test_stepping_never_blocks_the_event_loop(backend: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with pool_of(backend) as pool:
        playing = asyncio.create_task(play(pool, spec(gate=str(gate)), steps=2))
        await asyncio.sleep(0.2)
        gate.touch()  # the environment waits for this line: it could not run if the step blocked the loop
        assert await playing == await expected(2)
        assert not pool.faults


@pytest.fixture
def next_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that makes worker processes send the malformed reply that it names, once."""
    monkeypatch.setenv("MALFORMED_REPLY", str(tmp_path / "kind"))
    monkeypatch.setitem(
        BACKENDS, "process", lambda: ProcessHost("tests.fixtures.faulty_worker:main")
    )
    return tmp_path / "kind"


async def test_a_worker_that_sends_a_malformed_reply_is_replaced_and_its_episode_continues(
    next_reply: Path,
) -> None:
    episode = await expected()
    with pool_of() as pool:
        for kind in MALFORMED:
            pool.faults.clear()
            texts = await play(
                pool, spec(), before={3: lambda kind=kind: next_reply.write_text(kind)}
            )
            assert not next_reply.exists(), f"the worker sent no {kind}"
            assert texts == episode, f"after {kind}"
            counted = "worker_died" if kind == "half a reply" else "bad_reply"
            assert pool.faults == {counted: 1, "replayed": 1}, kind


async def test_an_environment_that_exits_or_returns_what_cannot_be_pickled_is_reported_as_text() -> (
    None
):
    with pool_of(max_env_retries_per_turn=0) as pool:
        for misdeed, words in (("exit_at", "SystemExit"), ("unsendable_at", "cannot be pickled")):
            with pytest.raises(EnvironmentFault, match=words):
                await play(pool, spec(**{misdeed: 1}))
        assert pool.faults["raised"] == 2 and not pool.faults["worker_died"]


@pytest.mark.parametrize(
    "error", ["KeyboardInterrupt", "CancelledError", "Unspeakable", "StopIteration"]
)
@pytest.mark.parametrize("backend", BOTH)
async def test_whatever_an_environment_raises_costs_one_episode(backend: str, error: str) -> None:
    with pool_of(backend, max_env_retries_per_turn=0) as pool:
        with pytest.raises(EnvironmentFault, match=error):
            await play(pool, spec(raise_at=1, raise_as=error))
        assert pool.faults == {"raised": 1}
        assert await play(pool, spec()) == await expected(), "the worker goes on"


@pytest.mark.parametrize("deterministic", [True, False])
async def test_an_environment_whose_episode_was_given_up_is_closed(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, closed = [], []
    monkeypatch.setattr(
        CountingGame,
        "start",
        lambda self, start=CountingGame.start: built.append(self) or start(self),
    )
    monkeypatch.setattr(CountingGame, "close", lambda self: closed.append(self))
    monkeypatch.setattr(CountingGame, "deterministic", deterministic)
    with pool_of("inline") as pool:
        session = await pool.open(spec(raise_at=1))
        await session.step("left")
        with pytest.raises(EnvironmentFault, match="the game broke"):
            await session.step("left")
        await session.close()
        assert closed == built and len(built) == (3 if deterministic else 1)


async def test_a_closed_pool_starts_no_worker_for_episodes_in_preparation() -> None:
    pool = EnvPool(config("process"))
    await pool.open(spec())
    waiting = [asyncio.create_task(pool.open(spec(seed=seed))) for seed in range(4)]
    await asyncio.sleep(0)
    host = pool.workers[0].host
    pool.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, EnvironmentFault) for outcome in outcomes)
    assert pool.workers[0].host is host


def play_and_hang(folder: Path, how: object) -> None:
    """A parent of two workers, one of which hangs; the environment of the other one has started
    processes."""

    async def main() -> None:
        pool = EnvPool(config("process", env_workers=2, env_step_timeout_s=600.0))
        children = folder / "children"
        _, two = (
            await pool.open(spec(children=str(children))),
            await pool.open(spec(seed=4, hang_at=0)),
        )
        workers = " ".join(str(worker.host.process.pid) for worker in pool.workers)
        (folder / "written").write_text(f"{workers} {children.read_text()}")
        (folder / "written").rename(folder / "workers")
        # This worker never reads its closed socket.
        hanging = asyncio.create_task(two.step("ACTION: left"))
        if how == "exception":
            await asyncio.sleep(0.5)
            raise RuntimeError("the trainer broke")
        await hanging

    asyncio.run(main())


@pytest.mark.parametrize(
    "how", some([signal.SIGTERM, signal.SIGKILL, "exception"], [signal.SIGKILL, "exception"])
)
def test_no_worker_outlives_its_parent_however_that_ends(
    how: signal.Signals | str, tmp_path: Path
) -> None:
    parent = CONTEXT.Process(target=play_and_hang, args=(tmp_path, how))
    parent.start()
    file = tmp_path / "workers"
    while not file.exists():
        assert parent.is_alive() or file.exists()
        time.sleep(0.02)
    workers = [int(pid) for pid in file.read_text().split()]
    assert len(workers) == 5, "two workers and three children"
    if isinstance(how, signal.Signals):
        assert parent.pid is not None
        os.kill(parent.pid, how)
    parent.join(120)
    assert parent.exitcode is not None
    until(lambda: not any(map(is_alive, workers)))


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def test_a_worker_that_cannot_be_started_once_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host, made = BACKENDS["process"], itertools.count(1)

    def start() -> Any:
        if next(made) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return make_host()

    monkeypatch.setitem(BACKENDS, "process", start)
    with pool_of() as pool:
        assert await play(pool, spec(die_at=4, once=str(tmp_path / "done"))) == await expected()
