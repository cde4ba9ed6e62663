"""Whole episodes inside slime's own outer loop: one sample with all turns, or one sample per turn."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from advantage.turn_table import TurnRow
from rollout import generate as generate_module
from rollout.bridge import framework
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import Sample
from rollout.bridge.sample import row_of
from rollout.data_source import EpisodeSource
from rollout.errors import EngineError
from rollout.generate import generate, parked_episodes
from rollout.play.runtime import close_runtimes, get_runtime
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw


def plays(body: dict[str, Any], number: int) -> str:
    return ("THINK: so.\nACTION: left", "right", "ACTION: dance")[draw(body, 3)]


def row(sample: Sample) -> TurnRow:
    return row_of(sample)


@pytest.fixture
async def play(tmp_path: Path) -> Any:
    async def run(script: Any = plays, calls: int = 1, **overrides: Any) -> Any:
        async with ScriptedEngine(chatml_tokenizer(), script) as engine:
            args = rollout_args(tmp_path, engine.port, **overrides)
            sample = EpisodeSource(args).get_samples(1)[0][0]
            sample.session_id = overrides.get("session")
            try:
                for _ in range(calls):
                    result = await generate(args, sample, RolloutFlags.read(args).sampling_params())
                run.parked = len(parked_episodes(await get_runtime(args)))
            finally:
                await close_runtimes()
            return result, engine

    return run


async def test_window_history_gives_one_sample_per_turn_in_one_training_group(play: Any) -> None:
    samples, engine = await play(env={"max_length": 30}, seed_start=7)
    assert len(samples) == len(engine.requests) > 3
    assert len({s.rollout_id for s in samples}) == 1
    assert [row(s).first_turn for s in samples] == list(range(len(samples)))
    assert len({row(s).segment for s in samples}) == 1
    assert [row(s).terminated for s in samples] == [False] * (len(samples) - 1) + [True]
    total = sum(turn.reward for s in samples for turn in row(s).turns)
    assert all(s.reward == pytest.approx(total) for s in samples)
    for sample, request in zip(samples, engine.requests, strict=True):
        assert sample.tokens[: -sample.response_length] == request["input_ids"]


async def test_full_history_gives_one_sample_whose_mask_covers_exactly_the_models_tokens(play: Any) -> None:
    sample, engine = await play(history="full", env={"max_length": 30}, seed_start=7)
    tokenizer = chatml_tokenizer()
    response = sample.tokens[-sample.response_length :]
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    spans = row(sample).turns
    assert len(spans) == len(engine.requests)
    for span in spans:
        assert all(sample.loss_mask[span.start : span.end])
        assert tokenizer.decode(response[span.start : span.end]).endswith("<|im_end|>")
    assert sum(sample.loss_mask) == sum(span.end - span.start for span in spans)
    for request, span in zip(engine.requests, spans, strict=True):
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length + span.start]
        assert request["input_ids"] == prompt, "every turn was generated from exactly the tokens it is trained after"
    assert sample.status == Sample.Status.COMPLETED


def aborts_at(number: int) -> Any:
    def script(body: dict[str, Any], request: int) -> Any:
        if request == number:
            return {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
        return plays(body, request)

    return script


GOES_ON = {"env": {"max_length": 30}, "seed_start": 7, "partial_rollout": True}


async def test_an_aborted_episode_continues_where_it_stopped_when_it_is_handed_out_again(play: Any) -> None:
    samples, engine = await play(aborts_at(3), calls=2, **GOES_ON)
    assert engine.requests[3]["input_ids"] == engine.requests[4]["input_ids"]
    assert [s.metadata["round_number"] for s in samples] == list(range(len(engine.requests) - 1))
    assert all(all(s.loss_mask) for s in samples)


async def test_an_episode_that_is_between_two_requests_when_slime_aborts_stops_there_too(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([False] * 3 + [True])
    monkeypatch.setattr(generate_module, "outer_loop_is_full", lambda: next(asked, False))
    sample, engine = await play(**GOES_ON)
    assert sample.status == Sample.Status.ABORTED and len(engine.requests) == 3
    assert play.parked == 1


def test_slimes_loop_is_asked_whether_it_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry(type):
        _instances: dict[Any, Any] = {}

    class GenerateState(metaclass=Registry):
        aborted = True

    monkeypatch.delitem(sys.modules, "slime.rollout.sglang_rollout", raising=False)
    assert not framework.outer_loop_is_full()
    monkeypatch.setitem(sys.modules, "slime.rollout.sglang_rollout", SimpleNamespace(GenerateState=GenerateState))
    assert not framework.outer_loop_is_full()
    Registry._instances[GenerateState] = GenerateState()
    assert framework.outer_loop_is_full()


@pytest.mark.parametrize("history", ["window", "full"])
async def test_turns_from_before_an_abort_are_masked_if_slime_asks_for_it(play: Any, history: str) -> None:
    flags = {**GOES_ON, "mask_offpolicy_in_partial_rollout": True, "history": history}
    result, _ = await play(aborts_at(3), calls=2, **flags)
    if history == "window":
        trained = [any(s.loss_mask) for s in result]
    else:
        trained = [any(result.loss_mask[span.start : span.end]) for span in row(result).turns]
    assert trained == [False] * 3 + [True] * (len(trained) - 3)
    assert len(trained) > 3


async def test_an_aborted_episode_that_is_not_handed_out_again_closes_its_environment(play: Any) -> None:
    sample, engine = await play(aborts_at(3), env={"max_length": 30}, seed_start=7)
    assert sample.status == Sample.Status.ABORTED and len(engine.requests) == 4
    assert play.parked == 0


async def test_an_episodes_list_of_samples_has_the_attributes_that_slime_reads(play: Any) -> None:
    """slime reads these when it puts a finished episode back, hands it out again, masks it, or filters its group."""
    samples, _ = await play(env={"max_length": 30}, seed_start=7, session="abc")
    assert isinstance(samples, list) and samples.status == Sample.Status.COMPLETED
    assert samples.reward == samples[0].reward and samples.session_id == "abc" and samples.index == samples[0].index
    assert not samples.response and samples.metadata == {}
    samples.loss_mask = [0] * samples.response_length
    assert all(s.loss_mask == [0] * s.response_length for s in samples)


async def test_a_finished_episode_in_a_group_that_slime_put_back_can_be_saved(play: Any, tmp_path: Path) -> None:
    samples, engine = await play(env={"max_length": 30}, seed_start=7)
    args = rollout_args(tmp_path, engine.port, env={"max_length": 30}, seed_start=7, load=str(tmp_path / "save"))
    source, resumed = EpisodeSource(args), EpisodeSource(args)
    source.add_samples([[samples]])
    source.save(0)
    resumed.load(0)
    (group,) = resumed.get_samples(1)
    assert group[0].metadata["seed"] == samples[0].metadata["seed"] and group[0].index == samples.index


async def test_requests_carry_the_samples_session_if_the_router_hashes_by_key(play: Any) -> None:
    _, engine = await play(env={"max_length": 3}, router_policy="consistent_hashing", session="abc")
    assert {headers["X-SMG-Routing-Key"] for headers in engine.headers} == {"abc"}


async def test_a_lost_environment_gives_a_failed_sample_that_trains_nothing(play: Any) -> None:
    (sample,), _ = await play(env={"max_length": 30, "raise_at": 2}, seed_start=7)
    assert sample.status == Sample.Status.FAILED
    assert sample.loss_mask == [0] and "the game broke" in sample.metadata["fault"]


@pytest.mark.parametrize(("settings", "listed"), [
    ({"history": "window"}, True),
    ({"history": "full"}, False),
    ({"history": "full", "bootstrap_on_time_limit": True}, True),
])  # fmt: skip
async def test_every_episode_of_a_run_comes_as_a_list_or_none_does(
    play: Any, settings: dict[str, Any], listed: bool
) -> None:
    ends = {"finished": {}, "truncated": {"time_limit": 2}, "failed": {"raise_at": 2}}
    for env in ends.values():
        result, _ = await play(env={"max_length": 30, **env}, seed_start=7, **settings)
        assert isinstance(result, list) == listed


async def test_a_turn_aborted_by_the_engine_is_sent_again_while_slimes_loop_continues(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "outer_loop_is_full", lambda: False)
    samples, engine = await play(aborts_at(3), **GOES_ON)
    assert engine.requests[3]["input_ids"] == engine.requests[4]["input_ids"]
    assert [s.metadata["round_number"] for s in samples] == list(range(len(engine.requests) - 1))


async def test_an_engine_that_only_aborts_ends_in_an_error(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "outer_loop_is_full", lambda: False)
    abort = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
    with pytest.raises(EngineError, match="max_turn_retries"):
        await play(lambda body, number: abort, max_turn_retries=1, **GOES_ON)


async def test_evaluation_never_continues_a_training_episode(tmp_path: Path) -> None:
    """slime numbers evaluation samples from 0, as training samples are."""
    async with ScriptedEngine(chatml_tokenizer(), aborts_at(3)) as engine:
        args = rollout_args(tmp_path, engine.port, **GOES_ON)
        training, held_out = (EpisodeSource(args).get_samples(1)[0][0] for _ in range(2))
        try:
            await generate(args, training, RolloutFlags.read(args).sampling_params())
            await generate(args, held_out, RolloutFlags.read(args).sampling_params(), evaluation=True)
            assert len(parked_episodes(await get_runtime(args))) == 1
        finally:
            await close_runtimes()


@pytest.mark.parametrize("history", ["window", "full"])
async def test_an_evaluation_counts_each_episode_once_whatever_its_length(tmp_path: Path, history: str) -> None:
    """slime extends its data by a returned list, and reports the mean over all samples."""
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port, env={"max_length": 30}, seed_start=7, history=history)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        params = RolloutFlags.read(args).sampling_params(evaluation=True)
        try:
            found = await generate(args, sample, params, evaluation=True)
        finally:
            await close_runtimes()
    (last,) = found if history == "window" else [found]
    assert len(engine.requests) > 3 and row(last).terminated
    assert last.metadata["episode_turns"] == len(engine.requests)


async def test_an_evaluation_budgets_with_its_own_response_length(tmp_path: Path) -> None:
    """Room is left for its longer responses, or the engine would get more than its context."""
    more = {"rollout_max_response_len": 32, "rollout_max_context_len": 1024, "eval_max_response_len": 400}
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port, history="full", env={"max_length": 30}, **more)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        try:
            params = RolloutFlags.read(args).sampling_params(evaluation=True)
            await generate(args, sample, params, evaluation=True)
        finally:
            await close_runtimes()
    sizes = [(len(r["input_ids"]), r["sampling_params"]["max_new_tokens"]) for r in engine.requests]
    assert sizes and all(prompt + longest <= 1024 for prompt, longest in sizes), sizes


async def test_parked_episodes_are_bounded_and_closed_with_their_runtime(tmp_path: Path) -> None:
    abort = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: abort) as engine:
        args = rollout_args(tmp_path, engine.port, rollout_batch_size=2, global_batch_size=2, **GOES_ON)
        samples = [sample for (sample,) in EpisodeSource(args).get_samples(7)]
        try:
            for sample in samples:
                await generate(args, sample, RolloutFlags.read(args).sampling_params())
            runtime = await get_runtime(args)
            assert len(parked_episodes(runtime)) == 4 and parked_episodes(runtime).dropped == 3
            kept = [parked_episodes(runtime).take(sample) for sample in samples]
            assert [parked is not None for parked in kept] == [False] * 3 + [True] * 4
            closed = []
            for parked in kept[3:]:
                parked.episode.close = partial(_note, closed, parked)
                await parked_episodes(runtime).park(parked, 4)
        finally:
            await close_runtimes()
        assert len(closed) == 4 and not parked_episodes(runtime)


async def _note(closed: list[Any], parked: Any) -> None:
    closed.append(parked)


async def test_a_limit_ends_the_episode_as_truncated(play: Any) -> None:
    samples, _ = await play(max_turns=2, env={"max_length": 30}, seed_start=7)
    assert [s.status for s in samples] == [Sample.Status.TRUNCATED] * 2
    assert row(samples[-1]).truncated
