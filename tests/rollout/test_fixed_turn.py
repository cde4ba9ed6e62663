"""Fixed-turn batches: exact counts, no turn lost or doubled, cut episodes bootstrapped, faults
bounded."""

import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from advantage.turn_table import TurnKind, TurnRow
from rollout.bridge.sample import row_of
from rollout.errors import ConfigError, EncodingError, FailureBudgetError
from rollout.fixed_turn import generate_rollout
from rollout.play.prompts import NextPrompt, Prompts
from rollout.turn import Turn
from tests.cases import some
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import (
    no_gap_and_none_twice,
    place_of,
    places_of,
    play_batches,
    turns_of,
)
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.warm_python import warm_players

Collect = Callable[..., Awaitable[Any]]


@pytest.fixture(params=[1])
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many processes play: `@wide` runs a test with several, too."""
    with warm_players():
        yield request.param


wide = pytest.mark.parametrize("processes", some([1, 2, 4], [1]), indirect=True)
ACCOUNTING = [
    pytest.param(
        count,
        quota,
        seed,
        marks=() if (count, seed) in ((1, 0), (1, 2), (2, 1)) else pytest.mark.slow,
    )
    for count, quota, seed in itertools.product((1, 2, 4), ("global", "per_env"), range(3))
]


@pytest.fixture
def collect(processes: int, tmp_path: Path) -> Collect:
    """Plays `batches` batches of the counting game; returns slime's training outputs."""

    async def play(batches: int = 1, **keys: Any) -> Any:
        outputs, _ = await play_batches(tmp_path, batches, rollout_processes=processes, **keys)
        return outputs

    return play


@pytest.mark.parametrize(("processes", "quota", "seed"), ACCOUNTING, indirect=["processes"])
async def test_every_batch_holds_exactly_its_turns_and_no_turn_is_lost_or_doubled(
    collect: Collect, quota: str, seed: int
) -> None:
    jitter = random.Random(seed)
    outputs = await collect(
        batches=4,
        delay=lambda number: jitter.random() * 0.01,
        turn_quota=quota,
        seed_start=seed * 100,
        env={"max_length": 5 + 10 * seed},
    )
    assert [len(turns_of(output)) for output in outputs] == [24] * 4
    no_gap_and_none_twice(places_of(*outputs))


@wide
@pytest.mark.parametrize(("n_env", "turns"), [(9, 4), (12, 8), (10, 5)])
async def test_with_more_slots_than_turns_every_slot_gets_its_share_over_the_batches(
    collect: Collect, n_env: int, turns: int
) -> None:
    outputs = await collect(
        batches=n_env,
        n_env=n_env,
        rollout_batch_size=turns,
        global_batch_size=turns,
        env={"max_length": 40},
    )
    per_slot = Counter(episode % n_env for episode, _ in places_of(*outputs))
    assert per_slot == dict.fromkeys(range(n_env), turns)


@wide
async def test_an_episode_cut_by_the_batch_gets_one_bootstrap_sample_with_its_next_prompt(
    collect: Collect,
) -> None:
    first, second = await collect(batches=2, turn_quota="per_env", env={"max_length": 40})
    cut = 0
    for group in first.samples:
        *turns, last = group
        if last.metadata["kind"] != "bootstrap":
            assert row_of(group[-1]).terminated
            continue
        cut += 1
        assert last.rollout_id == turns[-1].rollout_id
        assert (last.response_length, last.loss_mask, last.reward) == (1, [0], 0.0)
        assert row_of(last) == TurnRow(
            row_of(turns[-1]).segment, turns[-1].metadata["round_number"] + 1, TurnKind.BOOTSTRAP
        )
        follower = next(sample for sample in turns_of(second) if place_of(sample) == place_of(last))
        prompt = follower.tokens[: len(follower.tokens) - follower.response_length]
        assert last.tokens[:-1] == prompt, (
            "the bootstrap state is the prompt that the next batch really starts from"
        )
    assert cut > 0


def limited_groups(output: Any) -> list[Any]:
    """The samples of each episode that its time limit ended."""
    found = [group for group in output.samples if any(row_of(s).truncated for s in group)]
    assert found
    return found


@wide
@pytest.mark.parametrize("bootstrap", [False, True])
async def test_a_time_limit_is_bootstrapped_from_the_final_observation_only_when_asked(
    collect: Collect, bootstrap: bool
) -> None:
    outputs = await collect(
        bootstrap_on_time_limit=bootstrap, env={"max_length": 50, "time_limit": 3}, seed_start=1000
    )
    for group in limited_groups(outputs[0]):
        assert (group[-1].metadata["kind"] == "bootstrap") == bootstrap
        if bootstrap:
            text = chatml_tokenizer().decode(group[-1].tokens)
            assert "count 3" in text.rsplit("Current Observation:", 1)[1]


async def test_a_time_limit_whose_final_observation_cannot_be_encoded_is_not_bootstrapped(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt before it shows another state, so its value must not stand in."""
    after = Prompts.after

    async def broken_at_the_end(prompts: Prompts, turn: Turn, may_write_notes: bool) -> NextPrompt:
        if prompts.reply.done:
            raise EncodingError("the picture cannot be read")
        return await after(prompts, turn, may_write_notes)

    monkeypatch.setattr(Prompts, "after", broken_at_the_end)
    (output,) = await collect(
        bootstrap_on_time_limit=True, env={"max_length": 50, "time_limit": 3}, seed_start=1000
    )
    groups = limited_groups(output)
    assert all(sample.metadata["kind"] == "turn" for group in groups for sample in group)


async def test_an_end_on_the_time_limits_last_step_counts_as_termination(collect: Collect) -> None:
    lengths = [random.Random(seed).randint(1, 4) for seed in range(40)]
    assert 3 in lengths
    (output,) = await collect(env={"max_length": 4, "time_limit": 3}, bootstrap_on_time_limit=True)
    for group in output.samples:
        last = [s for s in group if s.metadata["kind"] == "turn"][-1]
        if lengths[last.metadata["episode_id"]] == 3 and last.metadata["round_number"] == 2:
            assert row_of(last).terminated and not row_of(last).truncated and group[-1] is last


async def test_first_prompts_that_never_fit_stop_the_batch_with_the_flag_to_raise(
    collect: Collect,
) -> None:
    with pytest.raises(FailureBudgetError, match="--rollout-max-context-len"):
        await collect(rollout_max_context_len=40)


@wide
async def test_a_broken_environment_is_abandoned_and_its_turns_so_far_are_kept_and_bootstrapped(
    collect: Collect,
) -> None:
    (output,) = await collect(
        env={"max_length": 30, "raise_at": 2, "raise_seeds": [1]}, turn_quota="per_env"
    )
    assert output.metrics["rollout/faults/episodes_failed"] == 1
    broken = next(g for g in output.samples if g[0].metadata["episode_id"] == 1)
    assert [s.metadata["kind"] for s in broken] == ["turn", "turn", "bootstrap"]
    assert len(turns_of(output)) == 24


@wide
async def test_too_many_broken_environments_stop_the_batch_with_what_reproduces_them(
    collect: Collect,
) -> None:
    with pytest.raises(FailureBudgetError) as error:
        await collect(env={"raise_at": 0}, max_episode_failures_per_batch=3)
    text = str(error.value)
    assert "the game broke" in text and "seed" in text and "tests.fixtures.counting_env" in text
    assert "max_episode_failures_per_batch is 3" in text


def test_another_data_source_is_refused_with_the_flag_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-source-path rollout.data_source.EpisodeSource"):
        generate_rollout(rollout_args(tmp_path), 0, object())  # type: ignore[arg-type]
