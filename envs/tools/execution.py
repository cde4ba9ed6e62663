"""Runs one call of a tool with a time limit: sync functions in the episode's thread, async ones on a shared event loop.

Outside of the main thread, a function that hangs cannot be stopped. Its daemon thread (for an async function that
blocks, the thread of its loop) is left running and counted. While `MAX_HUNG` calls of a tool hang, the tool is not
called in this process.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from envs.errors import EnvironmentFault, ToolError
from envs.time_limit import TimeUp, in_main_thread, limited

MAX_HUNG = 8
STUCK_S = 1.0
"""Seconds within which a loop must respond and a cancelled coroutine must end."""
DRAIN_S = 60.0
"""Seconds that the other coroutines of a blocked loop have to end once it is free."""
_hung: dict[str, list[Callable[[], bool]]] = {}
"""For each tool, functions that tell whether a call that hung is still running."""
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_GiveUp = Callable[[], object]
"""Leaves a call that did not end in time, and counts it while it runs."""


class ToolTimeout(ToolError):
    """A call did not end within its time."""


class _CallTimeUp(TimeUp):
    """A call in the main thread reached its limit."""


class ToolPlace:
    """Where the sync functions of one episode run: always in one thread, as SQLite and Playwright demand.

    That is the main thread if the episode is played there, so that tools and graders may use signals. Otherwise, and
    while a tool of another episode keeps an event loop in the main thread (as Playwright's sync API does), it is a
    thread of the episode's own.
    """

    def __init__(self) -> None:
        self._in_main = in_main_thread() and asyncio._get_running_loop() is None
        self._thread: threading.Thread | None = None
        self._calls = queue.SimpleQueue[Any]()

    def run(self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Call a sync or async function and return what it returned; raises as `run_bounded`."""
        if _still_hung(name) >= MAX_HUNG:
            raise ToolTimeout(f"{name} is out of order: {MAX_HUNG} of its calls never ended")
        run = _run_here if self._in_main and in_main_thread() else self._run_in_thread
        value = run(name, lambda: _read_out(function(**arguments)), timeout_s)
        return _wait(name, *_on_loop(name, value), timeout_s) if inspect.iscoroutine(value) else value

    def end(self) -> None:
        """End the thread after its current call; another call would start a new one."""
        self._thread = None
        self._calls.put(None)

    def _run_in_thread(self, name: str, call: Callable[[], Any], timeout_s: float) -> Any:
        if self._thread is None:
            self._calls = queue.SimpleQueue[Any]()
            self._thread = threading.Thread(target=_serve, args=[self._calls], name="tools", daemon=True)
            self._thread.start()
        thread, future = self._thread, Future[Any]()
        self._calls.put((future, call))
        return _wait(name, future, lambda: (self.end(), _leave(name, thread.is_alive)), timeout_s)


def run_bounded(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Call a sync or async function that keeps no state, and return what it returned.

    Raises:
        ToolTimeout: the call took longer than `timeout_s`, or too many earlier calls of the tool still hang.
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
    return list(value) if isinstance(value, Iterator) else value


def _on_loop(name: str, coroutine: Coroutine[Any, Any, Any]) -> tuple[Future[Any], _GiveUp]:
    loop = background_loop()
    tasks: list[asyncio.Task[Any]] = []

    async def owned() -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(name)
        tasks.append(task)
        return _read_out(await coroutine)

    future = asyncio.run_coroutine_threadsafe(owned(), loop)

    def give_up() -> None:
        """Cancel the coroutine; count it if it continues, and retire its loop if that is blocked."""
        alive = threading.Event()
        cancel = lambda: tasks[0].cancel() if tasks else (future.cancel(), coroutine.close())  # if it has not begun
        try:
            loop.call_soon_threadsafe(lambda: (cancel(), alive.set()))
        except RuntimeError:  # the loop is closed, so the coroutine has ended
            return
        if not alive.wait(STUCK_S):
            _retire(loop, name)
        elif wait([future], STUCK_S).not_done:
            _leave(name, lambda: not future.done())

    return future, give_up


def _wait(name: str, future: Future[Any], give_up: _GiveUp, timeout_s: float) -> Any:
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


def _leave(name: str, runs: Callable[[], bool]) -> None:
    with _lock:
        _hung.setdefault(name, []).append(runs)


def _still_hung(name: str) -> int:
    with _lock:
        alive = [runs for runs in _hung.get(name, []) if runs()]
        _hung[name] = alive
        return len(alive)


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop shared by the async tools and judges of this process, whose connections outlive a call."""
    global _loop
    with _lock:
        if _loop is None:
            loop = _loop = asyncio.new_event_loop()
            run = lambda: (loop.run_forever(), loop.close())
            threading.Thread(target=run, name="tool-loop", daemon=True).start()
        return _loop


def _retire(loop: asyncio.AbstractEventLoop, waiting: str) -> None:
    """Replace a blocked loop; until it is free, it is a hung call of the tool whose task blocks it."""
    global _loop
    with _lock:
        if _loop is not loop:
            return
        _loop = None
    blocking = asyncio.current_task(loop)
    name = waiting if blocking is None or blocking.get_name().startswith("Task-") else blocking.get_name()
    free = threading.Event()
    loop.call_soon_threadsafe(lambda: (free.set(), loop.call_later(DRAIN_S, loop.stop)))
    _leave(name, lambda: not free.is_set())
