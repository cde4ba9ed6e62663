"""Rollout loops that play batches against the simulated engines, and what each of them reaches.

Every loop is called in the order in which its trainer calls it.
"""

import asyncio
import json
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import parts
from benchmarks.engine_server import Host
from benchmarks.engines import SimulatedEngines
from rollout import continuous, fixed_turn
from rollout.bridge.framework import Sample
from rollout.data_source import EpisodeSource
from rollout.play import engine
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.players.manager import PlayerProcesses
from rollout.turn import Batch
from tests.fixtures.rollout_args import COUNTING

RULES = Path(__file__).with_name("rules.j2")
WORDS = (
    "wall door key ball box red green blue grey step left right forward and the of at now next then see go turn carry "
    "open room before after because near far behind toward path closed first second again still goal"
)
ENDS = (".\nACTION: left", ".\nACTION: right")
MEAN_EPISODE = 16  # turns of an episode on average
ANSWER_LIMIT = 7  # a response's tokens are at most so many times the mean
TRAINING_S = 1 / 45
"""Seconds of training per turn of 150 tokens and engine: half of what one saturated engine needs to play a turn."""


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
    processes: int = 1
    """Processes that play (`rollout_processes`)."""
    answer_tokens: float = 150.0
    """Mean tokens of a response."""
    max_staleness: int | None = None
    """Instead of the loop's own in `LOOPS`."""
    parts: bool = False
    """Time the parts of a turn (`benchmarks/parts.py`), which adds a few percent to what it costs."""

    @property
    def on_update(self) -> str:
        """SGLang's mode of the pause for new weights."""
        return "retract" if self.loop == "continue" else "abort"


def episode_length(seed: int) -> int:
    """Draw the turns of an episode: log-normal, `MEAN_EPISODE` on average, at most 64, assumed for short games."""
    return min(64, max(2, round(random.Random(seed).lognormvariate(2.59, 0.6))))


def save_vocabulary(checkpoint: Path, path: Path) -> None:
    """Write the tokens of responses for `benchmarks.engine_server`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    words = [(ids[0], f" {word}") for word in WORDS.split() if len(ids := encode(f" {word}")) == 1]
    ends = [([*encode(end), tokenizer.eos_token_id], end + tokenizer.eos_token) for end in ENDS]
    begin = encode("THINK:"), "THINK:"
    path.write_text(json.dumps({"begin": begin, "words": words, "ends": ends}), encoding="utf-8")


def make_engines(case: Case, vocabulary: Path) -> SimulatedEngines:
    """Return the engines of a case, which a context starts."""
    return SimulatedEngines(vocabulary, case.engines, case.places, case.answer_tokens)


class Meter:
    """Adds up what a loop does between `start` and `stop`. Seconds are simulated, except for the host's CPU time."""

    def __init__(self, case: Case, engines: SimulatedEngines) -> None:
        self.case, self.engines = case, engines
        self._versions: Counter[int] = Counter()
        self._turns = self._tokens = self._prompt_tokens = 0
        self._seconds = self._cpu_s = self._players_s = 0.0
        self._pending = 0.0
        """Turns that wait for their batch when the measuring ends, minus those when it began."""
        self.players: list[Host] = []
        """The processes that play, if this one does not."""

    def start(self, pending: float = 0.0) -> None:
        self._add_clocks(-1)
        self._pending -= pending
        parts.SECONDS.clear()

    def stop(self, pending: float = 0.0) -> None:
        self._add_clocks(1)
        self._pending += pending

    def _add_clocks(self, sign: int) -> None:
        self._seconds += sign * self.engines.now()
        self._cpu_s += sign * time.process_time()
        self._players_s += sign * sum(player.cpu_s() for player in self.players)

    def add(self, samples: Iterable[Sample], rollout_id: int) -> None:
        """Count a batch's turns. The engine's versions begin with 1, which the batch of rollout 0 is trained on."""
        for sample in samples:
            if sample.metadata.get("kind") == "turn":
                self._turns += 1
                self._tokens += sample.response_length
                self._prompt_tokens += len(sample.tokens) - sample.response_length
                self._versions[rollout_id + 1 - int(sample.weight_versions[0])] += 1

    def row(self) -> dict[str, Any]:
        """Summarize the case. `staleness` has the share of turns by their age in updates."""
        turns = self._turns + self._pending
        saturated = self.engines.saturated(round(turns / self.case.batches), self.case.on_update)
        speed = self._tokens / self._turns * turns / self._seconds
        return {
            **asdict(self.case),
            "played_turns": self._turns,
            "turns_per_update": turns / self.case.batches,
            "turns_per_s": turns / self._seconds,
            "share_of_saturated": speed / saturated["tokens_per_s"],
            "share_of_updated": speed / saturated["updated_tokens_per_s"],
            "host_cpu_ms_per_turn": 1e3 * self._cpu_s / turns,
            "players_cpu_ms_per_turn": 1e3 * self._players_s / turns,
            "host_busy_share": self._cpu_s / self._seconds,
            "players_busy_share": self._players_s / self._seconds / max(len(self.players), 1),
            "parts_ms_per_turn": {name: 1e3 * seconds / turns for name, seconds in parts.SECONDS.items()},
            "prompt_tokens": self._prompt_tokens / self._turns,
            "answer_tokens": self._tokens / self._turns,
            "staleness": {str(age): count / self._turns for age, count in sorted(self._versions.items())},
            "saturated_turns_per_s": saturated["turns_per_s"],
        }


def make_args(case: Case, port: int, checkpoint: Path, **changes: Any) -> Namespace:
    """Build slime's flags and the YAML's keys for one case: a counting game with long rules and observations."""
    slots = case.engines * case.places
    game = {"length_of": "benchmarks.loops.episode_length", "prompt_template": str(RULES), "show": 1000}
    values = {
        **{"hf_checkpoint": str(checkpoint), "sglang_router_ip": "127.0.0.1", "sglang_router_port": port},
        **{"rollout_batch_size": case.turns, "n_samples_per_prompt": 1, "global_batch_size": case.turns},
        **{"rollout_max_response_len": round(ANSWER_LIMIT * case.answer_tokens)},
        **{"rollout_max_context_len": None, "rollout_seed": 42},
        **{"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "num_critic_only_steps": 0},
        **{"save": None, "load": None, "debug_rollout_only": True},
        **{"n_env": slots, "env_backend": "inline", "env_workers": 1, "engine": {"timeout_s": 3600.0}},
        **{"rollout_interaction_env_path": COUNTING, "tasks": ["count"], "env": game},
        "rollout_processes": case.processes,
    }
    return Namespace(**{**values, **changes})


class Trainer:
    """Calls a rollout as slime's scripts do; training takes simulated time."""

    def __init__(self, case: Case, engines: SimulatedEngines, args: Namespace, collect: fixed_turn.Collect) -> None:
        self.case, self.engines, self.args, self.collect = case, engines, args, collect
        self.source, self.meter = EpisodeSource(args), Meter(case, engines)
        self.train_s = TRAINING_S * case.turns / case.engines * case.answer_tokens / 150
        self._pending = 0.0
        """Turns that were finished and not handed out when the last batch was."""

    async def start(self) -> None:
        """Start the players before anything is measured."""
        players = (await get_runtime(self.args)).players
        if isinstance(players, PlayerProcesses):
            pids = await players.start()
            self.meter.players = [Host(pid) for pid in pids]
            await asyncio.to_thread(self.engines.count_players, pids)

    async def rollout(self, rollout_id: int) -> list[Sample]:
        output = await fixed_turn.collect_or_draw(self.args, rollout_id, self.source, self.collect)
        self._pending = (output.metrics or {}).get("rollout/turns_pending", 0.0)
        return [sample for group in output.samples for sample in group]

    async def one_after_the_other(self) -> None:
        """Follow train.py with a rollout that stops while training runs."""
        for k in range(self.case.warm + self.case.batches):
            if k >= self.case.warm:
                await asyncio.to_thread(self.meter.start)
            samples = await self.rollout(k)
            if k >= self.case.warm:
                await asyncio.to_thread(self.meter.stop)
                self.meter.add(samples, k)
            await asyncio.to_thread(self.engines.update)

    async def overlapping(self) -> None:
        """Follow train.py with a rollout that plays on while training runs."""
        for k in range(self.case.warm + self.case.batches + 1):
            await self._count(k, await self.rollout(k))
            await asyncio.to_thread(self.engines.sleep, self.train_s)
            await asyncio.to_thread(self.engines.update, self.case.on_update)

    async def ahead(self) -> None:
        """Follow train_async.py: batch k + 1 is asked for before batch k is trained on."""
        following = asyncio.create_task(self.rollout(0))
        for k in range(self.case.warm + self.case.batches + 1):
            await self._count(k, await following)
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
            await asyncio.to_thread(self.meter.start, self._pending)
        if rollout_id == self.case.warm + self.case.batches:
            await asyncio.to_thread(self.meter.stop, self._pending)


async def lock_step(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Verlog's order: all environments wait for all responses, then all of them step."""
    runtime = await get_runtime(args)
    await fixed_turn.open_slots(runtime, source)
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
    "continue": (
        "continuous, train.py, continue",
        *(continuous.collect, Trainer.overlapping),
        {"max_staleness": 2, "on_update": "continue"},
    ),
    "continuous-async": ("continuous, train_async.py", continuous.collect, Trainer.ahead, {"max_staleness": 2}),
}
"""Name on the command line: label, function, order of calls, YAML keys."""


def run_case(case: Case, checkpoint: Path, vocabulary: Path) -> dict[str, Any]:
    """Play one case of one of `LOOPS`."""
    _, collect, order, keys = LOOPS[case.loop]
    if case.max_staleness is not None:
        keys = {**keys, "max_staleness": case.max_staleness}
    if case.loop in ("per-env", "lock-step"):  # they need a whole number of turns per slot
        slots = case.engines * case.places
        case = replace(case, turns=max(1, round(case.turns / slots)) * slots)

    async def play(engines: SimulatedEngines) -> dict[str, Any]:
        trainer = Trainer(case, engines, make_args(case, engines.port, checkpoint, **keys), collect)
        try:
            await trainer.start()
            await order(trainer)
            return await asyncio.to_thread(trainer.meter.row)  # before the players end, and the engines with them
        finally:
            await close_runtimes()

    def kept_body(*arguments: Any) -> bytes:
        engines.bodies.append(write_body(*arguments))
        return engines.bodies[-1]

    write_body, engines = engine.request_body, make_engines(case, vocabulary)
    timed = parts.timed() if case.parts else nullcontext()
    with engines, engines.sleeping():
        with mock.patch.object(engine, "request_body", kept_body), timed:
            row = asyncio.run(play(engines))
        bodies = engines.bodies if case.processes == 1 else ()  # simulated engines end with the players
        row["bare_cpu_ms_per_turn"] = asyncio.run(parts.bare_client(engines.port, bodies, case.places))
        return row
