"""What the CPU time of a turn is spent on: thread time inside the functions that do each part's work.

What is left of the process's CPU time is the event loop, the HTTP client and the loop that plays. Players are other
processes, which are not timed; their parts are those of a run with one process.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from rollout import fixed_turn
from rollout.play import engine
from rollout.play.episode import Episode
from rollout.players.wire import Link
from rollout.tokens.encoding import DeltaEncoder
from rollout.workers.worker import EnvHost

SECONDS: Counter[str] = Counter()  # by part, since it was cleared
PLACES: tuple[tuple[str, Any, str], ...] = (
    ("prompt", Episode, "_build_prompt"),
    ("prompt", DeltaEncoder, "check"),
    ("request", engine, "request_body"),
    ("answer", engine, "read_json"),
    ("answer", engine, "parse_generation"),
    ("environment", EnvHost, "handle"),
    ("batch", fixed_turn, "build_samples"),
    ("batch", fixed_turn, "batch_metrics"),
    ("players", Link, "data_received"),
    ("players", Link, "_flush"),
)
"""Part, owner and name of each timed function; none of them calls another."""


@contextmanager
def timed() -> Iterator[None]:
    """Meanwhile the functions are timed."""

    def timer(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                SECONDS[part] += time.thread_time() - began

        return call

    with ExitStack() as patches:
        for part, owner, name in PLACES:
            patches.enter_context(mock.patch.object(owner, name, timer(part, getattr(owner, name))))
        yield
