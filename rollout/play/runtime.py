"""One runtime for each run: made at the first batch, kept between batches, closed at the end."""

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

from rollout.bridge.checks import process_count
from rollout.play.build import build_runtime
from rollout.play.parts import Runtime


@dataclass(eq=False)
class _Opened:
    """A runtime that is being built or in use."""

    args: Any
    loop: asyncio.AbstractEventLoop
    building: asyncio.Task[Runtime]

    @property
    def failed(self) -> bool:
        return self.building.done() and (
            self.building.cancelled() or self.building.exception() is not None
        )


_opened: list[_Opened] = []


async def get_runtime(args: Any) -> Runtime:
    """Return this `args`' runtime on the running event loop; builds it in a thread; raises as
    `build_runtime`."""
    loop = asyncio.get_running_loop()
    found = next(
        (opened for opened in _opened if opened.args is args and opened.loop is loop), None
    )
    if found is not None and found.failed:
        _opened.remove(found)
        found = None
    if found is None:
        found = _Opened(args, loop, asyncio.create_task(asyncio.to_thread(_build_and_freeze, args)))
        _opened.append(found)
    return await found.building


def open_runtimes() -> list[Runtime]:
    """The runtimes of this process, on any event loop."""
    return [
        opened.building.result()
        for opened in list(_opened)
        if opened.building.done() and not opened.failed
    ]


def _build_and_freeze(args: Any) -> Runtime:
    """Build the runtime and its players, and exempt torch's and transformers' objects from garbage
    collection."""
    runtime = build_runtime(args)
    if (count := process_count(args, runtime.settings)) > 1:
        # Not at the top: few runs have several processes.
        from rollout.players.manager import PlayerProcesses

        runtime.players = PlayerProcesses(runtime, args, count)
    gc.collect()
    gc.freeze()
    return runtime


async def close_runtimes() -> None:
    """Close every runtime of the running event loop; the next `get_runtime` makes a new one."""
    loop = asyncio.get_running_loop()
    for opened in [opened for opened in _opened if opened.loop is loop]:
        _opened.remove(opened)
        # An interrupted run may close while the runtime is being built.
        await asyncio.wait([opened.building])
        if not opened.failed:
            await opened.building.result().close()
