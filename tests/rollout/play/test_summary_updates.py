"""Notes in separate turns across weight updates: aborted by the engine, written by two versions, too old to train."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from advantage.hook import compute_advantages
from rollout import continuous, fixed_turn
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import Sample
from rollout.data_source import EpisodeSource
from rollout.fixed_turn import collect_or_draw
from rollout.generate import generate
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.play.stream import Stream
from rollout.samples import convert_samples_to_train_data
from tests.advantage.batches import make_args
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.play.test_summary_turns import LONG, NOTES, asked, one_slot, plays, turns_of


class Engine(ScriptedEngine):
    """Holds the first request for notes of seed 7 until the test has updated the weights `updates` times.

    It then aborts the request, or with `on_update: continue` ends the notes with the new weights.
    """

    def __init__(self, updates: int = 1, on_update: str = "abort") -> None:
        super().__init__(chatml_tokenizer(), self.play)
        self.updates, self.on_update = updates, on_update
        self.holds, self.updated = asyncio.Event(), asyncio.Event()

    def update(self) -> None:
        self.version = str(int(self.version) + 1)
        if int(self.version) > self.updates:
            self.updated.set()

    async def play(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        version, text, prompt = self.version, plays(body, number), self.tokenizer.decode(body["input_ids"])
        if asked(prompt) and "seed 7 count" in prompt and not self.holds.is_set():
            self.holds.set()
            await self.updated.wait()
            if self.on_update == "abort":
                return self.answer("half a note", body, "abort")
            text = "the key is red"
        answer = self.answer(text, body)
        if self.on_update == "continue":
            tokens = answer["meta_info"]["completion_tokens"]
            ends = {version: min(2, tokens), self.version: tokens}
            answer["meta_info"]["weight_versions"] = [{"version": v, "end": end} for v, end in ends.items()]
        return answer


def shape(output: Any) -> list[tuple[int, int, bool]]:
    """Episode, turn and whether it wrote notes, of every turn."""
    facts = [sample.metadata for sample in turns_of(output)]
    return [(one["episode_id"], one["round_number"], "summary" in one) for one in facts]


async def play(
    folder: Path, engine: Engine, batches: int, between: Callable[[Stream, int], Any], **keys: Any
) -> list[Any]:
    """Continuous batches; `between` is awaited after each."""
    outputs = []
    async with asyncio.timeout(60), engine:
        args = rollout_args(folder, engine.port, **{"memory": NOTES, **LONG, **keys})
        source = EpisodeSource(args)
        try:
            for number in range(batches):
                outputs.append(await collect_or_draw(args, number, source, continuous.collect))
                runtime = await get_runtime(args)
                await between(runtime.stream, number)
        finally:
            await close_runtimes()
    return outputs


@pytest.mark.parametrize("collect", [fixed_turn.collect, continuous.collect])
async def test_aborted_notes_are_asked_for_again_and_change_nothing_else(tmp_path: Path, collect: Any) -> None:
    async def run(aborts: int) -> tuple[Any, list[dict[str, Any]]]:
        left = [aborts]

        def script(body: dict[str, Any], number: int) -> Any:
            if asked(engine.tokenizer.decode(body["input_ids"])) and left[0]:
                left[0] -= 1
                return engine.answer("half a note", body, "abort")
            return plays(body, number)

        async with asyncio.timeout(60), ScriptedEngine(chatml_tokenizer(), script) as engine:
            args = rollout_args(tmp_path, engine.port, memory=NOTES, **LONG, **one_slot(10))
            output = await collect_or_draw(args, 0, EpisodeSource(args), collect)
            await close_runtimes()
        return output, engine.requests

    whole, _ = await run(0)
    output, requests = await run(2)
    assert output.metrics["rollout/faults/turns_aborted"] == 2 and output.metrics["summary/turns"] == 2
    assert requests[4] == requests[5] == requests[6] and requests[4]["sampling_params"]["max_new_tokens"] == 24
    assert shape(output) == [(0, k, k % 5 == 4) for k in range(10)]
    seen = [[(s.tokens, s.rollout_log_probs, s.loss_mask) for s in turns_of(batch)] for batch in (output, whole)]
    assert seen[0] == seen[1]


async def test_notes_that_an_update_aborts_while_a_batch_ends_begin_the_next_batch_once(tmp_path: Path) -> None:
    engine = Engine()

    async def between(stream: Stream, number: int) -> None:
        if number == 0:  # the batch ended with the fourth turn, and the slot plays on
            await engine.holds.wait()
            engine.update()

    first, second = await play(tmp_path, engine, 2, between, **one_slot(4))
    assert shape(first) == [(0, k, False) for k in range(4)]
    assert shape(second) == [(0, k, k == 4) for k in range(4, 8)]
    (bootstrap,) = [s for group in first.samples for s in group if s.metadata["kind"] == "bootstrap"]
    notes = turns_of(second)[0]
    assert bootstrap.tokens[:-1] == notes.tokens[: -notes.response_length], "the critic values the request for notes"
    assert notes.weight_versions == ["2"] and "half a note" not in notes.response
    assert sum(output.metrics["rollout/faults/turns_aborted"] for output in (first, second)) == 1
    assert first.metrics.get("summary/turns", 0) == 0 and second.metrics["summary/turns"] == 1


async def test_an_episode_that_slime_aborts_in_the_notes_asks_for_them_when_it_is_handed_out_again(
    tmp_path: Path,
) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        return engine.answer("half a note", body, "abort") if number == 4 else plays(body, number)

    async with ScriptedEngine(chatml_tokenizer(), script) as engine:
        keys = {"memory": NOTES, **LONG, "max_turns": 6, "partial_rollout": True}
        args = rollout_args(tmp_path, engine.port, **keys, mask_offpolicy_in_partial_rollout=True)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        stopped: Any = await generate(args, sample, RolloutFlags.read(args).sampling_params())
        assert stopped.status == Sample.Status.ABORTED
        samples: Any = await generate(args, sample, RolloutFlags.read(args).sampling_params())
        await close_runtimes()
    assert engine.requests[4] == engine.requests[5]
    assert ["summary" in s.metadata for s in samples] == [k == 4 for k in range(7)]
    assert [any(s.loss_mask) for s in samples] == [k >= 4 for k in range(7)], "the notes are of the new weights"


async def test_notes_of_two_weight_versions_are_one_turn_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    engine = Engine(on_update="continue")

    async def between(stream: Stream, number: int) -> None:
        if number == 0:
            await engine.holds.wait()
            engine.update()

    _, output = await play(tmp_path, engine, 2, between, **one_slot(4), on_update="continue")
    assert shape(output) == [(0, k, k == 4) for k in range(4, 8)]
    notes, *others = turns_of(output)
    assert notes.weight_versions == ["1", "2"] and notes.metadata["mixed_weights"] and all(notes.loss_mask)
    assert [s.weight_versions for s in others] == [["2"]] * 3
    metrics = output.metrics
    assert metrics["rollout/faults/turns_aborted"] == metrics["rollout/faults/turns_spanning_update"] == 0
    assert metrics["turn/staleness"] == 0.25 and metrics["turn/staleness_max"] == 1
    tokens = sum(s.response_length for s in turns_of(output))
    assert metrics["turn/token_staleness"] == pytest.approx(2 / tokens), "two of the notes' tokens are of old weights"
    assert metrics["turn/mixed_weights_ratio"] == 0, "notes are left out here"
    shown = chatml_tokenizer().decode(others[0].tokens[: -others[0].response_length])
    assert "Your notes:\nthe key is red\n" in shown


class TwoSlots(Engine):
    """Seed 8 plays 12 turns while the notes of seed 7 are held, and goes on when seed 7 has played five turns more."""

    def __init__(self) -> None:
        super().__init__(updates=2, on_update="continue")
        self.turns, self.goes_on = {7: 0, 8: 0}, asyncio.Event()

    async def play(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        seed = 7 if "seed 7 count" in self.tokenizer.decode(body["input_ids"]) else 8
        self.turns[seed] += 1
        if self.turns[7] == 10:
            self.goes_on.set()
        if seed == 8 and self.turns[8] > 12:
            await self.goes_on.wait()
        return await super().play(body, number)


async def stale_notes(folder: Path) -> Any:
    """The third of three batches, whose notes were begun two updates ago."""
    engine = TwoSlots()

    async def between(stream: Stream, number: int) -> None:
        await engine.holds.wait()
        engine.update()
        while number == 1 and stream._playing:
            await asyncio.sleep(0.01)

    keys = {"n_env": 2, "rollout_batch_size": 8, "global_batch_size": 8, "on_update": "continue"}
    *_, output = await play(folder, engine, 3, between, **keys, stale_turns="mask", max_staleness=1)
    return output


async def test_notes_that_are_too_old_lose_their_loss_and_keep_their_place(tmp_path: Path) -> None:
    output = await stale_notes(tmp_path)
    (masked,) = [s for s in turns_of(output) if not any(s.loss_mask)]
    assert "summary" in masked.metadata and masked.weight_versions == ["1", "3"]
    assert output.metrics["rollout/turns_masked_as_stale"] == 1
    assert [one for one in shape(output) if one[0] == 0][:6] == [(0, k, k % 5 == 4) for k in range(4, 10)]
    following = next(s for s in turns_of(output) if s.metadata["round_number"] == 5)
    assert "Your notes:\nthe key is red\n" in chatml_tokenizer().decode(following.tokens)


async def test_masked_notes_change_no_credit_of_other_turns(tmp_path: Path) -> None:
    """With notes between two turns of the same batch, too."""
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port, memory=NOTES, **LONG, **one_slot(10))
        output = await collect_or_draw(args, 0, EpisodeSource(args))
        await close_runtimes()
    flat = [sample for group in output.samples for sample in group]
    at = next(k for k, s in enumerate(flat) if "summary" in s.metadata)

    def credit(mask: int) -> list[tuple[list[float], list[float]]]:
        generator = torch.Generator().manual_seed(0)
        data = convert_samples_to_train_data(rollout_args(tmp_path), output.samples)
        lengths = data["response_lengths"]
        data["loss_masks"] = [torch.tensor(row) for row in data["loss_masks"]]
        data["loss_masks"][at] = torch.full((lengths[at],), mask)
        data["values"] = [torch.rand(n, generator=generator, dtype=torch.float64) for n in lengths]
        data["kl"] = [torch.zeros(n) for n in lengths]
        data["total_lengths"] = [len(row) for row in data["tokens"]]
        compute_advantages(make_args(kl_coef=0.0), data)
        return [(a.tolist(), r.tolist()) for a, r in zip(data["advantages"], data["returns"], strict=True)]

    masked, trained = credit(0), credit(1)
    assert 0 < at < 9 and not any(masked[at][0]) and all(trained[at][0])
    assert [pair for k, pair in enumerate(masked) if k != at] == [pair for k, pair in enumerate(trained) if k != at]
