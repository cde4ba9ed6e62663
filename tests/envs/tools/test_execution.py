"""One call of a tool: its time limit, what it raises, and what becomes of calls that never end."""

import itertools
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from envs.calls import Call
from envs.errors import EnvironmentFault
from envs.tools import Tool, ToolEpisode, ToolSettings, make_tool
from envs.tools import execution as execution_module
from envs.tools.execution import ToolPlace, ToolTimeout, run_bounded
from envs.tools.session import ToolSession
from tests.envs.tools import toolbox
from tests.fixtures.waiting import until


@pytest.fixture
def hanging() -> Any:
    toolbox.release.clear()
    execution_module._threads_left.clear()
    yield
    toolbox.release.set()
    execution_module._threads_left.clear()


def test_an_environment_fault_from_a_tool_is_passed_on() -> None:
    with pytest.raises(EnvironmentFault, match="disk is full"):
        run_bounded("misbehave", toolbox.misbehave, {"how": "machine"}, 60)


def in_a_thread(test: Any) -> None:
    """Run a test as `env_backend: inline` plays: outside of the main thread."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(test).result()


def test_a_tool_in_a_thread_that_hangs_is_left_and_the_next_call_has_another_thread(
    hanging: Any,
) -> None:
    def test() -> None:
        place = ToolPlace()
        with pytest.raises(ToolTimeout, match="did not end"):
            place.run("misbehave", toolbox.misbehave, {"how": "hang"}, 0.01)
        assert place.run("misbehave", toolbox.misbehave, {"how": "well"}, 60) is None
        place.end()

    in_a_thread(test)


def test_a_tool_that_keeps_hanging_is_not_called_until_its_calls_end(hanging: Any) -> None:
    def test() -> None:
        for _ in range(execution_module.MAX_LEFT):
            with pytest.raises(ToolTimeout, match="did not end"):
                run_bounded("misbehave", toolbox.misbehave, {"how": "hang"}, 0.01)
        before = threading.active_count()
        with pytest.raises(ToolTimeout, match="out of order"):
            run_bounded("misbehave", toolbox.misbehave, {"how": "hang"}, 0.01)
        assert threading.active_count() == before
        toolbox.release.set()
        for thread in execution_module._threads_left["misbehave"]:
            thread.join(60)
        assert run_bounded("misbehave", toolbox.misbehave, {"how": "well"}, 60) is None

    in_a_thread(test)


def test_async_tools_go_on_beside_one_that_blocks_their_loop(
    hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_module, "STUCK_S", 0.2)
    monkeypatch.setattr(execution_module, "DRAIN_S", 0.1)
    before = threading.active_count()
    for function, arguments in (
        (toolbox.hang_async, {"block": True}),
        (toolbox.hang_async, {"block": False}),
    ):
        with pytest.raises(ToolTimeout, match="did not end"):
            run_bounded("blocker", function, arguments, 0.25)
        assert run_bounded("later", toolbox.later, {"word": "hi"}, 60) == "HI"
    toolbox.release.set()
    until(lambda: threading.active_count() <= before + 1)  # the blocked loop has ended


class Bound(Tool):
    """State that belongs to the thread that made it, and a signal handler where signals are
    possible."""

    def create(self, episode: ToolEpisode) -> None:
        self.db = sqlite3.connect(":memory:")
        self.threads = [threading.current_thread()]

    def execute(self, sql: str) -> str:
        """Run SQL.

        Args:
            sql: A statement.
        """
        self.threads.append(threading.current_thread())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(0)
        return str(self.db.execute(sql).fetchall())

    def calc_reward(self) -> float:
        return float(self.db.execute("select 1").fetchone()[0])

    def release(self) -> None:
        self.db.close()
        assert len({*self.threads, threading.current_thread()}) == 1


class HalfAsync(Bound):
    async def execute(self, sql: str) -> str:  # type: ignore[override]
        """Run SQL.

        Args:
            sql: A statement.
        """
        return super().execute(sql)


def play_with(tool: type[Bound]) -> tuple[list[Any], threading.Thread]:
    session = ToolSession([make_tool(tool)], ToolSettings())
    session.create(ToolEpisode("task", 0))
    name = make_tool(tool).name
    thread = session._live[name].threads[0]  # type: ignore[attr-defined]
    shown = [
        session.run(Call(name, {"sql": f"select {n}"}), time.monotonic() + 60).text
        for n in range(20)
    ]
    shown.append(session.reward())
    session.release()
    return [*shown, dict(session.counts)], thread


EXPECTED = [*(f"[({n},)]" for n in range(20)), 1.0, {}]


def test_an_episodes_tools_stay_in_the_main_thread_where_signals_work() -> None:
    shown, thread = play_with(Bound)
    assert shown == EXPECTED and thread is threading.main_thread()


def test_elsewhere_an_episodes_tools_have_a_thread_of_their_own_that_ends_with_it() -> None:
    def test() -> None:
        shown, thread = play_with(Bound)
        assert shown == EXPECTED and thread is not threading.current_thread()
        thread.join(60)
        assert not thread.is_alive()

    in_a_thread(test)


def test_a_tool_with_one_async_method_runs_wholly_on_the_event_loop() -> None:
    shown, thread = play_with(HalfAsync)
    assert shown == EXPECTED and thread.name == "tool-loop"


async def test_beside_a_running_event_loop_as_playwright_leaves_one_the_tools_have_their_own_thread() -> (
    None
):
    shown, thread = play_with(Bound)
    assert shown == EXPECTED and thread.name == "tools"


def test_a_tool_in_the_main_thread_that_hangs_is_interrupted_and_the_same_thread_goes_on(
    hanging: Any,
) -> None:
    def waits_for_good() -> None:
        try:
            toolbox.release.wait(60)
        finally:
            ended.append(threading.current_thread())

    def busy() -> None:
        while True:
            pass

    ended: list[threading.Thread] = []
    place = ToolPlace()
    for function in (waits_for_good, busy, lambda: time.sleep(60), lambda: itertools.repeat(1)):
        with pytest.raises(ToolTimeout, match=r"did not end within 0\.1 s"):
            place.run("hangs", function, {}, 0.1)
    assert ended == [threading.main_thread()] and place.run("add", toolbox.add, {"a": 1}, 60) == 1
