"""Fixed-turn batches beside an engine that aborts, is slow or keeps old weights."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import faults_in, places_of, playing, plays, turns_of
from tests.fixtures.scripted_engine import ABORTED, ScriptedEngine
from tests.rollout import test_fixed_turn
from tests.rollout.test_fixed_turn import Collect, wide

collect, processes = test_fixed_turn.collect, test_fixed_turn.processes  # fixtures


@wide
async def test_an_aborted_turn_is_issued_again_without_touching_the_environment(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    aborted = []

    def script(body: dict[str, Any], number: int) -> Any:
        if number % 3:
            return plays(body, number)
        aborted.append(number)
        return ABORTED

    outputs = await collect(batches=2, script=script)
    played = places_of(*outputs)
    assert len(set(played)) == len(played) == 48
    assert faults_in(outputs, "turns_aborted") == len(aborted) > 0


async def test_an_aborted_turn_is_sent_with_the_same_prompt_and_its_partial_response_is_dropped(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 0.001)
    sent: list[list[int]] = []
    partial = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-2.0, 7], [-3.0, 8]]}

    def script(body: dict[str, Any], number: int) -> Any:
        sent.append(body["input_ids"])
        return plays(body, number) if number % 3 else {"text": "AC", "meta_info": partial}

    (output,) = await collect(script=script, n_env=1)
    assert all(sent[k] == sent[k + 1] for k in range(0, len(sent), 3)), (
        "one slot sends one request after another"
    )
    finished = [k for k in range(len(sent)) if k % 3]
    for k, sample in zip(finished, turns_of(output), strict=True):
        prompt, response = (
            sample.tokens[: -sample.response_length],
            sample.tokens[-sample.response_length :],
        )
        assert prompt == sent[k]
        assert response == chatml_tokenizer().encode(
            plays({"input_ids": sent[k]}, k) + "<|im_end|>"
        )
        assert (
            len(sample.rollout_log_probs) == len(response) and min(sample.rollout_log_probs) > -2.0
        )


@pytest.mark.parametrize(("quota", "others"), [("global", 23), ("per_env", 18)])
async def test_no_slot_waits_for_another_slots_turn(
    collect: Collect, quota: str, others: int
) -> None:
    """The first response comes once all turns of the other slots are played."""
    played = asyncio.Event()

    async def held() -> str:
        await played.wait()
        return "ACTION: left"

    def script(body: dict[str, Any], number: int) -> Any:
        if number == others:
            played.set()
        return plays(body, number) if number else held()

    async with asyncio.timeout(60.0):
        (output,) = await collect(script=script, turn_quota=quota, env={"max_length": 5})
    turns = Counter(episode % 4 for episode, _ in places_of(output))
    assert sum(turns.values()) == 24 and min(turns.values()) == (1 if quota == "global" else 6)


async def test_a_turn_that_a_weight_update_aborts_is_issued_again_at_once(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second abort of the same turn would pause."""
    monkeypatch.setattr("rollout.play.episode.ABORT_PAUSE_S", 3600.0)
    async with asyncio.timeout(120.0):
        (output,) = await collect(
            script=lambda body, number: plays(body, number) if number else ABORTED
        )
    assert output.metrics["rollout/faults/turns_aborted"] == 1


@pytest.mark.parametrize("interval", [1, 2])
async def test_one_of_two_engines_that_misses_the_first_push_is_seen_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, interval: int
) -> None:
    """train.py pushes after every rollout, whatever the interval says; the slow engine stays one
    push behind."""
    pushed = 1

    def two_engines(body: dict[str, Any], number: int) -> Any:
        engine.version = str(max(1, pushed - number % 2))
        return plays(body, number)

    engine, oldest = ScriptedEngine(chatml_tokenizer(), two_engines), []
    async with playing(tmp_path, engine, update_weights_interval=interval) as run:
        for number in range(4):
            oldest.append((await run.batch(number)).metrics["turn/staleness_max"])
            pushed += 1
    assert oldest == [0, 1, 1, 1]
    assert caplog.text.count("turn/staleness_max is 1") == 1
