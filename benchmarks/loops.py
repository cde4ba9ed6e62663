"""Rollout loops that play batches against the simulated engines, and what each of them reaches.

Every loop is called as its trainer calls it; `Trainer.call` says in which order.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.simulated import SimulatedEngines
from benchmarks.workload import env_settings
from rollout import continuous, fixed_turn
from rollout.bridge.framework import Sample
from rollout.data_source import EpisodeSource
from rollout.play.batch import Batch
from rollout.play.runtime import close_runtimes, get_runtime

ANSWER_LIMIT = 1024
TRAINING_S = 1 / 45
"""Seconds of training per turn of a batch and engine: half of what one saturated engine needs to play a turn."""


@dataclass(frozen=True)
class Case:
    """One row: a loop, and the sizes that it runs with."""

    loop: str
    turns: int
    """Turns per batch; for whole episodes, on average."""
    engines: int = 1
    places: int = 96
    """Requests that one engine runs at once; the loops have as many slots."""
    batches: int = 2
    """Measured batches."""
    warm: int = 1
    """Batches before them. Loops that never stop need one more, with an update of the weights before the measuring."""


@dataclass
class Result:
    """What one case reached. Seconds are simulated, except for `host_ms`."""

    case: Case
    turns: int = 0
    tokens: int = 0
    """Answer tokens that were handed out for training."""
    rollout_s: float = 0.0
    """Seconds of the rollouts; those of loops that play on while training runs include training."""
    total_s: float = 0.0
    """Seconds of rollouts and training together."""
    generated: float = 0.0
    """Tokens that the engines generated in this time, also those of aborted answers."""
    place_s: float = 0.0
    host_ms: float = 0.0
    """CPU milliseconds of the rollout process per turn."""
    prompt_tokens: float = 0.0
    saturated: dict[str, float] = field(default_factory=dict)
    staleness: dict[str, float] = field(default_factory=dict)
    """Share of turns by staleness in updates."""

    @property
    def share(self) -> float:
        """Tokens for training per second, as a share of the saturated engines' tokens."""
        return self.tokens / self.rollout_s / self.saturated["tokens_per_s"]

    @property
    def busy(self) -> float:
        """Generated tokens per second, as a share of the saturated engines' tokens."""
        return self.generated / self.rollout_s / self.saturated["tokens_per_s"]

    def row(self) -> dict[str, Any]:
        places = self.rollout_s * self.case.engines * self.case.places
        return {
            **asdict(self.case),
            "played_turns": self.turns,
            "turns_per_s": self.turns / self.rollout_s,
            "share_of_saturated": self.share,
            "share_of_updated": self.share * self.saturated["tokens_per_s"] / self.saturated["updated_tokens_per_s"],
            "share_with_training": self.share * self.rollout_s / self.total_s,
            "generated_share": self.busy,
            "busy_places": self.place_s / places,
            "host_cpu_ms_per_turn": self.host_ms,
            "prompt_tokens": self.prompt_tokens,
            "answer_tokens": self.tokens / self.turns,
            "staleness": self.staleness,
            "saturated_turns_per_s": self.saturated["turns_per_s"],
        }


class Meter:
    """Adds up what a loop does between `start` and `stop`."""

    def __init__(self, case: Case, engines: SimulatedEngines) -> None:
        self.result, self.engines = Result(case), engines
        self.versions: Counter[int] = Counter()
        self._began: tuple[dict[str, float], float] = ({}, 0.0)
        self._cpu = 0.0
        self._prompts = 0

    def start(self) -> None:
        self._began = self.engines.usage(), time.process_time()

    def stop(self) -> None:
        before, cpu = self._began
        after, result = self.engines.usage(), self.result
        self._cpu += time.process_time() - cpu
        result.rollout_s += after["now"] - before["now"]
        result.place_s += after["place_s"] - before["place_s"]
        result.generated += after["tokens"] - before["tokens"]
        result.total_s += after["now"] - before["now"]

    def train(self, seconds: float) -> None:
        """Training for which the rollout waits."""
        before = self.engines.usage()["now"]
        self.engines.sleep(seconds)
        self.result.total_s += self.engines.usage()["now"] - before

    def add(self, samples: Iterable[Sample], rollout_id: int) -> None:
        """Count a batch's turns. The engine's versions begin with 1, which the batch of rollout 0 is trained on."""
        for sample in samples:
            if sample.metadata.get("kind") == "turn":
                self.result.turns += 1
                self.result.tokens += sample.response_length
                self._prompts += len(sample.tokens) - sample.response_length
                self.versions[rollout_id + 1 - int(sample.weight_versions[0])] += 1

    def finish(self) -> Result:
        result = self.result
        result.saturated = self.engines.saturated(result.case.turns)
        result.host_ms = 1e3 * self._cpu / result.turns
        result.prompt_tokens = self._prompts / result.turns
        result.staleness = {str(age): count / result.turns for age, count in sorted(self.versions.items())}
        return result


def make_args(case: Case, port: int, checkpoint: Path, **changes: Any) -> Namespace:
    """slime's flags and the YAML's keys for one case."""
    slots = case.engines * case.places
    values = {
        **{"hf_checkpoint": str(checkpoint), "sglang_router_ip": "127.0.0.1", "sglang_router_port": port},
        **{"rollout_batch_size": case.turns, "n_samples_per_prompt": 1, "global_batch_size": case.turns},
        **{"rollout_max_response_len": ANSWER_LIMIT, "rollout_max_context_len": None, "rollout_seed": 42},
        **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "num_critic_only_steps": 0},
        **{"save": None, "load": None, "debug_rollout_only": True},
        **{"n_env": slots, "env_backend": "inline", "env_workers": 1, "engine": {"timeout_s": 3600.0}},
    }
    return Namespace(**{**values, **env_settings(), **changes})


def training_s(case: Case) -> float:
    """Seconds of training per batch, the same for all loops."""
    return TRAINING_S * case.turns / case.engines


class Trainer:
    """Calls a rollout as slime's scripts do; training takes simulated time."""

    def __init__(self, case: Case, engines: SimulatedEngines, args: Namespace, collect: fixed_turn.Collect) -> None:
        self.case, self.engines, self.args, self.collect = case, engines, args, collect
        self.source, self.meter = EpisodeSource(args), Meter(case, engines)
        self.train_s = training_s(case)

    async def rollout(self, rollout_id: int) -> list[Sample]:
        output = await fixed_turn.collect_or_draw(self.args, rollout_id, self.source, self.collect)
        return [sample for group in output.samples for sample in group]

    async def one_after_the_other(self) -> None:
        """The order of train.py with a rollout that stops while training runs."""
        for k in range(self.case.warm + self.case.batches):
            await asyncio.to_thread(self.meter.start)
            samples = await self.rollout(k)
            if k >= self.case.warm:
                await asyncio.to_thread(self.meter.stop)
                self.meter.add(samples, k)
                await asyncio.to_thread(self.meter.train, self.train_s)
            await asyncio.to_thread(self.engines.update)

    async def overlapping(self) -> None:
        """The order of train.py with a rollout that plays on while training runs."""
        for k in range(self.case.warm + self.case.batches + 1):
            samples = await self.rollout(k)
            await self._count(k, samples)
            await asyncio.to_thread(self.engines.sleep, self.train_s)
            await asyncio.to_thread(self.engines.update)

    async def ahead(self) -> None:
        """The order of train_async.py: batch k + 1 is asked for before batch k is trained on."""
        following = asyncio.create_task(self.rollout(0))
        for k in range(self.case.warm + self.case.batches + 1):
            samples = await following
            await self._count(k, samples)
            if k == self.case.warm + self.case.batches:
                return
            following = asyncio.create_task(self.rollout(k + 1))
            await asyncio.to_thread(self.engines.sleep, self.train_s)
            await asyncio.wait([following])
            await asyncio.to_thread(self.engines.update)

    async def _count(self, rollout_id: int, samples: list[Sample]) -> None:
        """Measure from the end of one batch to the end of another, with one update of the weights per batch."""
        if rollout_id > self.case.warm:
            self.meter.add(samples, rollout_id)
        if rollout_id == self.case.warm:
            await asyncio.to_thread(self.meter.start)
        if rollout_id == self.case.warm + self.case.batches:
            await asyncio.to_thread(self.meter.stop)


async def lock_step(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Verlog's order: all environments wait for all answers, then all of them step."""
    runtime = await get_runtime(args)
    await source.open_slots(runtime)
    params, segments = runtime.flags.sampling_params(), []
    for _ in range(args.rollout_batch_size // len(source.slots)):
        episodes = [await slot.live() for slot in source.slots]
        generations = await asyncio.gather(*(episode.generate(params) for episode in episodes))
        for slot, episode, generation in zip(source.slots, episodes, generations, strict=True):
            turn = await episode.step(generation)
            segments.append(episode.segment([turn], episode.stop or fixed_turn.StopReason.CUT))
            if episode.stop is not None:
                await slot.leave()
    return Batch(segments)


Order = Callable[[Trainer], Awaitable[None]]
LOOPS: dict[str, tuple[str, fixed_turn.Collect, Order, dict[str, Any]]] = {
    "lock-step": ("as Verlog", lock_step, Trainer.one_after_the_other, {}),
    "fixed": ("fixed-turn", fixed_turn.collect, Trainer.one_after_the_other, {}),
    "per-env": ("fixed-turn, per_env", fixed_turn.collect, Trainer.one_after_the_other, {"turn_quota": "per_env"}),
    "continuous": ("continuous, train.py", continuous.collect, Trainer.overlapping, {"max_staleness": 1}),
    "continuous-async": ("continuous, train_async.py", continuous.collect, Trainer.ahead, {"max_staleness": 2}),
}
"""Name on the command line: label, function, order of calls, YAML keys."""


def run_case(case: Case, checkpoint: Path, vocabulary: Path) -> Result:
    """Play one case of one of `LOOPS`."""
    _, collect, order, keys = LOOPS[case.loop]

    async def play(engines: SimulatedEngines) -> Result:
        trainer = Trainer(case, engines, make_args(case, engines.port, checkpoint, **keys), collect)
        try:
            await order(trainer)
            return await asyncio.to_thread(trainer.meter.finish)
        finally:
            await close_runtimes()

    with SimulatedEngines(vocabulary, case.engines, case.places) as engines, engines.sleeping():
        return asyncio.run(play(engines))
