"""One call of a tool: its time limit, what it raises, and what becomes of calls that never end."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from envs.errors import EnvironmentFault, ToolError
from envs.tools import execution as execution_module
from envs.tools.execution import ToolTimeout, run_bounded
from tests.envs.tools import toolbox


@pytest.fixture
def hanging() -> Any:
    toolbox.release.clear()
    execution_module._hung.clear()
    yield
    toolbox.release.set()
    execution_module._hung.clear()


def await_end_of(name: str) -> None:
    """Wait until no call of the tool hangs any more."""
    deadline = time.monotonic() + 60
    while execution_module._still_hung(name):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sync_and_async_functions_are_called_with_a_time_limit(hanging: Any) -> None:
    assert run_bounded("add", toolbox.add, {"a": 1, "b": 2}, 60) == 3
    assert run_bounded("later", toolbox.later, {"word": "hi"}, 60) == "HI"
    for name, function, arguments in (
        ("misbehave", toolbox.misbehave, {"how": "hang"}),
        ("hang_async", toolbox.hang_async, {"block": False}),
        ("hang_async", toolbox.hang_async, {"block": True}),
    ):
        with pytest.raises(ToolTimeout, match=r"did not end within 0\.2 s"):
            run_bounded(name, function, arguments, 0.2)
    assert run_bounded("later", toolbox.later, {"word": "again"}, 60) == "AGAIN"


@pytest.mark.parametrize(("how", "words"), [("raise", "no luck"), ("exit", "SystemExit"), ("timeout", "asleep")])
def test_a_tools_exception_is_reported(how: str, words: str) -> None:
    with pytest.raises(ToolError, match=words) as caught:
        run_bounded("misbehave", toolbox.misbehave, {"how": how}, 60)
    assert not isinstance(caught.value, ToolTimeout)


def test_an_environment_fault_from_a_tool_is_passed_on() -> None:
    with pytest.raises(EnvironmentFault, match="disk is full"):
        run_bounded("misbehave", toolbox.misbehave, {"how": "machine"}, 60)


def test_a_tool_that_keeps_hanging_is_disabled_until_its_calls_end(hanging: Any) -> None:
    arguments = {"how": "hang"}
    for _ in range(execution_module.MAX_HUNG):
        with pytest.raises(ToolTimeout, match="did not end"):
            run_bounded("misbehave", toolbox.misbehave, arguments, 0.01)
    before = threading.active_count()
    with pytest.raises(ToolTimeout, match="out of order"):
        run_bounded("misbehave", toolbox.misbehave, arguments, 0.01)
    assert threading.active_count() == before
    toolbox.release.set()
    await_end_of("misbehave")
    assert run_bounded("misbehave", toolbox.misbehave, {"how": "well"}, 60) is None


async def blocks_in_a_task_of_its_own() -> None:
    async def block() -> None:
        toolbox.release.wait(60)

    await asyncio.create_task(block())


async def ignores_cancellation() -> None:
    while not toolbox.release.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(toolbox.hang_async, {"block": True}), (blocks_in_a_task_of_its_own, {}), (ignores_cancellation, {})],
)
def test_an_async_tool_that_keeps_hanging_is_disabled_too(
    hanging: Any, monkeypatch: pytest.MonkeyPatch, function: Any, arguments: dict[str, Any]
) -> None:
    monkeypatch.setattr(execution_module, "STUCK_S", 0.2)
    before = threading.active_count()
    for number in range(execution_module.MAX_HUNG + 3):
        words = "did not end" if number < execution_module.MAX_HUNG else "out of order"
        with pytest.raises(ToolTimeout, match=words):
            run_bounded("blocker", function, arguments, 0.25)
    # One loop for each call that blocks, and one that works.
    assert threading.active_count() <= before + execution_module.MAX_HUNG + 1
    assert run_bounded("later", toolbox.later, {"word": "hi"}, 60) == "HI", "other async tools go on"
    toolbox.release.set()
    await_end_of("blocker")
    assert run_bounded("blocker", toolbox.later, {"word": "hi"}, 60) == "HI"
    assert threading.active_count() <= before + 1


def test_a_blocked_loop_counts_against_the_tool_that_blocks_it(hanging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "STUCK_S", 0.2)

    blocks = threading.Event()

    async def hang() -> None:
        blocks.set()
        toolbox.release.wait(60)

    def block() -> None:
        with contextlib.suppress(ToolTimeout):
            run_bounded("blocker", hang, {}, 1)

    blocker = threading.Thread(target=block)
    blocker.start()
    assert blocks.wait(60)
    with pytest.raises(ToolTimeout):
        run_bounded("later", toolbox.later, {"word": "hi"}, 0.05)
    assert (execution_module._still_hung("blocker"), execution_module._still_hung("later")) == (1, 0)
    toolbox.release.set()
    blocker.join()
