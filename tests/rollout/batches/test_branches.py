"""Baselines from continuations: what `group_estimator: branches` compares a turn's return with."""

from pathlib import Path
from typing import Any

import pytest

from rollout.bridge.sample import row_of
from rollout.errors import ConfigError
from tests.fixtures.playing import ANSWERS, playing, plays
from tests.fixtures.scripted_engine import ScriptedEngine

KEYS = {"env": {"max_length": 8}, "seed_start": 7, "group_estimator": "branches", "branches": 2}


async def play(folder: Path, script: Any, **keys: Any) -> tuple[list[Any], ScriptedEngine]:
    """The spans of one episode's turns, and the engine that played it."""
    async with playing(folder, script, **{**KEYS, **keys}) as run:
        samples = await run.episode()
    return [span for sample in samples for span in row_of(sample).turns], run.engine


def to_go(rewards: list[float], gamma: float = 0.99) -> list[float]:
    return [
        sum(gamma**k * reward for k, reward in enumerate(rewards[start:]))
        for start in range(len(rewards))
    ]


async def test_without_luck_each_turns_baseline_is_its_own_return(tmp_path: Path) -> None:
    spans, engine = await play(tmp_path, plays)
    assert len(spans) > 3
    assert [span.baseline for span in spans] == pytest.approx(
        to_go([span.reward for span in spans])
    )
    assert len(engine.requests) == len(spans) + 2 * sum(range(1, len(spans) + 1))


async def test_a_baseline_is_the_mean_over_continuations_that_differ(tmp_path: Path) -> None:
    """The engine answers by the number of the request, so the recorded episode and its
    continuations differ."""
    spans, engine = await play(
        tmp_path, lambda body, number: ANSWERS[number % len(ANSWERS)], branches=8
    )
    differences = [
        abs(span.baseline - wanted)
        for span, wanted in zip(spans, to_go([s.reward for s in spans]), strict=True)
    ]
    assert max(differences) > 1e-3 and len(engine.requests) > 8 * len(spans)


async def test_an_environment_whose_replay_differs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="branches plays episodes again, and this one cannot be"):
        await play(tmp_path, plays, env={"max_length": 8, "lie": True})
