"""Runs one call of a tool with a time limit: sync functions in a thread, async ones on a loop of their own.

A function that hangs cannot be stopped from outside, so it is left behind in a daemon thread, counted, and after
`MOST_HUNG` of them the tool is not started again in this process.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from envs.errors import EnvironmentFault, ToolError

MOST_HUNG = 8
_hung: dict[str, list[threading.Thread]] = {}
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


class ToolTimeout(ToolError):
    """A call did not end within its time."""


def run_bounded(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Call a sync or async function and return what it returned.

    Raises:
        ToolTimeout: it ran longer than `timeout_s`, or too many earlier calls of the tool still hang.
        ToolError: it raised; the text is the exception's.
        EnvironmentFault: it said so itself: the machine is broken, not the call.
    """
    if _still_hung(name) >= MOST_HUNG:
        raise ToolTimeout(f"{name} is out of order: {MOST_HUNG} of its calls never ended")
    future = _in_thread(name, function, arguments)
    value = _wait(name, future, timeout_s)
    if inspect.iscoroutine(value):
        return _wait(name, asyncio.run_coroutine_threadsafe(value, background_loop()), timeout_s)
    return value


def _in_thread(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(**arguments))
        except BaseException as error:  # SystemExit of a tool must not pass for silence
            future.set_exception(error)

    thread = threading.Thread(target=work, name=f"tool-{name}", daemon=True)
    future.thread = thread  # type: ignore[attr-defined]
    thread.start()
    return future


def _wait(name: str, future: Future[Any], timeout_s: float) -> Any:
    try:
        return future.result(timeout_s)
    except EnvironmentFault:
        raise
    except TimeoutError as error:
        if future.done() and not future.cancelled():
            raise ToolError(_said(error)) from error
        _give_up(name, future)
        raise ToolTimeout(f"{name} did not end within {timeout_s:g} s") from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not future.done():
            raise
        raise ToolError(_said(error)) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _give_up(name: str, future: Future[Any]) -> None:
    thread = getattr(future, "thread", None)
    if thread is not None:
        with _lock:
            _hung.setdefault(name, []).append(thread)
        return
    future.cancel()
    _replace_loop_if_stuck()


def _still_hung(name: str) -> int:
    with _lock:
        alive = [thread for thread in _hung.get(name, []) if thread.is_alive()]
        _hung[name] = alive
        return len(alive)


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop that async tools and judges of this process share, so that their connections outlive a call."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="tool-loop", daemon=True).start()
        return _loop


def _replace_loop_if_stuck() -> None:
    """An async tool that blocks instead of awaiting would take all others with it."""
    global _loop
    loop, alive = _loop, threading.Event()
    if loop is None:
        return
    loop.call_soon_threadsafe(alive.set)
    if not alive.wait(1.0):
        with _lock:
            if _loop is loop:
                _loop = None


