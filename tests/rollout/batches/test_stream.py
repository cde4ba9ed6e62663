"""No turn older than `max_staleness` is trained on, however slow its step is: random schedules and
a real hang."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.batches.stream import Stream
from rollout.errors import EnvironmentFault
from rollout.play.clock import WeightClock, numbered_versions, version_of
from rollout.play.loop import Slot
from rollout.spec import EnvSpec, EpisodeSpec
from rollout.turn import Batch, FinishReason, Generation, Prompt, Segment, StopReason, Turn
from rollout.workers.utilization import UNUSED
from tests.cases import pairs
from tests.fixtures.playing import faults_in, no_gap_and_none_twice, turns_of
from tests.fixtures.trainer import TURNS, Trainer
from tests.fixtures.virtual_time import run_in_virtual_time

BATCHES = 9


@dataclass(frozen=True)
class Schedule:
    """How long everything takes, and what fails; one time unit is the mean answer of the engine."""

    seed: int
    size: int = 6
    slots: int = 4
    max_staleness: int = 1
    stale_turns: str = "wait"
    ahead: bool = False
    """The order of calls in train_async.py, otherwise that of train.py."""
    interval: int = 1
    start: int = 0
    frozen: int = 0
    train: float = 5.0
    slow_share: float = 0.1
    slow: float = 100.0
    fault_share: float = 0.0
    on_update: str = "abort"
    """What a push does to the answers in flight: `abort`, `continue`, or `finish` with the weights
    they began with."""
    drawn: range = range(0)
    """Rollouts whose batches the critic's warm-up draws."""
    closing: float = 0.0
    """How long an environment takes to close."""
    leaves: bool = False
    """Whether the stream pauses after each batch, because the engine's GPUs go to the trainer."""


@dataclass
class World:
    """A trainer and an engine; `updates` are the actor updates in the weights of each version."""

    plan: Schedule
    random: random.Random = field(init=False)
    version: int = 1
    updates: dict[int, int] = field(init=False)
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.plan.seed)
        self.updates = {1: self.trained(self.plan.start)}

    def trained(self, rollout_id: int) -> int:
        """Actor updates before this rollout is trained on."""
        return max(0, rollout_id - self.plan.frozen)

    async def generate(self, *_: Any) -> Generation:
        """An answer; the version is the one that produced it."""
        while True:
            version = self.version
            await asyncio.sleep(self.random.expovariate(1.0))
            if version == self.version or self.plan.on_update in ("continue", "finish"):
                newest = version if self.plan.on_update == "finish" else self.version
                versions = tuple(map(str, range(version, newest + 1)))
                ends = tuple(range(1, len(versions) + 1))
                tokens, log_probs = [1] * len(ends), [-0.5] * len(ends)
                return Generation(
                    tokens, log_probs, "x", FinishReason.STOP, versions, version_ends=ends
                )

    def push(self, after: int) -> None:
        self.version += 1
        self.updates[self.version] = self.trained(after + 1)

    async def episode(self, number: int) -> Episode:
        if self.random.random() < self.plan.fault_share:
            raise EnvironmentFault("it did not start")
        return Episode(self, number)


class Episode:
    """A game of random length with random pauses."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.spec = EpisodeSpec(number, "count", EnvSpec("none", {}, {}))
        self.length, self.index = world.random.randint(1, 12), 0
        self.answers: list[tuple[int, ...]] = []
        self.stepped: list[bool] = []
        self.digests = ["d"]
        self.stop: StopReason | None = None

    async def generate(self, params: Any) -> Generation:
        return await self.world.generate()

    async def step(self, generation: Generation, engine_s: float) -> Turn:
        plan, draw = self.world.plan, self.world.random
        pause = (
            plan.slow * draw.random() if draw.random() < plan.slow_share else 0.1 * draw.random()
        )
        await asyncio.sleep(pause)
        if draw.random() < plan.fault_share:
            raise EnvironmentFault("the worker died too often")
        self.answers.append((1,))
        self.stepped.append(True)
        self.digests.append("d")
        over = self.index + 1 == self.length
        number = self.spec.episode_id
        turn = Turn(number, self.index, Prompt([1]), generation, terminated=over)
        self.index += 1
        await asyncio.sleep(0.01 * draw.random())
        self.stop = StopReason.TERMINATED if over else None
        return turn

    def segment(self, turns: list[Turn], stop: StopReason) -> Segment:
        return Segment(
            "count", tuple(turns), None if stop.is_end else Prompt([1]), stop, 0.0, self.index
        )

    async def close(self) -> None:
        await asyncio.sleep(self.world.plan.closing)


async def play(plan: Schedule) -> tuple[World, list[Batch], WeightClock]:
    """All batches, in slime's order of calls."""
    world = World(plan)
    on_update = "continue" if plan.on_update == "continue" else "abort"
    keys = {"max_turn_retries": 8, "max_episode_failures_per_batch": 10**6, "on_update": on_update}
    runtime: Any = SimpleNamespace(
        settings=SimpleNamespace(
            max_staleness=plan.max_staleness, stale_turns=plan.stale_turns, **keys
        ),
        flags=SimpleNamespace(sampling_params=dict),
        encoder=SimpleNamespace(end_of_turn_ids=[1]),
        engine=SimpleNamespace(generate=world.generate),
        engine_loads=SimpleNamespace(start=lambda: None, take=dict),
        counters=world.counters,
        players=None,
        usage=lambda: [UNUSED],
        count_failure=lambda fault, failed: world.counters.update(["episodes_failed"]),
    )
    slots: Any = [Slot(world.episode, k, plan.slots) for k in range(plan.slots)]
    clock = WeightClock(plan.interval, plan.frozen)
    stream = Stream(runtime, slots, plan.size, clock)
    cuts = []

    async def collect(rollout_id: int) -> None:
        if rollout_id in plan.drawn:
            stream.skip(rollout_id)
            return
        cuts.append(await stream.next_batch(rollout_id))
        if plan.leaves:
            await stream.pause()

    last = plan.start + BATCHES
    following = asyncio.create_task(collect(plan.start))
    for rollout_id in range(plan.start, last):
        await following
        following = asyncio.create_task(collect(rollout_id + 1)) if plan.ahead else following
        await asyncio.sleep(plan.train * world.random.random())
        if not plan.ahead:
            world.push(rollout_id)
            following = asyncio.create_task(collect(rollout_id + 1))
        elif (rollout_id + 1) % plan.interval == 0:
            await following
            world.push(rollout_id)
    await following
    await stream.close()
    return world, cuts, clock


SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 10**6),
    size=st.integers(1, 12),
    slots=st.integers(1, 16),
    stale_turns=st.sampled_from(["wait", "mask"]),
    ahead=st.booleans(),
    interval=st.integers(1, 3),
    start=st.integers(0, 7),
    frozen=st.sampled_from([0, 0, 3, 9]),
    train=st.sampled_from([0.0, 1.0, 20.0]),
    slow_share=st.sampled_from([0.0, 0.05, 0.5]),
    slow=st.sampled_from([10.0, 1000.0]),
    fault_share=st.sampled_from([0.0, 0.1]),
    on_update=st.sampled_from(["abort", "continue", "finish"]),
    leaves=st.booleans(),
)


@settings(deadline=None, max_examples=100)
@given(plan=SCHEDULES, data=st.data())
def test_in_any_schedule_no_turn_is_trained_too_old_lost_or_handed_out_twice(
    plan: Schedule, data: st.DataObject
) -> None:
    least = plan.interval if plan.ahead else 1
    plan = Schedule(
        **{**vars(plan), "max_staleness": data.draw(st.integers(least, 4), "max_staleness")}
    )
    world, cuts, clock = run_in_virtual_time(play(plan))
    assert len(cuts) == BATCHES + 1
    played: Counter[int] = Counter()
    ended: set[int] = set()
    for rollout_id, cut in enumerate(cuts, plan.start):
        turns = [turn for segment in cut.segments for turn in segment.turns]
        assert len(turns) == plan.size
        masked = [not turn.generation.trained for turn in turns]
        for segment in cut.segments:
            for turn in segment.turns:
                assert turn.index == played[turn.episode_id], (
                    "an episode's turns come in order, without a gap"
                )
                played[turn.episode_id] += 1
                version = int(turn.generation.weight_versions[0])
                age = world.trained(rollout_id) - world.updates[version]
                assert clock.staleness(version, rollout_id) == age
                assert turn.generation.trained == (age <= plan.max_staleness)
                assert plan.on_update == "continue" or len(turn.generation.weight_versions) == 1
            if segment.stop is not StopReason.CUT:
                ended.add(segment.turns[0].episode_id)
        assert cut.masked == sum(masked)
        assert cut.masked == 0 if plan.stale_turns == "wait" else cut.waited_s == 0
        going_on = {e: n for e, n in played.items() if e not in ended}
        check_state(cut, going_on, ended, world.counters["episodes_failed"])


def check_state(cut: Batch, going_on: dict[int, int], ended: set[int], failures: int) -> None:
    """A run that resumes after this batch continues each episode with the turn after its last one
    in the batch."""
    saved = {
        s["episode"]["spec"]["episode_id"]: len(s["episode"]["answers"])
        for s in cut.slots
        if s["episode"]
    }
    assert not saved.keys() & ended
    assert {e: n for e, n in saved.items() if n} == {
        e: n for e, n in going_on.items() if e in saved
    }
    assert len(going_on.keys() - saved.keys()) <= failures, "only failed episodes do not go on"
    following = [slot["next_episode"] for slot in cut.slots]
    assert all(e < following[e % len(following)] for e in going_on | saved)


@pytest.mark.parametrize("ahead", [False, True])
def test_one_very_slow_step_is_waited_for_or_loses_its_loss(ahead: bool) -> None:
    plan = {"slow_share": 0.05, "slow": 60.0, "ahead": ahead, "max_staleness": 2, "slots": 8}
    waited, masked = 0.0, 0
    for seed in range(8):
        _, waits, _ = run_in_virtual_time(play(Schedule(seed, **plan)))
        _, masks, _ = run_in_virtual_time(play(Schedule(seed, stale_turns="mask", **plan)))
        waited, masked = (
            waited + sum(cut.waited_s for cut in waits),
            masked + sum(cut.masked for cut in masks),
        )
    assert waited > 50 and masked > 2


@pytest.mark.parametrize("fault_share", [0.0, 0.2])
def test_a_batch_does_not_wait_until_an_environment_is_closed(fault_share: float) -> None:
    for seed in range(4):
        plan = Schedule(seed, slots=12, slow_share=0.0, closing=1000.0, fault_share=fault_share)
        _, cuts, _ = run_in_virtual_time(play(plan))
        assert all(cut.waited_s < 100 for cut in cuts)


@pytest.mark.parametrize(("mode", "ahead"), pairs(["wait", "mask"], [False, True]))
async def test_a_step_that_hangs_is_trained_in_time_or_without_loss(
    tmp_path: Path, mode: str, ahead: bool
) -> None:
    """Its worker is replaced and the episode replayed; a run that resumes in the middle continues
    without a gap."""
    limit = 2 if ahead else 1
    keys: dict[str, Any] = {
        "env_backend": "process",
        "env_workers": 2,
        "env_step_timeout_s": 1.5,
        "env": {"max_length": 40, "hang_at": 2, "once": str(tmp_path / "hung")},
        "max_staleness": limit,
        "stale_turns": mode,
    }
    # Without waiting for the step, all batches could be over before its time limit.
    train_s = 0.5 if mode == "mask" else 0.02
    before, after = Trainer(tmp_path, train_s, **keys), Trainer(tmp_path, **keys)
    await before.run(range(6), ahead=ahead)
    for output, ages in zip(before.outputs, before.staleness, strict=True):
        trained = [any(turn.loss_mask) for turn in turns_of(output)]
        assert trained == [age <= limit for age in ages]
        assert output.metrics["rollout/turns_masked_as_stale"] == trained.count(False)
        assert mode == "mask" or all(trained)
    assert faults_in(before.outputs, "env_timeout") >= 1
    no_gap_and_none_twice(before.places())
    await after.run(range(3, 5), load=2, ahead=ahead)
    no_gap_and_none_twice([*before.places()[: 3 * TURNS], *after.places()])


@pytest.mark.parametrize(
    ("versions", "numbers"),
    [(("3", "4"), [3, 4]), (("default", "7"), []), (("1" * 40,), []), ((), [])],
)
def test_versions_count_only_if_the_engine_numbers_all_of_them(
    versions: tuple[str, ...], numbers: list[int]
) -> None:
    """Otherwise the oldest token of a response that spans an update would be older than its version
    says."""
    generation = Generation(
        [1, 2], [0.0, 0.0], "", FinishReason.STOP, versions, version_ends=(1, 2)[: len(versions)]
    )
    assert numbered_versions(generation) == numbers
    assert version_of(generation) == (numbers[0] if numbers else None)


def test_batches_that_the_warm_up_draws_do_not_hide_how_often_weights_are_pushed() -> None:
    plan = Schedule(
        3,
        size=24,
        max_staleness=2,
        ahead=True,
        interval=2,
        frozen=4,
        slow_share=0.0,
        drawn=range(1, 4),
        train=5.0,
    )
    _, cuts, clock = run_in_virtual_time(play(plan))
    assert clock.after_each is False and [cut.masked for cut in cuts] == [0] * (
        BATCHES + 1 - len(plan.drawn)
    )
