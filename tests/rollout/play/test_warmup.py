"""Critic warm-up: batches drawn from the kept segments."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advantage.settings import ValuePretrainingSettings, WarmupSettings
from rollout.errors import ConfigError
from rollout.play.kept import draw, play_or_draw
from rollout.turn import Batch, FinishReason, Generation, Prompt, Segment, StopReason, Turn


def segment(number: int, length: int, ended: bool) -> Segment:
    turns = tuple(
        Turn(
            episode_id=number,
            index=k,
            prompt=Prompt([number, k]),
            generation=Generation([5], [-1.0], "x", FinishReason.STOP),
            action="a",
            valid=True,
            executed_action="a",
            reward=0.0,
            terminated=ended and k == length - 1,
            truncated=False,
            action_span=None,
        )
        for k in range(length)
    )
    if ended:
        return Segment("t", turns, None, StopReason.TERMINATED)
    return Segment("t", turns, Prompt([number, length]), StopReason.CUT)


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


def test_phases_follow_one_another() -> None:
    warmup = WarmupSettings(w_epoch=2, w_iter=1, fraction=1.0)
    settings = SimpleNamespace(critic_warmup=warmup, value_pretraining=ValuePretrainingSettings())
    flags = SimpleNamespace(global_batch_size=1, rollout_seed=0)
    kept: list[Segment] = []

    async def play() -> Batch:
        return Batch([segment(len(kept), 1, True)])

    def metrics_of(rollout_id: int) -> dict[str, float]:
        runtime: Any = SimpleNamespace(settings=settings, flags=flags, stream=None)
        return asyncio.run(play_or_draw(play, kept, rollout_id, runtime)).metrics

    assert [metrics_of(k) for k in range(5)] == [
        {"warmup/kept_turns": 1.0},
        {"warmup/kept_turns": 2.0},
        {"warmup/drawn_turns": 2.0},
        {},
        {},
    ]
    assert kept == []
