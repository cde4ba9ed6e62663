"""Whole episodes inside slime's own outer loop: one sample with all turns, or one sample per
turn."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import generate as generate_module
from rollout.bridge import framework
from rollout.bridge.framework import Sample
from rollout.bridge.sample import row_of
from rollout.data_source import EpisodeSource
from rollout.errors import EngineError
from rollout.generate import parked_episodes
from tests.fixtures.playing import both_histories, playing, plays
from tests.fixtures.scripted_engine import ABORTED

LONG = {"env": {"max_length": 30}, "seed_start": 7}
GOES_ON = {**LONG, "partial_rollout": True}


@pytest.fixture
def play(tmp_path: Path) -> Any:
    """Plays an episode, in several calls if slime hands it out again; returns its samples and the
    engine."""

    async def run(
        script: Any = plays, calls: int = 1, session: str | None = None, **keys: Any
    ) -> Any:
        evaluation = keys.pop("evaluation", False)
        async with playing(tmp_path, script, **keys) as played:
            sample = played.source.get_samples(1)[0][0]
            sample.session_id = session
            for _ in range(calls):
                result = await played.episode(sample, evaluation)
            run.parked = len(parked_episodes(await played.runtime()))
        return result, played.engine

    return run


async def test_window_history_gives_one_sample_per_turn_in_one_training_group(play: Any) -> None:
    """And requests carry the sample's session if the router hashes by key."""
    samples, engine = await play(**LONG, session="abc", router_policy="consistent_hashing")
    assert {headers["X-SMG-Routing-Key"] for headers in engine.headers} == {"abc"}
    rows = [row_of(sample) for sample in samples]
    assert len(samples) == len(engine.requests) > 3
    assert len({s.rollout_id for s in samples}) == len({row.segment for row in rows}) == 1
    assert [row.first_turn for row in rows] == list(range(len(samples)))
    assert [row.terminated for row in rows] == [False] * (len(samples) - 1) + [True]
    total = sum(turn.reward for row in rows for turn in row.turns)
    assert all(s.reward == pytest.approx(total) for s in samples)
    for sample, request in zip(samples, engine.requests, strict=True):
        assert sample.tokens[: -sample.response_length] == request["input_ids"]
    # slime reads these when it puts a finished episode back, hands it out again, masks it, or
    # filters its group.
    assert isinstance(samples, list) and samples.status == Sample.Status.COMPLETED
    assert (
        samples.reward == samples[0].reward
        and samples.session_id == "abc"
        and samples.index == samples[0].index
    )
    assert not samples.response and samples.metadata == {}
    samples.loss_mask = [0] * samples.response_length
    assert all(s.loss_mask == [0] * s.response_length for s in samples)


def aborts_at(number: int) -> Any:
    return lambda body, request: ABORTED if request == number else plays(body, request)


@pytest.mark.parametrize(
    ("calls", "is_full"), [(2, True), (1, False)], ids=["handed out again", "goes on"]
)
async def test_an_aborted_episode_continues_where_it_stopped(
    play: Any, monkeypatch: pytest.MonkeyPatch, calls: int, is_full: bool
) -> None:
    monkeypatch.setattr(generate_module, "outer_loop_is_full", lambda: None if is_full else False)
    samples, engine = await play(aborts_at(3), calls=calls, **GOES_ON)
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

    monkeypatch.setattr(framework, "HAS_SLIME", True)
    monkeypatch.delitem(sys.modules, "slime.rollout.sglang_rollout", raising=False)
    assert not framework.outer_loop_is_full()
    monkeypatch.setitem(
        sys.modules, "slime.rollout.sglang_rollout", SimpleNamespace(GenerateState=GenerateState)
    )
    assert not framework.outer_loop_is_full()
    Registry._instances[GenerateState] = GenerateState()
    assert framework.outer_loop_is_full()


@both_histories
async def test_turns_from_before_an_abort_are_masked_if_slime_asks_for_it(
    play: Any, history: str
) -> None:
    flags = {**GOES_ON, "mask_offpolicy_in_partial_rollout": True, "history": history}
    result, _ = await play(aborts_at(3), calls=2, **flags)
    parts = result if history == "window" else [result]
    trained = [
        any(part.loss_mask[turn.start : turn.end]) for part in parts for turn in row_of(part).turns
    ]
    assert trained == [False] * 3 + [True] * (len(trained) - 3) and len(trained) > 3


async def test_an_aborted_episode_that_is_not_handed_out_again_closes_its_environment(
    play: Any,
) -> None:
    sample, engine = await play(aborts_at(3), **LONG)
    assert sample.status == Sample.Status.ABORTED and len(engine.requests) == 4
    assert play.parked == 0


async def test_groups_that_slime_put_back_are_handed_out_again_after_a_restart(
    tmp_path: Path,
) -> None:
    """Finished episodes in them, too."""
    async with playing(tmp_path, n_samples_per_prompt=2, **LONG) as run:
        ((first, second),) = run.source.get_samples(1)
        finished = await run.episode(first)
        run.source.add_samples([[finished, second]])
        run.source.save(0)
        run.args.load = run.args.save
        resumed = EpisodeSource(run.args)
        resumed.load(0)
    group, fresh = resumed.get_samples(2)
    assert [sample.index for sample in group] == [finished.index, second.index]
    assert group[0].metadata["seed"] == finished[0].metadata["seed"]
    assert group[1].metadata == second.metadata and fresh[0].index > second.index


async def test_a_lost_environment_gives_a_failed_sample_that_trains_nothing(play: Any) -> None:
    (sample,), _ = await play(env={"max_length": 30, "raise_at": 2}, seed_start=7)
    assert sample.status == Sample.Status.FAILED
    assert sample.loss_mask == [0] and "the game broke" in sample.metadata["fault"]


@pytest.mark.parametrize(("settings", "listed"), [
    ({"history": "window"}, True),
    ({"history": "full"}, False),
    ({"history": "full", "bootstrap_on_time_limit": True}, False),
    ({"history": "full", "samples": "turns"}, True),
])  # fmt: skip
async def test_every_episode_of_a_run_comes_as_a_list_or_none_does(
    play: Any, settings: dict[str, Any], listed: bool
) -> None:
    ends = {"finished": {}, "truncated": {"time_limit": 2}, "failed": {"raise_at": 2}}
    for env in ends.values():
        result, _ = await play(env={"max_length": 30, **env}, seed_start=7, **settings)
        assert isinstance(result, list) == listed


async def test_an_engine_that_only_aborts_ends_in_an_error(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_module, "outer_loop_is_full", lambda: False)
    with pytest.raises(EngineError, match="max_turn_retries"):
        await play(lambda body, number: ABORTED, max_turn_retries=1, **GOES_ON)


async def test_evaluation_never_continues_a_training_episode(tmp_path: Path) -> None:
    """slime numbers evaluation samples from 0, as training samples are."""
    async with playing(tmp_path, aborts_at(3), **GOES_ON) as run:
        training, held_out = (EpisodeSource(run.args).get_samples(1)[0][0] for _ in range(2))
        await run.episode(training)
        await run.episode(held_out, evaluation=True)
        assert len(parked_episodes(await run.runtime())) == 1


@both_histories
async def test_an_evaluation_counts_each_episode_once_and_leaves_room_for_its_own_responses(
    play: Any, history: str
) -> None:
    """slime extends its data by a returned list, and reports the mean over all samples."""
    lengths = {"rollout_max_context_len": 1024, "eval_max_response_len": 400}
    found, engine = await play(evaluation=True, history=history, **LONG, **lengths)
    (last,) = found if history == "window" else [found]
    assert last.metadata["episode_turns"] == len(engine.requests) > 1
    sizes = [(len(r["input_ids"]), r["sampling_params"]["max_new_tokens"]) for r in engine.requests]
    assert all(prompt + longest <= 1024 for prompt, longest in sizes), sizes


async def test_parked_episodes_are_bounded_and_closed_with_their_runtime(tmp_path: Path) -> None:
    closed: list[Any] = []

    async def note(parked: Any) -> None:
        closed.append(parked)

    sizes = {"rollout_batch_size": 2, "global_batch_size": 2}
    async with playing(tmp_path, lambda body, number: ABORTED, **sizes, **GOES_ON) as run:
        samples = [sample for (sample,) in run.source.get_samples(7)]
        for sample in samples:
            await run.episode(sample)
        runtime = await run.runtime()
        assert len(parked_episodes(runtime)) == 4 and parked_episodes(runtime).dropped == 3
        kept = [parked_episodes(runtime).take(sample) for sample in samples]
        assert [parked is not None for parked in kept] == [False] * 3 + [True] * 4
        for parked in kept[3:]:
            parked.episode.close = partial(note, parked)
            await parked_episodes(runtime).park(parked, 4)
    assert len(closed) == 4 and not parked_episodes(runtime)
