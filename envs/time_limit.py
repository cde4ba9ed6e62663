"""Stops code in the main thread after a number of seconds.

The main thread is interrupted by a separate signal, so that the code keeps SIGALRM for itself. Code
that waits in a system call, for a lock or in a loop is interrupted; compiled code that never
returns is not.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
THREAD = "time-limit"
"""Name of the thread that sends the signal."""
REMINDER_S = 1.0
"""Seconds after which code that swallowed the interruption is interrupted again."""
_limits: "list[tuple[float, type[TimeUp]]]" = []
"""When each limit that is in force is over, in `time.monotonic` seconds, from the outermost
inwards."""


class TimeUp(BaseException):
    """The time is over; not an `Exception`, so that code does not catch it by accident."""


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that may use signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def limited(seconds: float, error: type[TimeUp]) -> Iterator[None]:
    """Raise `error` inside the block after this many seconds; only for the main thread. Limits may
    be nested."""
    if signal.getsignal(SIGNAL) is not _interrupt:
        signal.signal(SIGNAL, _interrupt)
    depth = len(_limits)
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=[seconds, over], name=THREAD, daemon=True)
    _limits.append((time.monotonic() + seconds, error))
    watch.start()
    try:
        yield
    finally:
        del _limits[depth:]
        over.set()


def _watch(seconds: float, over: threading.Event) -> None:
    while not over.wait(seconds):
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        seconds = REMINDER_S


def _interrupt(*_: object) -> None:
    for end, error in _limits:
        if time.monotonic() >= end:
            raise error
