"""Runs one call of a tool with a time limit: sync functions in the episode's thread, async ones on
a shared event loop.

Outside of the main thread, a function that hangs cannot be stopped. Its daemon thread (for an async
function that blocks, the thread of its loop) is left running. While `MAX_LEFT` threads of a tool
run, the tool is not called in this process.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from envs.errors import EnvironmentFault, ToolError
from envs.time_limit import TimeUp, in_main_thread, limited

MAX_LEFT = 8
STUCK_S = 1.0
"""Seconds within which a loop must respond."""
DRAIN_S = 60.0
"""Seconds that the other coroutines of a blocked loop have to end once it is free."""
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None
_threads_left: defaultdict[str, list[threading.Thread]] = defaultdict(list)
"""By tool: threads that were left with a call that did not end in time."""


class ToolTimeout(ToolError):
    """A call did not end within its time."""


class _CallTimeUp(TimeUp):
    """A call in the main thread reached its limit."""


class ToolPlace:
    """Where the sync functions of one episode run: always in one thread, as SQLite and Playwright
    demand.

    That is the main thread if the episode is played there, so that tools and graders may use
    signals. Otherwise, and while a tool of another episode keeps an event loop in the main thread
    (as Playwright's sync API does), it is a thread of the episode's own.
    """

    def __init__(self) -> None:
        self._in_main = in_main_thread() and asyncio._get_running_loop() is None
        self._calls = queue.SimpleQueue[Any]()
        self._thread: threading.Thread | None = None

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        timeout_s: float,
    ) -> Any:
        """Call a sync or async function and return what it returned; raises as `run_bounded`."""
        if _count_left(name) >= MAX_LEFT:
            raise ToolTimeout(f"{name} is out of order: {MAX_LEFT} of its calls never ended")
        run = _run_here if self._in_main and in_main_thread() else self._run_in_thread
        value = run(name, lambda: _read_out(function(**arguments)), timeout_s)
        return _run_on_loop(name, value, timeout_s) if inspect.iscoroutine(value) else value

    def end(self) -> None:
        """End the thread after its current call; another call would start a new one."""
        self._thread = None
        self._calls.put(None)

    def _run_in_thread(self, name: str, call: Callable[[], Any], timeout_s: float) -> Any:
        if self._thread is None:
            self._calls = queue.SimpleQueue[Any]()
            self._thread = threading.Thread(
                target=_serve, args=[self._calls], name="tools", daemon=True
            )
            self._thread.start()
        thread = self._thread
        future = Future[Any]()
        self._calls.put((future, call))

        def leave() -> None:
            with _lock:
                _threads_left[name].append(thread)
            self.end()

        return _wait(name, future, leave, timeout_s)


def run_bounded(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float
) -> Any:
    """Call a sync or async function that keeps no state, and return what it returned.

    Raises:
        ToolTimeout: the call took longer than `timeout_s`, or too many earlier calls of the tool
            still run.
        ToolError: the call raised an exception; the text is the exception's.
        EnvironmentFault: raised by the function itself: the machine is broken.
    """
    place = ToolPlace()
    try:
        return place.run(name, function, arguments, timeout_s)
    finally:
        place.end()


def _serve(calls: "queue.SimpleQueue[Any]") -> None:
    while (item := calls.get()) is not None:
        future, call = item
        try:
            future.set_result(call())
        except BaseException as error:  # SystemExit must be reported, too
            future.set_exception(error)


def _run_here(name: str, call: Callable[[], Any], timeout_s: float) -> Any:
    try:
        with limited(timeout_s, _CallTimeUp):
            return call()
    except _CallTimeUp:
        raise ToolTimeout(f"{name} did not end within {timeout_s:g} s") from None
    except (EnvironmentFault, TimeUp, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ToolError(_said(error)) from error


def _read_out(value: Any) -> Any:
    """Return a list in place of an iterator, which may take as long as the call itself."""
    if not isinstance(value, Iterator):
        return value
    items = []
    for item in value:  # a loop in Python, because `list` cannot be interrupted
        items.append(item)
    return items


def _run_on_loop(name: str, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    loop = background_loop()

    async def whole() -> Any:
        return _read_out(await coroutine)

    future = asyncio.run_coroutine_threadsafe(whole(), loop)

    def give_up() -> None:
        """Cancel the coroutine, and retire its loop if that is blocked."""
        alive = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the coroutine has ended
            future.cancel()
            loop.call_soon_threadsafe(alive.set)
            if not alive.wait(STUCK_S):
                _retire(loop, name)

    return _wait(name, future, give_up, timeout_s)


def _wait(name: str, future: Future[Any], give_up: Callable[[], None], timeout_s: float) -> Any:
    try:
        return future.result(timeout_s)
    except EnvironmentFault:
        raise
    except TimeoutError as error:
        if future.done() and future.exception() is error:
            raise ToolError(_said(error)) from error
        give_up()
        raise ToolTimeout(f"{name} did not end within {timeout_s:g} s") from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | TimeUp) and not future.done():
            raise
        raise ToolError(_said(error)) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _count_left(name: str) -> int:
    """How many threads still run that were left with a call of the tool."""
    with _lock:
        alive = [thread for thread in _threads_left[name] if thread.is_alive()]
        _threads_left[name] = alive
        return len(alive)


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop shared by the async tools and judges of this process, whose connections
    outlive a call."""
    global _loop, _loop_thread
    with _lock:
        if _loop is None:
            loop = _loop = asyncio.new_event_loop()
            run = lambda: (loop.run_forever(), loop.close())
            _loop_thread = threading.Thread(target=run, name="tool-loop", daemon=True)
            _loop_thread.start()
        return _loop


def _retire(loop: asyncio.AbstractEventLoop, name: str) -> None:
    """Replace a loop that blocks a call of the tool `name`; it ends some time after it is free."""
    global _loop
    with _lock:
        if _loop is loop and _loop_thread is not None:
            _loop = None
            _threads_left[name].append(_loop_thread)
            loop.call_soon_threadsafe(lambda: loop.call_later(DRAIN_S, loop.stop))
