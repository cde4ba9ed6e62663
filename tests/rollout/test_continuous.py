"""Continuous batches: the slots never wait, no turn is lost or doubled, and none is older than
`max_staleness`."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from rollout.continuous import collect
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError
from tests.cases import pairs, some
from tests.fixtures.playing import Run, flat, no_gap_and_none_twice, place_of, playing, turns_of
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.fixtures.trainer import TURNS, Trainer, updated_engine

CASES = [
    (count, *case)
    for count in (1, 2, 4)
    for case in itertools.product(("window", "full"), (False, True), (1, 2))
]
QUICK = [
    (1, "window", False, 1),
    (1, "full", False, 2),
    (1, "window", True, 2),
    (2, "full", True, 1),
]


wide = pytest.mark.parametrize("processes", some([1, 2], [1]))


@pytest.mark.parametrize("case", some(CASES, QUICK), ids=str)
async def test_no_turn_is_lost_doubled_or_older_than_the_limit(
    tmp_path: Path, case: tuple[int, str, bool, int]
) -> None:
    processes, history, ahead, limit = case
    trainer = Trainer(tmp_path, max_staleness=limit, history=history, rollout_processes=processes)
    await trainer.run(range(6), ahead=ahead)
    no_gap_and_none_twice(trainer.places())
    assert all(0 <= updates <= limit for batch in trainer.staleness for updates in batch)
    assert any(updates for batch in trainer.staleness for updates in batch), (
        "turns are played while training runs"
    )
    for output, stale in zip(trainer.outputs, trainer.staleness, strict=True):
        assert output.metrics["turn/staleness_max"] == max(stale)
        assert output.metrics["turn/staleness"] == pytest.approx(sum(stale) / TURNS)


async def test_slots_play_on_while_the_trainer_works_up_to_the_limit(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)

    async def train(engine: ScriptedEngine, rollout_id: int) -> None:
        deadline = time.monotonic() + 60
        while (
            trainer.stream.ledger["finished"] < (rollout_id + 2) * TURNS
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.update()

    trainer.train = train  # type: ignore[method-assign]
    await trainer.run(range(2))
    ledger = trainer.stream.ledger
    assert ledger["handed_out"] == 2 * TURNS
    assert ledger["finished"] == ledger["issued"] == 3 * TURNS, (
        "one more batch waits: max_staleness is 1"
    )
    assert trainer.outputs[1].metrics["rollout/turns_pending"] == 0


@wide
async def test_a_cut_episode_is_bootstrapped_from_the_prompt_of_its_next_turn(
    tmp_path: Path, processes: int
) -> None:
    trainer = Trainer(tmp_path, rollout_processes=processes)
    await trainer.run(range(5))
    prompts: dict[tuple[int, int], list[int]] = {}
    waiting: dict[tuple[int, int], list[int]] = {}
    for sample in flat(*trainer.outputs):
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
        (waiting if sample.metadata["kind"] == "bootstrap" else prompts)[place_of(sample)] = prompt
    followed = [where for where in waiting if where in prompts]
    assert len(followed) > 10
    assert all(waiting[where] == prompts[where] for where in followed)


@wide
@pytest.mark.parametrize(("last", "ahead"), pairs([0, 2], [False, True]))
async def test_a_killed_run_goes_on_with_the_turns_after_the_saved_batch(
    tmp_path: Path, last: int, ahead: bool, processes: int
) -> None:
    before = Trainer(tmp_path, rollout_processes=processes)
    after = Trainer(tmp_path, rollout_processes=1 + processes % 2)  # the other way round
    await before.run(range(4), ahead=ahead)
    saved = [turn for k, turn in enumerate(before.places()) if k < (last + 1) * TURNS]
    await after.run(range(last + 1, last + 4), load=last, ahead=ahead)
    no_gap_and_none_twice([*saved, *after.places()])
    assert after.outputs[0].metrics["rollout/faults/episodes_lost_at_resume"] == 0


async def test_an_engine_that_leaves_finds_no_turn_in_flight_and_none_is_lost(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, colocate=True)
    quiet: list[int] = []

    async def train(engine: ScriptedEngine, rollout_id: int) -> None:
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
    no_gap_and_none_twice(trainer.places())
    assert max(max(batch) for batch in trainer.staleness) == 1, (
        "turns that finished during the pause come first"
    )


@wide
async def test_answers_that_survive_new_weights_are_as_old_as_their_oldest_token(
    tmp_path: Path, processes: int
) -> None:
    trainer = Trainer(tmp_path, on_update="continue", max_staleness=2, rollout_processes=processes)
    await trainer.run(range(6))
    no_gap_and_none_twice(trainer.places())
    shares = [output.metrics["turn/mixed_weights_ratio"] for output in trainer.outputs]
    assert max(shares) > 0, "some answers were in flight when weights came"
    for output, stale, mixed in zip(trainer.outputs, trainer.staleness, shares, strict=True):
        metrics = output.metrics
        assert min(stale) >= 0 and max(stale) <= 2
        assert metrics["turn/staleness"] == pytest.approx(sum(stale) / TURNS)
        assert (
            metrics["rollout/faults/turns_aborted"]
            == metrics["rollout/faults/turns_spanning_update"]
            == 0
        )
        tokens = [sample.response_length for sample in turns_of(output)]
        as_old_as_the_turn = sum(n * age for n, age in zip(tokens, stale, strict=True)) / sum(
            tokens
        )
        younger = as_old_as_the_turn - metrics["turn/token_staleness"]
        assert younger > 0 if mixed else younger == pytest.approx(0), (
            "tokens of new weights are younger than the turn"
        )


@pytest.mark.parametrize(
    ("on_update", "version", "told"),
    [
        ("continue", "1", "on_update: continue needs an engine that says"),
        ("abort", "default", "which weights"),
    ],
)
async def test_an_engine_without_versions_is_refused(
    tmp_path: Path, on_update: str, version: str, told: str
) -> None:
    engine = updated_engine()
    engine.version = version
    async with playing(tmp_path, engine, on_update=on_update, env={"max_length": 40}) as run:
        with pytest.raises(ConfigError, match=told):
            await run.batch(0, collect)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {
                "on_update": "continue",
                "rollout_function_path": "rollout.fixed_turn.generate_rollout",
            },
            "on_update: continue needs --rollout-function-path",
        ),
        (
            {"on_update": "continue", "custom_megatron_init_path": None},
            "on_update .* --custom-megatron",
        ),
        (
            {
                "on_update": "continue",
                "custom_megatron_init_path": "advantage.patch.install",
                "update_weight_transport": "disk",
                "update_weight_mode": "full",
            },
            "--update-weight-mode delta",
        ),
        ({"turn_quota": "per_env"}, "turn_quota: per_env"),
        ({"update_weights_interval": 3}, "--update-weights-interval 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    keys = {"rollout_function_path": "rollout.continuous.generate_rollout", **keys}
    with pytest.raises(ConfigError, match=said):
        EpisodeSource(rollout_args(tmp_path, **keys))


class WarmUp(Trainer):
    """A trainer whose critic's warm-up draws batches, which are not counted as played."""

    async def generate(self, run: Run, rollout_id: int) -> None:
        output = await run.batch(rollout_id, collect)
        if "warmup/drawn_turns" not in output.metrics:
            self.outputs.append(output)


@pytest.mark.parametrize("processes", some([1, 3], [1]))
async def test_a_run_resumed_while_the_warm_up_draws_skips_no_turn(
    tmp_path: Path, processes: int
) -> None:
    keys: dict[str, Any] = {
        "critic_warmup": {"w_epoch": 2, "w_iter": 2, "fraction": 1.0},
        "num_critic_only_steps": 4,
    }
    keys["rollout_processes"] = processes
    first = WarmUp(tmp_path, train_s=0.3, max_staleness=1, **keys)
    await first.run(range(3))  # the third is drawn, while finished turns wait to be handed out
    second = WarmUp(tmp_path, train_s=0.0, max_staleness=1, **keys)
    await second.run(range(3, 7), load=2)
    no_gap_and_none_twice(first.places() + second.places())
