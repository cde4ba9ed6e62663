"""Slots that never stop playing; their finished turns become batches, those of the oldest weights
first.

Invariants: every issued turn is playing, pending, or handed out exactly once, and a slot's turns
are handed out in order. A turn is due in the last rollout in which `max_staleness` still allows the
weights that play it. It is issued only if the batches up to that one have a place for it. If the
turns still playing could not all be trained on in time, a batch waits for them (`stale_turns:
wait`), or they lose their loss (`mask`).
"""

import asyncio
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from rollout.batches.load import LoadMeter
from rollout.batches.metrics import BatchLoad
from rollout.batches.slots import saved_slot
from rollout.errors import ConfigError, EnvironmentFault, SlowTurnFault, TurnAbortedError
from rollout.play.clock import Demands, WeightClock, numbered_versions, version_of
from rollout.play.episode import ABORT_PAUSE_S, Episode
from rollout.play.loop import Slot, play
from rollout.play.parts import Runtime
from rollout.turn import Batch, Generation, Prompt, Segment, StopReason, Turn
from rollout.workers.utilization import Utilization


@dataclass
class _Finished:
    """A finished turn that is not handed out yet."""

    slot: int
    episode: Episode
    segment: Segment
    """The turn alone, made when it finished; the episode's own prompt may have moved on since."""
    version: int
    due: int
    """The last rollout that may train on it."""
    next_episode: int
    """The slot's next episode after this one."""

    @property
    def turn(self) -> Turn:
        return self.segment.turns[0]


_due = attrgetter("due")


class Stream:
    """Plays all slots in the background and cuts batches of `size` turns."""

    def __init__(
        self, runtime: Runtime, slots: Sequence[Slot], size: int, clock: WeightClock
    ) -> None:
        """Open the stream, which plays from the first `next_batch`."""
        self.ledger: Counter[str] = Counter()
        """Turns so far: `issued`, `finished`, `handed_out`."""
        self.on_turn: Callable[[], Any] = lambda: None
        """Called after every finished turn."""
        self._runtime = runtime
        self._slots = slots
        self._size = size
        self._clock = clock
        self._finished: list[_Finished] = []
        """Sorted by `due`; equal ones in the order in which they finished."""
        self._latest: dict[int, _Finished] = {}
        """By slot number: the turn that finished last."""
        self._playing: dict[int, int] = {}
        """By slot number: the last rollout that may train on the turn in flight."""
        self._recorded = {
            slot.number: len(slot.episode.answers) for slot in slots if slot.episode is not None
        }
        """By slot number: finished turns of its episode; the episode may already have taken the
        next response."""
        self._failed = 0
        """Episodes lost since the last batch was full."""
        self._standing, self._stood_s = Utilization(), 0.0
        """Counts the slots that wait for new weights; and their seconds before the last batch."""
        self._rollout_id = 0
        self._pushes = 0
        self._limit = 0
        self._paused = True
        self._stopped = False
        self._error: BaseException | None = None
        self._meter = LoadMeter(runtime)
        self._demands = Demands(numbered=True, single=runtime.settings.on_update == "abort")
        if runtime.players is not None:
            runtime.players.demands = self._demands
        self._probe = Prompt([min(runtime.encoder.end_of_turn_ids)])
        self._gate = _Signal()
        self._news = _Signal()
        self._tasks = [asyncio.create_task(self._play(slot)) for slot in slots]

    @property
    def pending(self) -> int:
        """Turns that are finished and not handed out."""
        return len(self._finished)

    async def next_batch(self, rollout_id: int) -> Batch:
        """Return the batch of this rollout, once it is full and leaves no turn behind that would
        become too old.

        Raises:
            ConfigError: the engine does not number its weights.
            EngineError, FailureBudgetError: as in fixed-turn batches. The stream has stopped.
        """
        self._pushes = max(self._pushes, self._clock.pushes_before(rollout_id))
        self._rollout_id = rollout_id
        self._paused = False
        self._set_limit()
        if self._clock.needs_answer(rollout_id) or not self._has_place():
            try:
                await self._ask_version()
            except Exception as error:
                self._error = self._error or error
        await self._news.until(lambda: len(self._finished) >= self._size or self._error is not None)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._runtime.settings.stale_turns == "wait":
            await self._news.until(lambda: not self._must_wait() or self._error is not None)
        if self._error is not None:
            await self.close()
            raise self._error
        cut = self._cut(loop.time() - began)
        self.ledger["handed_out"] += self._size
        self._rollout_id = rollout_id + 1
        self._set_limit()
        return cut

    def skip(self, rollout_id: int) -> list[Mapping[str, Any]]:
        """Note a rollout whose batch is not taken from the stream, and return the slots' state for
        its checkpoint."""
        self._pushes = max(self._pushes, self._clock.pushes_before(rollout_id))
        self._rollout_id = rollout_id + 1
        self._set_limit()
        return self._states()

    async def since_last_batch(self) -> tuple[BatchLoad, float]:
        """Load, and the slots' seconds at the limit of `max_staleness`, since the last call."""
        load = await self._meter.take()
        before = self._stood_s
        self._stood_s = self._standing.snapshot().request_s
        return load, self._stood_s - before

    async def pause(self) -> None:
        """Issue no further turns until `next_batch`, and wait for those that are playing.

        Called where the engine gives its GPUs to the trainer between batches.
        """
        self._paused = True
        self._gate.send()
        await self._news.until(lambda: not self._playing or self._error is not None)

    async def close(self) -> None:
        """Stop playing."""
        # A task that finishes a step in this moment may swallow its cancellation.
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _last_rollout(self, pushes: int) -> int:
        """Return the last rollout that may train on turns of the weights that so many pushes
        bring."""
        clock = self._clock
        allowed = self._runtime.settings.max_staleness
        updates = (
            clock.updates_before(self._rollout_id)
            if clock.first is None
            else clock.updates_after(pushes)
        )
        return clock.frozen + updates + allowed

    def _set_limit(self) -> None:
        """Let turns be issued for the batches that today's weights may still play."""
        batches = (
            min(
                self._last_rollout(self._pushes) - self._rollout_id,
                self._runtime.settings.max_staleness,
            )
            + 1
        )
        self._limit = self.ledger["handed_out"] + max(batches, 0) * self._size
        self._gate.send()

    def _must_wait(self) -> bool:
        """Whether the turns in flight and those left over do not all fit into the batches before
        they are too old."""
        for due in set(self._playing.values()):
            left = max(0, bisect_right(self._finished, due, key=_due) - self._size)
            left += sum(other <= due for other in self._playing.values())
            if left > (due - self._rollout_id) * self._size:
                return True
        return False

    async def _play(self, slot: Slot) -> None:
        """Play the slot for as long as the stream runs; `next_batch` raises the first error of any
        slot."""
        try:
            await play(slot, self)
        except Exception as error:
            self._error = self._error or error
        finally:
            self._no_longer_playing(slot)

    async def may_issue(self, slot: Slot) -> bool:
        """Wait until the slot may issue a turn; the stream's end is the only reason not to."""
        if not self._stopped:
            while not self._has_place():
                # A wait for the engine's GPUs is not one for weights.
                await self._gate.until(lambda: not self._paused)
                with self._standing.request():
                    await self._gate.until(lambda: self._paused or self._has_place())
            self.ledger["issued"] += 1
            self._playing[slot.number] = self._last_rollout(self._pushes)
        return not self._stopped

    def _no_longer_playing(self, slot: Slot) -> None:
        self._playing.pop(slot.number, None)
        self._news.send()

    def _has_place(self) -> bool:
        return not self._paused and self.ledger["issued"] < self._limit

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        """Take back the turn that was issued, and end the episode with its last finished turn."""
        self.ledger["issued"] -= 1
        self._gate.send()
        self._recorded.pop(slot.number, None)
        latest = self._latest.get(slot.number)
        if latest is not None and latest.episode is slot.episode:
            latest.segment = replace(latest.segment, stop=StopReason.FAILED)
        self._failed += not isinstance(fault, SlowTurnFault)  # whose number the pushes bound
        self._no_longer_playing(slot)
        self._runtime.count_failure(fault, self._failed)

    async def ask(self, slot: Slot, episode: Episode) -> Generation:
        """Return a response as `_one_version`; raises SlowTurnFault if new weights interrupt it too
        often."""
        pushes = self._pushes
        try:
            return await self._one_version(slot, episode)
        except TurnAbortedError as error:
            if self._pushes == pushes:  # the engine aborts for another reason
                raise
            self._runtime.counters["episodes_too_slow"] += 1
            raise SlowTurnFault(f"{error}; new weights come faster than its response") from error

    async def _one_version(self, slot: Slot, episode: Episode) -> Generation:
        """Return a response by weights of a single version; one that spans an update is requested
        again.

        With `on_update: continue`, such a response is taken; the turn is as old as its oldest
        token.
        """
        runtime = self._runtime
        tries = runtime.settings.max_turn_retries + 1
        for attempt in range(tries):
            generation = await episode.generate(runtime.flags.sampling_params())
            is_numbered = bool(numbered_versions(generation))
            if self._demands.met_by(generation) or (attempt + 1 == tries and not is_numbered):
                self._playing[slot.number] = self._follow_weights(generation, asked_since=False)
                return generation
            if is_numbered:
                runtime.counters["turns_spanning_update"] += 1
            else:  # no engine has told a number yet, and this one may have started a moment ago
                runtime.counters["engine_other_weights"] += 1
                await asyncio.sleep(ABORT_PAUSE_S)
        raise TurnAbortedError(
            f"turn {episode.index} of episode {episode.spec.episode_id} spanned a weight update "
            f"{tries} times (max_turn_retries bounds this)"
        )

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        """Put the turn among the finished ones, by the last rollout that may train on it."""
        version = version_of(turn.generation)
        latest = self._latest.get(slot.number)
        assert version is not None
        due = self._playing[slot.number]
        if latest is not None and latest.due > due:  # the turns of a slot stay in order
            due = latest.due
        segment = episode.segment([turn], episode.stop or StopReason.CUT)
        self._latest[slot.number] = finished = _Finished(
            slot.number, episode, segment, version, due, slot.next_episode
        )
        insort(self._finished, finished, key=_due)
        self.ledger["finished"] += 1
        if self.ledger["finished"] % self._size == 0:
            self._failed = 0
        if episode.stop is None:
            self._recorded[slot.number] = episode.index
        else:
            self._recorded.pop(slot.number, None)
        self._no_longer_playing(slot)  # a batch need not wait until the environment is closed
        self.on_turn()

    async def _ask_version(self) -> None:
        """Learn the engine's weight version from a request of one token; turns in flight may still
        show older ones."""
        params = {**self._runtime.flags.sampling_params(), "max_new_tokens": 1}
        generation = await self._runtime.engine.generate(self._probe, params)
        self._follow_weights(generation, asked_since=True)

    def _follow_weights(self, generation: Generation, *, asked_since: bool) -> int:
        """Learn from a response's versions, and return the last rollout that may train on its
        oldest token."""
        versions = numbered_versions(generation)
        if not versions:
            raise ConfigError(
                "the engine does not say which weights answered (its meta_info has no numeric "
                "weight_version), so staleness cannot be bounded; use an engine that does, or "
                "--rollout-function-path rollout.fixed_turn.generate_rollout"
            )
        if self._runtime.settings.on_update == "continue" and not generation.version_ends:
            raise ConfigError(
                "on_update: continue needs an engine that says which weights wrote each token, "
                "and this one does not (its meta_info has no spans in weight_versions; SGLang "
                "0.5.21 has them); use a newer SGLang, or on_update: abort"
            )
        for version in (min(versions), max(versions)):
            self._clock.learn(self._rollout_id, version, asked_since=asked_since)
        assert self._clock.first is not None
        first = self._clock.first[1]
        if (pushes := max(versions) - first) > self._pushes:
            self._pushes = pushes
            self._set_limit()
        return self._last_rollout(min(versions) - first)

    def _cut(self, waited_s: float) -> Batch:
        """Take a batch of the turns that are due first; those that are too old lose their loss.

        Running episodes get a bootstrap prompt.
        """
        chosen = self._finished[: self._size]
        self._finished = self._finished[self._size :]
        parts: dict[tuple[int, int], list[_Finished]] = {}
        masked = 0
        for finished in chosen:
            staleness = self._clock.staleness(finished.version, self._rollout_id)
            if not 0 <= staleness <= self._runtime.settings.max_staleness:
                finished.segment = replace(finished.segment, turns=(finished.turn.without_loss(),))
                masked += 1
            parts.setdefault((finished.slot, finished.turn.episode_id), []).append(finished)
        ordered = sorted(parts.items(), key=lambda item: item[0][0])
        segments = [
            replace(part[-1].segment, turns=tuple(done.turn for done in part))
            for _, part in ordered
        ]
        return Batch(segments, slots=self._states(), waited_s=waited_s, masked=masked)

    def _states(self) -> list[Mapping[str, Any]]:
        """Every slot as it was after its last turn that was handed out."""
        left = {finished.slot: finished for finished in reversed(self._finished)}
        return [
            saved_slot(first.next_episode, first.episode, first.turn.index)
            if (first := left.get(slot.number)) is not None
            else saved_slot(slot.next_episode, slot.episode, self._recorded.get(slot.number, 0))
            for slot in self._slots
        ]


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
