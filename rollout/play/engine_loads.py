"""How busy the engines are, as they say themselves."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from rollout.errors import EngineError

logger = logging.getLogger(__name__)

LOADS_PAUSE_S = 2.0
"""Between two questions to each engine."""


class EngineLoad(NamedTuple):
    """Mean numbers of an engine's requests, over all its data-parallel ranks."""

    running: float
    waiting: float
    """In the engine's queue."""


class EngineLoads:
    """Asks the engines from `start` on; nothing is known of those that do not tell."""

    def __init__(self, router: str, get: Callable[[str], Awaitable[Any]]) -> None:
        """`get` returns the JSON at a URL, or raises EngineError."""
        self._router = router
        self._get = get
        self._found: defaultdict[int, list[EngineLoad]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    def take(self) -> dict[int, EngineLoad]:
        """Return the loads since the last call. An engine keeps its number while it does not
        tell."""
        found = self._found
        self._found = defaultdict(list)
        mean = lambda loads: EngineLoad(
            *(sum(part) / len(part) for part in zip(*loads, strict=True))
        )
        return {number: mean(found[number]) for number in sorted(found)}

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                workers = (await self._get(f"{self._router}/workers"))["workers"]
                urls = sorted(str(worker["url"]) for worker in workers)
            except (EngineError, LookupError, TypeError) as error:
                if not isinstance(error, EngineError) or error.is_final:
                    logger.info(
                        "%s does not list its engines, so no batch tells their loads: %s",
                        self._router,
                        error,
                    )
                    return
                urls = []  # it may come back
            numbered = [(self._numbers.setdefault(url, len(self._numbers)), url) for url in urls]
            await asyncio.gather(*(self._ask(number, url) for number, url in numbered))
            await asyncio.sleep(LOADS_PAUSE_S)

    async def _ask(self, number: int, url: str) -> None:
        try:
            ranks: list[Mapping[str, int]] = (await self._get(f"{url}/v1/loads"))["loads"]
            load = EngineLoad(
                *(sum(rank[f"num_{kind}_reqs"] for rank in ranks) for kind in EngineLoad._fields)
            )
        except (EngineError, LookupError, TypeError) as error:  # it restarts, or is another version
            logger.debug("%s does not tell its load: %s", url, error)
            return
        self._found[number].append(load)
