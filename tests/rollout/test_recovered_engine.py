"""An engine that starts while a run plays answers with its own weights until the next push; no loop
trains on them.

Beside it, slow responses that new weights interrupt again and again, and slime's delta mode, whose
first push is empty.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollout.continuous
import rollout.fixed_turn
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, EngineError
from rollout.play.clock import WeightClock
from tests.cases import pairs
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import faults_in, places_of, playing, plays, turns_of
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ABORTED, ScriptedEngine, draw
from tests.fixtures.warm_python import warm_players

LOOPS = {"continuous": rollout.continuous.collect, "fixed_turn": rollout.fixed_turn.collect}
every_loop = pytest.mark.parametrize("loop", LOOPS)
OWN_NAMES = ("default", "0", None)
"""How an engine names the weights that it started with; None: not at all."""


class Engine(ScriptedEngine):
    """Of the responses from version `since` on, the first `count` come from an engine that has just
    started."""

    def __init__(self, own: str | None, since: str, count: int) -> None:
        super().__init__(chatml_tokenizer(), self.play)
        self.own, self.since, self.left, self.delay = own, since, count, lambda number: 0.003

    def play(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        answer = self.answer(plays(body, number), body)
        if self.left and int(self.version) >= int(self.since):
            self.left -= 1
            answer["meta_info"]["weight_version"] = self.own
        return answer


async def run(
    folder: Path, engine: ScriptedEngine, loop: str, batches: int = 5, **keys: Any
) -> list[Any]:
    """Play batches in the order of train.py; weights are pushed after each of them."""
    outputs: list[Any] = []
    with warm_players():
        async with playing(folder, engine, **{"env": {"max_length": 40}, **keys}) as played:
            for k in range(batches):
                outputs.append(await played.batch(k, LOOPS[loop]))
                engine.version = str(int(engine.version) + 1) if engine.version.isdigit() else "1"
    return outputs


@pytest.mark.parametrize(("loop", "own"), pairs(LOOPS, OWN_NAMES))
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_what_a_recovered_engine_answers_is_asked_again_and_counted(
    tmp_path: Path, loop: str, own: str | None, processes: int
) -> None:
    outputs = await run(
        tmp_path, Engine(own, since="3", count=9), loop, rollout_processes=processes
    )
    assert faults_in(outputs, "engine_other_weights") == 9
    for k, output in enumerate(outputs):
        turns = turns_of(output)
        assert len(turns) == 24 and all(any(turn.loss_mask) for turn in turns)
        versions = [int(turn.weight_versions[0]) for turn in turns]
        assert min(versions) >= max(1, k if loop == "continuous" else k + 1)
        assert output.metrics["turn/staleness_max"] == k + 1 - min(versions)


@pytest.mark.parametrize(("loop", "own"), pairs(LOOPS, OWN_NAMES))
async def test_what_it_answers_before_any_engine_has_named_its_weights_is_not_trained_on(
    tmp_path: Path, loop: str, own: str | None
) -> None:
    """Nothing tells this engine from one that never names its weights, until another one
    answers."""
    outputs = await run(tmp_path, Engine(own, since="1", count=3), loop, batches=3)
    for k, output in enumerate(outputs):
        for turn in turns_of(output):
            is_own = turn.weight_versions in ([], [own])
            assert any(turn.loss_mask) == (not is_own)
        assert output.metrics["turn/staleness_max"] <= (1 if loop == "continuous" else 0), k
    if loop == "fixed_turn":
        assert faults_in(outputs, "turns_by_other_weights") == 3


async def test_an_engine_that_never_names_its_weights_trains_in_fixed_turn_batches(
    tmp_path: Path,
) -> None:
    outputs = await run(tmp_path, Engine(None, since="0", count=10**6), "fixed_turn", batches=3)
    assert all(any(turn.loss_mask) for output in outputs for turn in turns_of(output))
    assert (
        faults_in(outputs, "engine_other_weights")
        == faults_in(outputs, "turns_by_other_weights")
        == 0
    )


@every_loop
async def test_an_engine_that_never_gets_the_weights_ends_the_run_with_its_version(
    tmp_path: Path, loop: str
) -> None:
    with pytest.raises(EngineError, match="failed 17 times.*weight_version: default"):
        await run(tmp_path, Engine("default", since="2", count=10**6), loop)


async def test_held_out_and_whole_episodes_are_played_by_the_actors_weights_alone(
    tmp_path: Path,
) -> None:
    engine = Engine("default", since="2", count=6)
    async with playing(tmp_path, engine, eval={"episodes": 4}) as played:
        await played.batch(0)
        engine.version = "2"
        found = await played.evaluation()
        engine.left = 2
        samples = await played.episode()
        faults = (await played.runtime()).new_faults()
    held_out = [sample for task in found.data.values() for sample in task["samples"]]
    assert {version for sample in [*held_out, *samples] for version in sample.weight_versions} == {
        "2"
    }
    assert faults["engine_other_weights"] == 8


def test_the_smaller_version_of_the_first_batch_is_an_engines_own() -> None:
    """After a resume, it would otherwise count as the weights of the checkpoint."""
    clock = WeightClock()
    clock.learn(100, 0, asked_since=True)
    clock.learn(100, 1, asked_since=True)
    assert clock.first == (100, 1)
    assert [clock.staleness(version, 101) for version in (0, 1, 2)] == [-1, 1, 0]


@every_loop
async def test_under_delta_pushes_the_first_batch_is_played_with_version_zero(
    tmp_path: Path, loop: str
) -> None:
    """slime's first push only notes what later ones are compared with."""
    engine = ScriptedEngine(chatml_tokenizer(), plays)
    engine.version = "default"
    outputs = await run(tmp_path, engine, loop, update_weight_mode="delta")
    for k, output in enumerate(outputs):
        # slime's samples keep the engine's own name.
        named = [turn.weight_versions[0] for turn in turns_of(output)]
        versions = [0 if name == "default" else int(name) for name in named]
        assert set(versions) <= {k, max(k - 1, 0)} and output.metrics[
            "turn/staleness_max"
        ] == k - min(versions)
        assert all(any(turn.loss_mask) for turn in turns_of(output))


@every_loop
async def test_delta_pushes_are_refused_on_a_resume_whose_engine_would_play_with_the_first_weights(
    tmp_path: Path, loop: str
) -> None:
    saved = tmp_path / "save"
    saved.mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    keys: dict[str, Any] = {
        "rollout_function_path": f"rollout.{loop}.generate_rollout",
        "update_weight_mode": "delta",
    }
    with pytest.raises(
        ConfigError, match=r"--update-weight-mode delta cannot resume.*--update-weight-mode full"
    ):
        EpisodeSource(rollout_args(tmp_path, load=str(saved), **keys))
    # As slime loads the reference.
    EpisodeSource(rollout_args(tmp_path, load=str(saved), finetune=True, **keys))
    EpisodeSource(rollout_args(tmp_path, load=str(saved), **{**keys, "update_weight_mode": "full"}))


class Endless(ScriptedEngine):
    """The responses to `stuck` of its prompts take longer than any weights stay: each update aborts
    them."""

    def __init__(self, stuck: int) -> None:
        super().__init__(chatml_tokenizer(), self.play)
        self.stuck, self.endless = stuck, list[list[int]]()

    def never_ends(self, body: dict[str, Any]) -> bool:
        prompt = body["input_ids"]
        if len(self.endless) < self.stuck and draw(body, 5) == 0:
            self.endless.append(prompt)
        # An aborted response is asked for again behind what there is of it.
        return any(prompt[: len(first)] == first for first in self.endless)

    async def play(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        version = self.version
        if self.never_ends(body):
            while self.version == version:
                await asyncio.sleep(0.001)
            return self.answer("ACTION: ", body, "abort")
        await asyncio.sleep(0.002)
        return self.answer(plays(body, number), body)


@pytest.mark.parametrize("stuck", [1, 3])
async def test_a_response_that_every_update_aborts_costs_its_episode_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: int
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    keys: dict[str, Any] = {
        "stale_turns": "mask",
        "max_turn_retries": 2,
        "max_episode_failures_per_batch": 0,
    }
    outputs = await run(tmp_path, Endless(stuck), "continuous", batches=14, **keys)
    assert faults_in(outputs, "episodes_too_slow") == faults_in(outputs, "episodes_failed") >= stuck
    played = places_of(*outputs)
    assert len(set(played)) == len(played) == 14 * 24


async def test_an_engine_that_aborts_without_new_weights_still_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    engine = ScriptedEngine(chatml_tokenizer(), lambda body, number: ABORTED)
    with pytest.raises(EngineError, match="was aborted 9 times"):
        await run(tmp_path, engine, "continuous", stale_turns="mask")
