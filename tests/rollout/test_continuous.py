"""Continuous batches: the slots never wait, no turn is lost or doubled, and none is older than `max_staleness`."""

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.continuous import collect
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from rollout.fixed_turn import collect_or_draw
from rollout.play.runtime import close_runtimes, get_runtime
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw
from tests.fixtures.warm_python import warm_players

TURNS = 24


ANSWERS = ("THINK: so.\nACTION: left", "ACTION: right", "right", "ACTION: dance", "")


class Engine(ScriptedEngine):
    """Answers depend on the prompt alone, every eleventh is slow. As in SGLang, an update aborts what is in flight."""

    def __init__(self, on_update: str = "abort") -> None:
        super().__init__(chatml_tokenizer(), self.play)
        self.jitter = random.Random(1)
        self.on_update = on_update

    async def play(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        version = self.version
        await asyncio.sleep(0.03 if number % 11 == 0 else self.jitter.random() * 0.004)
        aborted = version != self.version and self.on_update == "abort"
        answer = self.answer(ANSWERS[draw(body, 5)], body, "abort" if aborted else "stop")
        if self.on_update == "continue":
            tokens = answer["meta_info"]["completion_tokens"]
            ends = {version: 1, self.version: tokens} if tokens > 1 else {self.version: tokens}
            answer["meta_info"]["weight_versions"] = [{"version": v, "end": end} for v, end in ends.items()]
        return answer

    def update(self) -> None:
        self.version = str(int(self.version) + 1)


class Trainer:
    """Calls the rollout in the order of slime's train.py or train_async.py; training takes `train_s`."""

    def __init__(self, folder: Path, train_s: float = 0.02, **keys: Any) -> None:
        self.keys = {"env": {"max_length": 40}, **keys}
        self.folder, self.train_s = folder, train_s
        self.outputs: list[Any] = []
        self.staleness: list[list[int]] = []
        self.stream: Any = None

    async def run(self, rollouts: range, load: int | None = None, ahead: bool = False, saves: bool = True) -> None:
        with warm_players():
            await self._run(rollouts, load, ahead, saves)

    async def _run(self, rollouts: range, load: int | None, ahead: bool, saves: bool) -> None:
        async with Engine(self.keys.get("on_update", "abort")) as engine:
            folders = {"load": str(self.folder / "save")} if load is not None else {}
            self.args = rollout_args(self.folder, engine.port, **self.keys, **folders)
            self.source = EpisodeSource(self.args)
            if load is not None:
                self.source.load(load)
            try:
                await (self._asynchronous if ahead else self._synchronous)(engine, rollouts, saves)
            finally:
                await close_runtimes()
        assert ahead or self.source.clock.after_each is not False, "old turns look like train_async.py"

    async def _synchronous(self, engine: Engine, rollouts: range, saves: bool) -> None:
        for k in rollouts:
            await self.generate(k)
            await self.train(engine, k)
            if saves:
                self.source.save(k)

    async def _asynchronous(self, engine: Engine, rollouts: range, saves: bool) -> None:
        """Batch r + 1 is asked for before batch r is trained on, and is complete before the weights are pushed."""
        following = asyncio.create_task(self.generate(rollouts[0]))
        for k in rollouts:
            await following
            if k + 1 in rollouts:
                following = asyncio.create_task(self.generate(k + 1))
            await asyncio.sleep(self.train_s)
            await following
            if saves:
                self.source.save(k)
            engine.update()

    async def generate(self, rollout_id: int) -> None:
        output = await collect_or_draw(self.args, rollout_id, self.source, collect)
        self.outputs.append(output)
        self.stream = (await get_runtime(self.args)).stream
        turns = [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]
        first = self.source.clock.first
        assert first is not None
        versions = [int(s.weight_versions[0]) for s in turns]
        assert len(turns) == TURNS
        if self.keys.get("on_update") != "continue":
            assert all(len(s.weight_versions) == 1 for s in turns), "each turn is played by one version"
        self.staleness.append([rollout_id - first[0] - (version - first[1]) for version in versions])

    async def train(self, engine: Engine, rollout_id: int) -> None:
        await asyncio.sleep(self.train_s)
        engine.update()

    def turns(self) -> list[tuple[int, int]]:
        """(episode, turn index) of every turn, in order of the batches."""
        return [
            (s.metadata["episode_id"], s.metadata["round_number"])
            for output in self.outputs
            for group in output.samples
            for s in group
            if s.metadata["kind"] == "turn"
        ]


def no_gap_and_none_twice(played: list[tuple[int, int]]) -> None:
    assert len(set(played)) == len(played)
    for episode in {e for e, _ in played}:
        indices = [k for e, k in played if e == episode]
        assert indices == list(range(len(indices))), f"episode {episode}"


@pytest.mark.parametrize(
    ("processes", "history", "ahead", "limit"),
    [
        pytest.param(
            count, *case, marks=() if count == 1 or (count, *case) == (2, "full", True, 1) else pytest.mark.slow
        )
        for count in (1, 2, 4)
        for case in itertools.product(("window", "full"), (False, True), (1, 2))
    ],
)
async def test_no_turn_is_lost_doubled_or_older_than_the_limit(
    tmp_path: Path, processes: int, ahead: bool, limit: int, history: str
) -> None:
    trainer = Trainer(tmp_path, max_staleness=limit, history=history, rollout_processes=processes)
    await trainer.run(range(6), ahead=ahead)
    no_gap_and_none_twice(trainer.turns())
    assert all(0 <= updates <= limit for batch in trainer.staleness for updates in batch)
    assert any(updates for batch in trainer.staleness for updates in batch), "turns are played while training runs"
    for output, stale in zip(trainer.outputs, trainer.staleness, strict=True):
        assert output.metrics["turn/staleness_max"] == max(stale)
        assert output.metrics["turn/staleness"] == pytest.approx(sum(stale) / TURNS)


async def test_slots_play_on_while_the_trainer_works_up_to_the_limit(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    async def train(engine: Engine, rollout_id: int) -> None:
        deadline = time.monotonic() + 60
        while trainer.stream.ledger["finished"] < (rollout_id + 2) * TURNS and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.update()

    trainer.train = train  # type: ignore[method-assign]
    await trainer.run(range(2))
    ledger = trainer.stream.ledger
    assert ledger["handed_out"] == 2 * TURNS
    assert ledger["finished"] == ledger["issued"] == 3 * TURNS, "one more batch waits: max_staleness is 1"
    assert trainer.outputs[1].metrics["rollout/turns_pending"] == 0


@pytest.mark.parametrize("processes", [1, 2])
async def test_each_batch_counts_its_own_part_of_the_waits_for_new_weights(tmp_path: Path, processes: int) -> None:
    """As with weights that are pushed after every second update, the slots wait from before batch 1 until batch 2."""
    trainer = Trainer(tmp_path, max_staleness=3, rollout_processes=processes)

    async def train(engine: Engine, rollout_id: int) -> None:
        while trainer.stream._has_place():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        if rollout_id:
            engine.update()

    trainer.train, trainer._asynchronous = train, trainer._synchronous  # type: ignore[method-assign]
    await trainer.run(range(3), ahead=True)
    waiting = [output.metrics["rollout/slots_at_limit"] for output in trainer.outputs]
    assert waiting[1] > 0 and max(waiting) <= 4.01, f"there are four slots: {waiting}"


@pytest.mark.parametrize("processes", some([1, 2], [1]))
async def test_a_cut_episode_is_bootstrapped_from_the_prompt_of_its_next_turn(tmp_path: Path, processes: int) -> None:
    trainer = Trainer(tmp_path, rollout_processes=processes)
    await trainer.run(range(5))
    prompts: dict[tuple[int, int], list[int]] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    for output in trainer.outputs:
        for sample in (s for group in output.samples for s in group):
            where = sample.metadata["episode_id"], sample.metadata["round_number"]
            prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
            (waiting if sample.metadata["kind"] == "bootstrap" else prompts)[where] = prompt
    followed = [where for where in waiting if where in prompts]
    assert len(followed) > 10
    assert all(waiting[where] == prompts[where] for where in followed)


@pytest.mark.parametrize("processes", some([1, 2], [1]))
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("last", [0, 2])
async def test_a_killed_run_goes_on_with_the_turns_after_the_saved_batch(
    tmp_path: Path, last: int, ahead: bool, processes: int
) -> None:
    before = Trainer(tmp_path, rollout_processes=processes)
    after = Trainer(tmp_path, rollout_processes=1 + processes % 2)  # the other way round
    await before.run(range(4), ahead=ahead)
    saved = [turn for k, turn in enumerate(before.turns()) if k < (last + 1) * TURNS]
    await after.run(range(last + 1, last + 4), load=last, ahead=ahead)
    no_gap_and_none_twice([*saved, *after.turns()])
    assert after.outputs[0].metrics["rollout/faults/episodes_lost_at_resume"] == 0


async def test_an_engine_that_leaves_finds_no_turn_in_flight_and_none_is_lost(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, colocate=True)
    quiet: list[int] = []

    async def train(engine: Engine, rollout_id: int) -> None:
        quiet.append(len(trainer.stream._playing))
        asked = len(engine.requests)
        await asyncio.sleep(pause_s)
        assert len(engine.requests) == asked, "nothing is asked while the engine is away"
        engine.update()

    trainer.train = train  # type: ignore[method-assign]
    pause_s, began = 0.05, time.monotonic()
    await trainer.run(range(4))
    pauses = 4 * pause_s / (time.monotonic() - began)
    assert quiet == [0] * 4
    at_limit = [output.metrics["rollout/slots_at_limit"] for output in trainer.outputs]
    assert max(at_limit) < pauses / 4, "the slots wait for GPUs, not at the limit"
    no_gap_and_none_twice(trainer.turns())
    assert max(max(batch) for batch in trainer.staleness) == 1, "turns that finished during the pause come first"


@pytest.mark.parametrize("processes", some([1, 2], [1]))
async def test_answers_that_survive_new_weights_are_as_old_as_their_oldest_token(
    tmp_path: Path, processes: int
) -> None:
    trainer = Trainer(tmp_path, on_update="continue", max_staleness=2, rollout_processes=processes)
    await trainer.run(range(6))
    no_gap_and_none_twice(trainer.turns())
    shares = [output.metrics["turn/mixed_weights_ratio"] for output in trainer.outputs]
    assert max(shares) > 0, "some answers were in flight when weights came"
    for output, stale, mixed in zip(trainer.outputs, trainer.staleness, shares, strict=True):
        metrics = output.metrics
        assert min(stale) >= 0 and max(stale) <= 2
        assert metrics["turn/staleness"] == pytest.approx(sum(stale) / TURNS)
        assert metrics["rollout/faults/turns_aborted"] == metrics["rollout/faults/turns_spanning_update"] == 0
        turns = [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]
        tokens = [s.response_length for s in turns]
        as_old_as_the_turn = sum(n * age for n, age in zip(tokens, stale, strict=True)) / sum(tokens)
        younger = as_old_as_the_turn - metrics["turn/token_staleness"]
        assert younger > 0 if mixed else younger == pytest.approx(0), "tokens of new weights are younger than the turn"


async def test_an_engine_that_does_not_say_which_weights_wrote_what_cannot_continue(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, on_update="continue")
    with pytest.raises(ConfigError, match="on_update: continue needs an engine that says.*or on_update: abort"):
        async with Engine() as engine:
            args = rollout_args(tmp_path, engine.port, **trainer.keys)
            try:
                await collect_or_draw(args, 0, EpisodeSource(args), collect)
            finally:
                await close_runtimes()


async def test_an_engine_without_versions_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    async def nameless() -> None:
        async with Engine() as engine:
            engine.version = "default"
            args = rollout_args(tmp_path, engine.port, **trainer.keys)
            try:
                await collect_or_draw(args, 0, EpisodeSource(args), collect)
            finally:
                await close_runtimes()

    with pytest.raises(ConfigError, match="does not say which weights answered"):
        await nameless()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"on_update": "continue", "rollout_function_path": "rollout.fixed_turn.generate_rollout"},
            "on_update: continue needs --rollout-function-path rollout.continuous.generate_rollout",
        ),
        ({"on_update": "continue", "custom_megatron_init_path": None}, "on_update in the YAML need --custom-megatron"),
        (
            {
                **{"on_update": "continue", "custom_megatron_init_path": "advantage.patch.install"},
                **{"update_weight_transport": "disk", "update_weight_mode": "full"},
            },
            "on_update: continue needs weights that the trainer pushes.*--update-weight-mode delta",
        ),
        ({"max_staleness": 0}, "max_staleness must be at least 1, got 0"),
        ({"max_staleness": 5}, "max_staleness must be at most 4, got 5"),
        ({"turn_quota": "per_env"}, "turn_quota: per_env makes slots wait"),
        ({"update_weights_interval": 3}, "--update-weights-interval 3, turns are up to 3 updates old"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    keys = {"rollout_function_path": "rollout.continuous.generate_rollout", **keys}
    with pytest.raises(ConfigError, match=said):
        EpisodeSource(rollout_args(tmp_path, **keys))


class WarmUp(Trainer):
    """A trainer whose critic's warm-up draws batches, which are not counted as played."""

    async def generate(self, rollout_id: int) -> None:
        output = await collect_or_draw(self.args, rollout_id, self.source, collect)
        if "warmup/drawn_turns" not in output.metrics:
            self.outputs.append(output)


@pytest.mark.parametrize("processes", [1, 3])
async def test_a_run_resumed_while_the_warm_up_draws_skips_no_turn(tmp_path: Path, processes: int) -> None:
    keys: dict[str, Any] = {"critic_warmup": {"w_epoch": 2, "w_iter": 2, "fraction": 1.0}, "num_critic_only_steps": 4}
    keys["rollout_processes"] = processes
    first = WarmUp(tmp_path, train_s=0.3, max_staleness=1, **keys)
    await first.run(range(3))  # the third is drawn, while finished turns wait to be handed out
    second = WarmUp(tmp_path, train_s=0.0, max_staleness=1, **keys)
    await second.run(range(3, 7), load=2)
    no_gap_and_none_twice(first.turns() + second.turns())
