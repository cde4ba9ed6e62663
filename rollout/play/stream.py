"""Slots that never stop playing; their finished turns become batches, in the order in which they finish.

Invariants: every issued turn is playing, or pending in a batch that is not handed out yet, or handed out exactly once.
A turn is issued only if the weights that play it may still be trained on under `max_staleness`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.errors import ConfigError, EngineError, EnvironmentFault
from rollout.play.episode import Episode
from rollout.play.failures import FailureBudget
from rollout.play.metrics import BatchLoad, measure
from rollout.play.runtime import Runtime
from rollout.play.slots import Slot, slot_state
from rollout.play.staleness import WeightClock, version_of
from rollout.turn import Prompt, Segment, StopReason, Turn


@dataclass(frozen=True)
class Cut:
    """A batch: its segments in slot order, and the slots' state when its last turn had finished."""

    segments: list[Segment]
    slots: list[Mapping[str, Any]]


class Stream:
    """Plays all slots in the background and cuts batches of `size` turns."""

    def __init__(
        self, runtime: Runtime, slots: Sequence[Slot], size: int, clock: WeightClock, faults: Counter[str]
    ) -> None:
        """Open the stream; it begins to play with the first `next_batch`.

        Args:
            faults: `runtime.fault_counts()` from which the first batch counts its faults.
        """
        self.ledger: Counter[str] = Counter()
        """Turns so far: `issued`, `finished`, `handed_out`."""
        self.on_turn: Callable[[], Any] = lambda: None
        """Called after every finished turn."""
        self._runtime, self._slots, self._size, self._clock = runtime, slots, size, clock
        self._open: dict[int, _OpenSegment] = {}
        """By slot number: its episode's turns in the batch that is being filled."""
        self._closed: dict[int, list[Segment]] = {}
        """By slot number: that batch's segments whose episodes ended."""
        self._recorded = {slot.number: len(slot.episode.answers) for slot in slots if slot.episode is not None}
        """By slot number: finished turns of its episode; the episode may already have taken the next answer."""
        self._filled, self._failures = 0, FailureBudget(runtime)
        self._ready: deque[Cut] = deque()
        self._rollout_id, self._pushes, self._limit = 0, 0, 0
        self._playing, self._paused, self._stopped = 0, True, False
        self._error: BaseException | None = None
        self._faults, self._load = faults, measure(runtime)
        self._probe = Prompt([min(runtime.encoder.end_of_turn_ids)])
        self._gate, self._news = _Signal(), _Signal()
        self._tasks = [asyncio.create_task(self._play(slot)) for slot in slots]

    @property
    def pending(self) -> int:
        """Turns that are finished and not handed out."""
        return self.ledger["finished"] - self.ledger["handed_out"]

    async def next_batch(self, rollout_id: int) -> Cut:
        """The batch of this rollout; waits until it is full.

        Raises:
            ConfigError: the engine does not number its weights.
            EngineError, FailureBudgetError: as in fixed-turn batches. The stream has stopped.
        """
        if self._clock.first is not None:
            # slime asks for batch r at the earliest after the push that follows rollout r - 2.
            self._pushes = max(self._pushes, (rollout_id - 1 - self._clock.first[0]) // self._clock.interval)
        self._rollout_id, self._paused = rollout_id, False
        self._set_limit()
        if not self._may_issue():
            await self._ask_version()
        await self._news.until(lambda: bool(self._ready) or self._error is not None)
        if self._error is not None:
            await self.close()
            raise self._error
        cut = self._ready.popleft()
        self.ledger["handed_out"] += self._size
        self._rollout_id = rollout_id + 1
        self._set_limit()
        return cut

    def since_last_batch(self) -> tuple[Counter[str], BatchLoad]:
        """Faults and load since the last call."""
        faults = self._runtime.fault_counts()
        found = faults - self._faults, self._load()
        self._faults, self._load = faults, measure(self._runtime)
        return found

    async def pause(self) -> None:
        """Issue no further turns until `next_batch` is called, and wait for those that are playing.

        For engines that give their GPUs to the trainer. What finishes meanwhile belongs to the next batch.
        """
        self._paused = True
        await self._news.until(lambda: self._playing == 0 or self._error is not None)

    async def close(self) -> None:
        """Stop playing."""
        self._stopped = True  # a task that finishes a step in this moment may swallow its cancellation
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _set_limit(self) -> None:
        """Let turns be issued for the batches that today's weights may still play."""
        clock, allowed = self._clock, self._runtime.settings.max_staleness
        start = self._rollout_id if clock.first is None else clock.first[0]
        updates = clock.updates_before(start + self._pushes * clock.interval)
        batches = [clock.updates_before(self._rollout_id + k) - updates <= allowed for k in range(allowed + 1)]
        self._limit = self.ledger["handed_out"] + sum(batches) * self._size
        self._gate.send()

    async def _play(self, slot: Slot) -> None:
        """Play the slot for as long as the stream runs; `next_batch` raises the first error of any slot."""
        try:
            while not self._stopped:
                await self._gate.until(self._may_issue)
                self.ledger["issued"] += 1
                self._playing += 1
                try:
                    await self._play_turn(slot)
                finally:
                    self._playing -= 1
                    self._news.send()
        except Exception as error:
            self._error = self._error or error
            self._news.send()

    def _may_issue(self) -> bool:
        return not self._paused and self.ledger["issued"] < self._limit

    async def _play_turn(self, slot: Slot) -> None:
        try:
            episode = await slot.live()
            turn = await self._turn(episode)
        except EnvironmentFault as fault:
            self.ledger["issued"] -= 1
            self._gate.send()
            self._recorded.pop(slot.number, None)
            if (part := self._open.pop(slot.number, None)) is not None:
                self._close_segment(slot, part.ended(StopReason.FAILED))
            self._failures.count(fault)
            await slot.leave()
            return
        self._record(slot, episode, turn)
        if episode.stop is not None:
            await episode.close()

    async def _turn(self, episode: Episode) -> Turn:
        """Play one turn with weights of a single version; an answer that spans an update is requested again."""
        runtime, params = self._runtime, self._runtime.flags.sampling_params()
        tries = runtime.settings.max_turn_retries + 1
        for _ in range(tries):
            began = time.perf_counter()
            generation = await episode.generate(params)
            if len(set(generation.weight_versions)) <= 1:
                return await episode.take(generation, time.perf_counter() - began)
            runtime.counters["turns_spanning_update"] += 1
        raise EngineError(
            f"turn {episode.index} of episode {episode.spec.episode_id} spanned a weight update {tries} times "
            "(max_turn_retries bounds this)"
        )

    def _record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Add a finished turn to the batch, and cut the batch if it is full. Nothing is awaited in between."""
        self._follow_weights(version_of(turn.generation))
        self.ledger["finished"] += 1
        self._filled += 1
        part = self._open.setdefault(slot.number, _OpenSegment())
        part.turns.append(turn)
        if episode.stop is None:
            part.cut = episode.segment([turn], StopReason.CUT)
            self._recorded[slot.number] = episode.index
        else:
            del self._open[slot.number]
            self._recorded.pop(slot.number, None)
            self._close_segment(slot, episode.segment(part.turns, episode.stop))
            slot.release()
        if self._filled == self._size:
            self._ready.append(self._make_cut())
        self.on_turn()

    async def _ask_version(self) -> None:
        """Learn the engine's weight version from a request of one token; no turn is playing that would tell it."""
        params = {**self._runtime.flags.sampling_params(), "max_new_tokens": 1}
        generation = await self._runtime.engine.generate(self._probe, params)
        self._follow_weights(version_of(generation))

    def _follow_weights(self, version: int | None) -> None:
        if version is None:
            raise ConfigError(
                "the engine does not say which weights answered (its meta_info has no numeric weight_version), so "
                "staleness cannot be bounded; use an engine that does, or --rollout-function-path "
                "rollout.fixed_turn.generate_rollout"
            )
        self._clock.start(self._rollout_id, [version])
        assert self._clock.first is not None
        if (pushes := version - self._clock.first[1]) > self._pushes:
            self._pushes = pushes
            self._set_limit()

    def _make_cut(self) -> Cut:
        """The batch of the turns that have finished; running episodes get a bootstrap prompt."""
        segments: list[Segment] = []
        for slot in self._slots:
            segments += self._closed.get(slot.number, [])
            if (part := self._open.get(slot.number)) is not None:
                segments.append(part.ended(StopReason.CUT))
        assert sum(len(segment.turns) for segment in segments) == self._size
        self._open, self._closed, self._filled, self._failures = {}, {}, 0, FailureBudget(self._runtime)
        return Cut(segments, [slot_state(slot, self._recorded.get(slot.number, 0)) for slot in self._slots])

    def _close_segment(self, slot: Slot, segment: Segment) -> None:
        self._closed.setdefault(slot.number, []).append(segment)


@dataclass
class _OpenSegment:
    """Turns of an episode that runs on."""

    turns: list[Turn] = field(default_factory=list)
    cut: Segment | None = None
    """The last turn as a segment, made when it finished; the episode's own prompt may have moved on since."""

    def ended(self, stop: StopReason) -> Segment:
        assert self.cut is not None
        return replace(self.cut, turns=tuple(self.turns), stop=stop)


class _Signal:
    """Wakes the tasks that wait for a condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def send(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()
