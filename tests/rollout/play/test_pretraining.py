"""Value pretraining's data: episodes joined over batches and held out whole, and the flags that it needs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.play.kept import choose_held_out, join_episodes
from rollout.turn import Segment, StopReason
from tests.rollout.play.test_warmup import segment


def batches(lengths: list[int], per_batch: int) -> list[Segment]:
    """Episodes of these lengths, played one after another and cut into batches of `per_batch` turns."""
    parts, room = [], per_batch
    for number, length in enumerate(lengths):
        whole, start = segment(number, length, ended=True), 0
        while start < length:
            end = min(length, start + room)
            cut = end < length
            bootstrap, stop = (whole.turns[end].prompt, StopReason.CUT) if cut else (None, whole.stop)
            parts.append(replace(whole, turns=whole.turns[start:end], bootstrap=bootstrap, stop=stop))
            room = (room - (end - start)) or per_batch
            start = end
    return parts


LENGTHS = st.lists(st.integers(1, 12), min_size=10, max_size=40)


@given(lengths=LENGTHS, per_batch=st.integers(1, 9))
def test_an_episode_is_one_segment_again_however_many_batches_cut_it(lengths: list[int], per_batch: int) -> None:
    assert join_episodes(batches(lengths, per_batch)) == [segment(n, length, True) for n, length in enumerate(lengths)]


@given(lengths=LENGTHS, per_batch=st.integers(1, 9), share=st.floats(0.05, 0.9), seed=st.integers(0, 9))
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


def test_too_few_episodes_say_what_to_raise() -> None:
    with pytest.raises(ConfigError, match="36 turns of 9 episodes.*raise value_pretraining.batches"):
        choose_held_out([segment(n, 4, True) for n in range(9)], 0.2, 0)
