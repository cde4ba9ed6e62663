"""Notes in separate turns across weight updates: aborted by the engine, written by two versions,
too old to train."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout import continuous
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import both_loops, one_slot, place_of, playing, turns_of
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.play.test_summary_turns import LONG, NOTES, asked, plays


class Engine(ScriptedEngine):
    """Holds the first request for notes until the weights have been updated."""

    def __init__(self, on_update: str = "abort") -> None:
        super().__init__(chatml_tokenizer(), self.play, on_update)
        self.holds, self.updated = asyncio.Event(), asyncio.Event()

    async def play(self, body: dict[str, Any], number: int) -> str:
        if not asked(body) or self.holds.is_set():
            return plays(body, number)
        self.holds.set()
        await self.updated.wait()
        return "the key is red"


def shape(output: Any) -> list[tuple[int, int, bool]]:
    """Episode, turn and whether it wrote notes, of every turn."""
    return [(*place_of(sample), "summary" in sample.metadata) for sample in turns_of(output)]


async def play(folder: Path, engine: Engine, **keys: Any) -> list[Any]:
    """Two continuous batches of four turns; new weights come while the notes after the first batch
    are written."""
    async with (
        asyncio.timeout(60),
        playing(folder, engine, memory=NOTES, **LONG, **one_slot(4), **keys) as run,
    ):
        first = await run.batch(0, continuous.collect)
        await engine.holds.wait()
        engine.update()
        engine.updated.set()
        return [first, await run.batch(1, continuous.collect)]


@both_loops
async def test_aborted_notes_are_asked_for_again_and_change_nothing_else(
    tmp_path: Path, collect: Any
) -> None:
    async def run(aborts: int) -> tuple[Any, list[dict[str, Any]]]:
        def script(body: dict[str, Any], number: int) -> Any:
            return (
                engine.answer("half a note", body, "abort")
                if number in range(4, 4 + aborts)
                else plays(body, number)
            )

        engine = ScriptedEngine(chatml_tokenizer(), script)
        async with (
            asyncio.timeout(60),
            playing(tmp_path, engine, memory=NOTES, **LONG, **one_slot(10)) as played,
        ):
            return await played.batch(0, collect), engine.requests

    whole, _ = await run(0)
    output, requests = await run(2)
    assert (
        output.metrics["rollout/faults/turns_aborted"] == 2 and output.metrics["summary/turns"] == 2
    )
    assert (
        requests[4] == requests[5] == requests[6]
        and requests[4]["sampling_params"]["max_new_tokens"] == 24
    )
    assert shape(output) == [(0, k, k % 5 == 4) for k in range(10)]
    seen = [
        [(s.tokens, s.rollout_log_probs, s.loss_mask) for s in turns_of(batch)]
        for batch in (output, whole)
    ]
    assert seen[0] == seen[1]


async def test_notes_of_two_weight_versions_are_one_turn_as_old_as_its_oldest_token(
    tmp_path: Path,
) -> None:
    _, output = await play(tmp_path, Engine("continue"), on_update="continue")
    assert shape(output) == [(0, k, k == 4) for k in range(4, 8)]
    notes, *others = turns_of(output)
    assert (
        notes.weight_versions == ["1", "2"]
        and notes.metadata["mixed_weights"]
        and all(notes.loss_mask)
    )
    assert [s.weight_versions for s in others] == [["2"]] * 3
    metrics = output.metrics
    assert (
        metrics["rollout/faults/turns_aborted"]
        == metrics["rollout/faults/turns_spanning_update"]
        == 0
    )
    assert metrics["turn/staleness"] == 0.25 and metrics["turn/staleness_max"] == 1
    tokens = sum(s.response_length for s in turns_of(output))
    assert metrics["turn/token_staleness"] == pytest.approx(1 / tokens), (
        "one of the notes' tokens is of old weights"
    )
    assert metrics["turn/mixed_weights_ratio"] == 0, "notes are left out here"
    shown = chatml_tokenizer().decode(others[0].tokens[: -others[0].response_length])
    assert "Your notes:\nthe key is red\n" in shown
