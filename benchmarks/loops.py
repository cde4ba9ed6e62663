"""Rollout loops that play batches against the simulated engines, and what each of them reaches.

Every loop is called in the order in which its trainer calls it.
"""

import asyncio
import math
import random
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.engine_server import Host
from benchmarks.engines import SimulatedEngines
from rollout import continuous, fixed_turn
from rollout.bridge.framework import Sample, run
from rollout.bridge.sample import flatten
from rollout.data_source import EpisodeSource
from rollout.play import engine
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.players.manager import PlayerProcesses
from rollout.turn import Batch
from tests.fixtures.rollout_args import COUNTING
from tests.fixtures.stand_ins import allow_absent_packages

RULES = Path(__file__).with_name("rules.j2")
WORDS = (
    "wall door key ball box red green blue grey step left right forward and the of at now next "
    "then see go turn carry open room before after because near far behind toward path closed "
    "first second again still goal"
)
ENDS = (".\nACTION: left", ".\nACTION: right")
MEAN_EPISODE = 16  # turns of an episode on average
ANSWER_LIMIT = 7  # a response's tokens are at most so many times the mean
TRAINING_S = 1 / 45
"""Seconds of training per turn of 150 tokens and engine: half of what one saturated engine needs to
play a turn."""
WARM_TURNS, MEASURED_TURNS = 2, 4
"""Turns per place before the measuring and during it, at least, for loops that always have turns in
flight."""
BARE_REQUESTS = 2048
"""Requests that a bare client repeats."""


@dataclass(frozen=True)
class Case:
    """One row: a loop, and the sizes that it runs with."""

    loop: str
    turns: int
    """Turns per batch; for whole episodes, on average."""
    engines: int = 1
    processes: int = 1
    """Processes that play (`rollout_processes`)."""
    places: int = 96
    """Requests that one engine runs at once; the loops have as many slots."""
    batches: int = 2
    """Measured batches."""
    warm: int = 1
    """Batches before them."""
    answer_tokens: float = 150.0
    """Mean tokens of a response."""
    max_staleness: int | None = None
    """Instead of the loop's own in `LOOPS`."""

    @property
    def slots(self) -> int:
        return self.engines * self.places

    @property
    def on_update(self) -> str:
        """SGLang's mode of the pause for new weights."""
        return "retract" if self.loop == "continue" else "abort"


def episode_length(seed: int) -> int:
    """Draw the turns of an episode: log-normal, `MEAN_EPISODE` on average, at most 64, assumed for
    short games."""
    return min(64, max(2, round(random.Random(seed).lognormvariate(2.59, 0.6))))


def read_vocabulary(checkpoint: Path) -> dict[str, Any]:
    """Tokenize the parts of which `benchmarks.engine_server` makes responses: pairs of ids and
    text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    words = []
    for word in WORDS.split():
        ids = encode(f" {word}")
        if len(ids) == 1:
            words.append((ids[0], f" {word}"))
    ends = [([*encode(end), tokenizer.eos_token_id], end + tokenizer.eos_token) for end in ENDS]
    return {"begin": (encode("THINK:"), "THINK:"), "words": words, "ends": ends}


def make_engines(case: Case, checkpoint: Path) -> SimulatedEngines:
    """Return the engines of a case, which a context starts."""
    return SimulatedEngines(
        read_vocabulary(checkpoint), case.engines, case.places, case.answer_tokens
    )


def make_args(case: Case, port: int, checkpoint: Path, **changes: Any) -> Namespace:
    """Build slime's flags and the YAML's keys for one case: a counting game with long rules and
    observations."""
    game = {
        "length_of": "benchmarks.loops.episode_length",
        "prompt_template": str(RULES),
        "show": 1000,
    }
    flags = {
        "hf_checkpoint": str(checkpoint),
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "rollout_batch_size": case.turns,
        "n_samples_per_prompt": 1,
        "global_batch_size": case.turns,
        "rollout_max_response_len": round(ANSWER_LIMIT * case.answer_tokens),
        "rollout_max_context_len": None,
        "rollout_seed": 42,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "num_critic_only_steps": 0,
        "save": None,
        "load": None,
        "debug_rollout_only": True,
    }
    keys = {
        "n_env": case.slots,
        "env_backend": "inline",
        "env_workers": 1,
        "engine": {"timeout_s": 3600.0},
        "rollout_interaction_env_path": COUNTING,
        "tasks": ["count"],
        "env": game,
        "rollout_processes": case.processes,
    }
    return Namespace(**{**flags, **keys, **changes})


ABSENT = (
    "custom_rm_path",
    "rm_type",
    "rm_url",
    "rollout_stop",
    "rollout_stop_token_ids",
    "rollout_sample_hook_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
OFF = (
    "mask_offpolicy_in_partial_rollout",
    "rollout_skip_special_tokens",
    "use_distributed_post",
    "group_rm",
    "ci_test",
)


def slime_flags(case: Case) -> dict[str, Any]:
    """Build the flags that slime's loop reads beside ours; batches are counted in episodes."""
    episodes = max(1, round(case.turns / MEAN_EPISODE))
    begun = {
        "slime": episodes,
        "slime-partial": episodes + case.slots,
        "slime-double": 2 * episodes,
    }
    return {
        **dict.fromkeys(ABSENT),
        **dict.fromkeys(OFF, False),
        "rollout_batch_size": episodes,
        "global_batch_size": episodes,
        "over_sampling_batch_size": begun[case.loop],
        "partial_rollout": case.loop != "slime",
        "rollout_num_engines": case.engines,
        "sglang_dp_size": 1,
        "sglang_server_concurrency": 512,
        "rollout_global_dataset": True,
        "custom_generate_function_path": "rollout.generate.generate",
    }


class Meter:
    """Adds up what a loop does between `start` and `stop`. Seconds are simulated, except for the
    host's CPU time."""

    def __init__(self, case: Case, engines: SimulatedEngines) -> None:
        self.case = case
        self.engines = engines
        self.players: list[Host] = []
        """The processes that play, if this one does not."""
        self._ages: Counter[int] = Counter()
        self._tokens = 0
        self._seconds = self._cpu_s = self._players_s = 0.0
        self._pending = 0.0
        """Turns that wait for their batch when the measuring ends, minus those when it began."""

    def start(self, pending: float = 0.0) -> None:
        self._add(-1, pending)

    def stop(self, pending: float = 0.0) -> None:
        self._add(1, pending)

    def _add(self, sign: int, pending: float) -> None:
        self._seconds += sign * self.engines.now()
        self._cpu_s += sign * time.process_time()
        self._players_s += sign * sum(player.cpu_s() for player in self.players)
        self._pending += sign * pending

    def count(self, samples: Iterable[Sample], rollout_id: int) -> None:
        """Count a batch's turns. The engine's versions begin with 1, which the batch of rollout 0
        is trained on."""
        for sample in samples:
            if sample.metadata.get("kind") == "turn":
                self._tokens += sample.response_length
                self._ages[rollout_id + 1 - int(sample.weight_versions[0])] += 1

    def row(self) -> dict[str, Any]:
        """Summarize the case. `staleness` has the share of turns by their age in updates."""
        counted = self._ages.total()
        turns = counted + self._pending
        saturated = self.engines.saturated(round(turns / self.case.batches), self.case.on_update)
        tokens_per_s = self._tokens / counted * turns / self._seconds
        return {
            **asdict(self.case),
            "played_turns": counted,
            "turns_per_s": turns / self._seconds,
            "share_of_saturated": tokens_per_s / saturated["tokens_per_s"],
            "share_of_updated": tokens_per_s / saturated["updated_tokens_per_s"],
            "host_cpu_ms_per_turn": 1e3 * self._cpu_s / turns,
            "players_cpu_ms_per_turn": 1e3 * self._players_s / turns,
            "host_busy_share": self._cpu_s / self._seconds,
            "players_busy_share": self._players_s / self._seconds / max(len(self.players), 1),
            "staleness": {str(age): count / counted for age, count in sorted(self._ages.items())},
        }


Generate = Callable[[Namespace, int, EpisodeSource], Any]
"""slime's rollout function."""


class Trainer:
    """Calls a rollout function as slime's scripts do; training takes simulated time."""

    def __init__(
        self, case: Case, engines: SimulatedEngines, args: Namespace, generate: Generate
    ) -> None:
        self.case = case
        self.engines = engines
        self.args = args
        self.generate = generate
        self.source = EpisodeSource(args)
        self.meter = Meter(case, engines)
        self.train_s = TRAINING_S * case.turns / case.engines * case.answer_tokens / 150
        self.last = case.warm + case.batches

    def one_after_the_other(self) -> None:
        """Follow train.py with a rollout that stops while training runs."""
        for k in range(self.last):
            if k >= self.case.warm:
                self.meter.start()
            output = self.generate(self.args, k, self.source)
            if k >= self.case.warm:
                self.meter.stop()
                self._count(k, output)
            self.engines.update()

    def overlapping(self) -> None:
        """Follow train.py with a rollout that plays on while training runs."""
        for k in range(self.last + 1):
            output = self.generate(self.args, k, self.source)
            self._measure(k, output)
            self.engines.sleep(self.train_s)
            self.engines.update(self.case.on_update)

    def ahead(self) -> None:
        """Follow train_async.py: batch k + 1 is asked for before batch k is trained on."""
        with ThreadPoolExecutor(1) as thread:
            following = thread.submit(self.generate, self.args, 0, self.source)
            for k in range(self.last + 1):
                output = following.result()
                self._measure(k, output)
                if k < self.last:
                    following = thread.submit(self.generate, self.args, k + 1, self.source)
                    self.engines.sleep(self.train_s)
                    following.exception()  # waits for the batch
                    self.engines.update()

    def _measure(self, rollout_id: int, output: Any) -> None:
        """Measure from the end of one batch to the end of another, with one update of the weights
        per batch."""
        pending = output.metrics["rollout/turns_pending"]
        if rollout_id > self.case.warm:
            self._count(rollout_id, output)
        if rollout_id == self.case.warm:
            self.meter.start(pending)
        if rollout_id == self.last:
            self.meter.stop(pending)

    def _count(self, rollout_id: int, output: Any) -> None:
        self.meter.count(flatten(flatten(output.samples)), rollout_id)


async def lock_step(args: Any, rollout_id: int, source: EpisodeSource) -> Batch:
    """Verlog's order: all environments wait for all responses, then all of them step."""
    runtime = await get_runtime(args)
    await fixed_turn.open_slots(runtime, source)
    params = runtime.flags.sampling_params()
    segments = []
    for _ in range(args.rollout_batch_size // len(source.slots)):
        episodes = [await slot.live() for slot in source.slots]
        generations = await asyncio.gather(*(episode.generate(params) for episode in episodes))
        for slot, episode, generation in zip(source.slots, episodes, generations, strict=True):
            turn = await episode.step(generation)
            segments.append(episode.segment([turn], episode.stop or fixed_turn.StopReason.CUT))
            if episode.stop is not None:
                await slot.leave()
    return Batch(segments)


@dataclass(frozen=True)
class Loop:
    """How a loop is called, and its YAML keys."""

    label: str
    collect: fixed_turn.Collect | None = None
    """None: slime's own `generate_rollout`, with `rollout.generate.generate` playing the
    episodes."""
    order: Callable[[Trainer], None] = Trainer.one_after_the_other
    keys: Mapping[str, Any] | None = None
    whole_slots: bool = False
    """Batches need a whole number of turns per slot."""


LOOPS = {
    "lock-step": Loop("as Verlog", lock_step, whole_slots=True),
    "fixed": Loop("fixed-turn", fixed_turn.collect),
    "per-env": Loop(
        "fixed-turn, per_env", fixed_turn.collect, keys={"turn_quota": "per_env"}, whole_slots=True
    ),
    "continuous": Loop(
        "continuous, train.py", continuous.collect, Trainer.overlapping, {"max_staleness": 1}
    ),
    "continue": Loop(
        "continuous, train.py, continue",
        continuous.collect,
        Trainer.overlapping,
        {"max_staleness": 2, "on_update": "continue"},
    ),
    "continuous-async": Loop(
        "continuous, train_async.py", continuous.collect, Trainer.ahead, {"max_staleness": 2}
    ),
    "slime": Loop("slime, default"),
    "slime-partial": Loop("slime, partial rollout, over-sampling by the places"),
    "slime-double": Loop("slime, partial rollout, over-sampling by 2"),
}
"""By name on the command line."""


def slimes_own(args: Namespace) -> Generate:
    """Return slime's rollout function, as if it had not been called before."""
    allow_absent_packages()
    from slime.rollout.sglang_rollout import GenerateState, generate_rollout
    from slime.utils import http_utils

    GenerateState.clear_instances()
    http_utils._http_client = None
    http_utils.init_http_client(args)
    return generate_rollout


def our_own(collect: fixed_turn.Collect) -> Generate:
    """Return the rollout function that collects batches in this way."""
    return lambda args, rollout_id, source: run(
        fixed_turn.collect_or_draw(args, rollout_id, source, collect)
    )


def run_case(case: Case, checkpoint: Path) -> dict[str, Any]:
    """Play one case of one of `LOOPS`."""
    loop = LOOPS[case.loop]
    keys = dict(loop.keys or {}) if loop.collect else slime_flags(case)
    if case.max_staleness is not None:
        keys["max_staleness"] = case.max_staleness
    if loop.whole_slots:
        case = replace(case, turns=max(1, round(case.turns / case.slots)) * case.slots)
    if loop.order is not Trainer.one_after_the_other:
        # Turns are in flight when the measuring begins and ends, so with few turns per place they
        # would distort it.
        least = lambda turns: math.ceil(turns * case.slots / case.turns)
        case = replace(
            case,
            warm=max(case.warm, least(WARM_TURNS)),
            batches=max(case.batches, least(MEASURED_TURNS)),
        )
    bodies: deque[bytes] = deque(maxlen=BARE_REQUESTS)

    def kept_body(*arguments: Any) -> bytes:
        bodies.append(write_body(*arguments))
        return bodies[-1]

    write_body = engine.request_body
    with make_engines(case, checkpoint) as engines, engines.sleeping():
        args = make_args(case, engines.port, checkpoint, **keys)
        generate = our_own(loop.collect) if loop.collect else slimes_own(args)
        trainer = Trainer(case, engines, args, generate)
        try:
            with mock.patch.object(engine, "request_body", kept_body):
                if case.processes > 1:
                    _start_players(trainer)
                loop.order(trainer)
                row = trainer.meter.row()  # before the players end, and the engines with them
        finally:
            run(close_runtimes())
        row["bare_cpu_ms_per_turn"] = asyncio.run(engines.bare_client_ms(bodies, case.places))
        return row


def _start_players(trainer: Trainer) -> None:
    """Start the processes that play before anything is measured."""
    players = run(get_runtime(trainer.args)).players
    assert isinstance(players, PlayerProcesses)
    pids = run(players.start())
    trainer.meter.players = [Host(pid) for pid in pids]
    trainer.engines.count_players(pids)
