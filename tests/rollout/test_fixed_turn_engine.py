"""Fixed-turn batches beside an engine that aborts, is slow, keeps old weights or answers nonsense."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout.data_source import EpisodeSource
from rollout.errors import EngineError
from rollout.fixed_turn import collect_or_draw
from rollout.play.runtime import close_runtimes
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout import test_fixed_turn
from tests.rollout.test_fixed_turn import Collect, flat, plays, turns_of, wide

collect, processes = test_fixed_turn.collect, test_fixed_turn.processes  # fixtures


@wide
async def test_an_aborted_turn_is_issued_again_without_touching_the_environment(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    engine_answers = {"aborted": 0}

    def script(body: dict[str, Any], number: int) -> Any:
        if number % 3 == 0:
            engine_answers["aborted"] += 1
            return {"text": "AC", "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}}
        return plays(body, number)

    _, _, outputs = await collect(batches=2, script=script)
    played = turns_of(outputs)
    assert len(set(played)) == len(played) == 48
    aborted = sum(output.metrics["rollout/faults/turns_aborted"] for output in outputs)
    assert aborted == engine_answers["aborted"] > 0


async def test_an_aborted_turn_is_sent_with_the_same_prompt_and_its_partial_response_is_dropped(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    sent: list[list[int]] = []
    partial = [[-2.0, 7], [-3.0, 8]]

    def script(body: dict[str, Any], number: int) -> Any:
        sent.append(body["input_ids"])
        if number % 3 == 0:
            return {"text": "AC", "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": partial}}
        return plays(body, number)

    _, _, (output,) = await collect(script=script, n_env=1)
    assert all(sent[k] == sent[k + 1] for k in range(0, len(sent), 3)), "one slot sends one request after another"
    finished = [k for k in range(len(sent)) if k % 3]
    turns = [sample for sample in flat(output) if sample.metadata["kind"] == "turn"]
    for k, sample in zip(finished, turns, strict=True):
        prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
        text = plays({"input_ids": sent[k]}, k)
        assert prompt == sent[k]
        assert response == chatml_tokenizer().encode(f"{text}<|im_end|>")
        assert len(sample.rollout_log_probs) == len(response) and min(sample.rollout_log_probs) > -2.0


@pytest.mark.parametrize(("quota", "others"), [("global", 23), ("per_env", 18)])
async def test_no_slot_waits_for_another_slots_turn(collect: Collect, quota: str, others: int) -> None:
    """The first response comes once all turns of the other slots are played."""
    played = asyncio.Event()
    done = 0

    async def held() -> str:
        await played.wait()
        return "ACTION: left"

    def script(body: dict[str, Any], number: int) -> Any:
        nonlocal done
        if number == 0:
            return held()
        done += 1
        if done == others:
            played.set()
        return plays(body, number)

    async with asyncio.timeout(60.0):
        _, _, (output,) = await collect(script=script, turn_quota=quota, env={"max_length": 5})
    turns = Counter(episode % 4 for episode, _ in turns_of([output]))
    assert sum(turns.values()) == 24 and min(turns.values()) == (1 if quota == "global" else 6)


async def test_a_turn_that_a_weight_update_aborts_is_issued_again_at_once(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 3600.0)

    def script(body: dict[str, Any], number: int) -> Any:
        if number == 0:  # a second abort of the same turn would pause
            return {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
        return plays(body, number)

    async with asyncio.timeout(120.0):
        _, _, (output,) = await collect(script=script)
    assert output.metrics["rollout/faults/turns_aborted"] == 1


async def test_an_engine_that_keeps_its_old_weights_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port)
        source = EpisodeSource(args)
        try:
            for number in range(6):
                await collect_or_draw(args, number, source)
                if number == 3:
                    assert "turn/staleness_max" not in caplog.text
                engine.version = str(min(number + 2, 4))
        finally:
            await close_runtimes()
    assert caplog.text.count("turn/staleness_max is 1, above 0: an engine may not get new weights") == 1


@pytest.mark.parametrize("interval", [1, 2])
async def test_one_of_two_engines_that_misses_the_first_push_is_seen_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: int
) -> None:
    """train.py pushes after every rollout, whatever the interval says; the slow engine stays one push behind."""
    pushed = 1

    def two_engines(body: dict[str, Any], number: int) -> Any:
        engine.version = str(max(1, pushed - number % 2))
        return plays(body, number)

    async with ScriptedEngine(chatml_tokenizer(), two_engines) as engine:
        args = rollout_args(tmp_path, engine.port, update_weights_interval=interval)
        source, oldest = EpisodeSource(args), []
        try:
            for number in range(4):
                output = await collect_or_draw(args, number, source)
                oldest.append(output.metrics["turn/staleness_max"])
                pushed += 1
        finally:
            await close_runtimes()
    assert oldest == [0, 1, 1, 1]
    assert caplog.text.count("turn/staleness_max is 1, above 0: an engine may not get new weights") == 1


@wide
async def test_an_engine_that_never_answers_sensibly_stops_the_batch_with_its_last_answer(collect: Collect) -> None:
    with pytest.raises(EngineError, match=r"failed 3 times.*no meta_info"):
        await collect(script=lambda body, number: {"sorry": "busy"})
