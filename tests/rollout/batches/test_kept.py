"""Kept batches: those that the critic's warm-up draws, and episodes joined over batches for value
pretraining."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.batches.kept import choose_held_out, draw, join_episodes
from rollout.errors import ConfigError
from rollout.turn import FinishReason, Generation, Prompt, Segment, StopReason, Turn


def segment(number: int, length: int, ended: bool) -> Segment:
    generation = Generation([5], [-1.0], "x", FinishReason.STOP)
    prompts = [Prompt([number, k]) for k in range(length + 1)]
    turns = [
        Turn(number, k, prompts[k], generation, terminated=ended and k == length - 1)
        for k in range(length)
    ]
    stop = StopReason.TERMINATED if ended else StopReason.CUT
    return Segment("t", tuple(turns), None if ended else prompts[-1], stop)


KEPT = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=3, max_size=30).map(
    lambda items: [segment(k, length, ended) for k, (length, ended) in enumerate(items)]
)


@given(kept=KEPT, fraction=st.floats(0.05, 1.0), step=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_draw_holds_whole_steps_of_distinct_turns_and_every_open_end_has_its_bootstrap(
    kept: list[Segment], fraction: float, step: int, seed: int
) -> None:
    total = sum(len(s.turns) for s in kept)
    drawn = draw(kept, fraction, step, seed)
    turns = [(t.episode_id, t.index) for s in drawn for t in s.turns]
    assert len(turns) == len(set(turns))
    assert len(turns) % step == 0
    assert abs(len(turns) - max(step, fraction * total)) <= step
    for part in drawn:
        last = part.turns[-1]
        assert [t.index for t in part.turns] == list(range(len(part.turns)))
        if not last.terminated:
            assert part.bootstrap is not None
            assert part.bootstrap.token_ids == [last.episode_id, last.index + 1]
    assert drawn == draw(kept, fraction, step, seed)


def test_drawing_without_kept_turns_says_how_to_resume() -> None:
    with pytest.raises(ConfigError, match="resume with the rollout checkpoint"):
        draw([], 0.1, 8, 0)


def batches(lengths: list[int], per_batch: int) -> list[Segment]:
    """Episodes of these lengths, played one after another and cut into batches of `per_batch`
    turns."""
    parts, room = [], per_batch
    for number, length in enumerate(lengths):
        whole, start = segment(number, length, ended=True), 0
        while start < length:
            end = min(length, start + room)
            cut = end < length
            bootstrap, stop = (
                (whole.turns[end].prompt, StopReason.CUT) if cut else (None, whole.stop)
            )
            parts.append(
                replace(whole, turns=whole.turns[start:end], bootstrap=bootstrap, stop=stop)
            )
            room = (room - (end - start)) or per_batch
            start = end
    return parts


LENGTHS = st.lists(st.integers(1, 12), min_size=10, max_size=40)


@given(lengths=LENGTHS, per_batch=st.integers(1, 9))
def test_an_episode_is_one_segment_again_however_many_batches_cut_it(
    lengths: list[int], per_batch: int
) -> None:
    assert join_episodes(batches(lengths, per_batch)) == [
        segment(n, length, True) for n, length in enumerate(lengths)
    ]


@given(
    lengths=LENGTHS, per_batch=st.integers(1, 9), share=st.floats(0.05, 0.9), seed=st.integers(0, 9)
)
def test_whole_episodes_are_held_out_about_as_many_as_asked_for(
    lengths: list[int], per_batch: int, share: float, seed: int
) -> None:
    held_out = choose_held_out(join_episodes(batches(lengths, per_batch)), share, seed)
    turns = sum(lengths[episode] for episode in held_out)
    assert 0 < len(held_out) < len(lengths)
    assert turns < share * sum(lengths) + max(lengths)
    assert turns >= share * sum(lengths) or len(held_out) == len(lengths) - 1
    assert held_out == choose_held_out(join_episodes(batches(lengths, per_batch)), share, seed)


def test_an_episode_with_a_gap_stays_on_one_side() -> None:
    """Its environment was lost in between; both parts have its id."""
    whole = segment(0, 8, ended=True)
    parts = [replace(whole, turns=whole.turns[:3]), replace(whole, turns=whole.turns[5:])]
    assert join_episodes(parts) == parts
    others = [segment(n, 4, True) for n in range(1, 12)]
    assert len(choose_held_out([*parts, *others], 0.99, 0)) == 11


def test_a_single_episode_cannot_be_held_out_and_few_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="4 turns of one episode.*value_pretraining.batches"):
        choose_held_out([segment(0, 4, True)], 0.2, 0)
    assert len(choose_held_out([segment(n, 4, True) for n in range(9)], 0.1, 0)) == 1
    assert "only 9 episodes" in caplog.text
    caplog.clear()
    choose_held_out([segment(n, 4, True) for n in range(10)], 0.1, 0)
    assert not caplog.text
