"""The log hooks pass the metrics of whole episodes, from slime's own loop, to slime's logger."""

from pathlib import Path
from typing import Any

import pytest

from inspection import metrics
from rollout.bridge.sample import flatten
from rollout.play.parts import FAULTS
from rollout.turn import StopReason
from tests.fixtures.playing import playing


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The metrics that slime's logger was given, call by call."""
    calls: list[dict[str, Any]] = []

    def logger(name: str) -> Any:
        return lambda *arguments: calls.append(
            next(a for a in arguments[3:] if isinstance(a, dict))
        )

    monkeypatch.setattr(metrics, "_slime_logger", logger)
    return calls


def answers(body: dict[str, Any], number: int) -> str:
    return ("ACTION: left", "ACTION: dance")[number % 2]


async def test_slimes_own_loop_logs_turns_stop_reasons_and_faults(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    env = {"max_length": 30, "raise_at": 2, "raise_seeds": [11]}
    flags = {"history": "full", "max_turns": 4, "env": env, "seed_start": 7}
    async with playing(tmp_path, answers, **flags) as run:
        results = [await run.episode() for _ in range(5)]
        samples = flatten(results)
        for number in range(2):
            assert metrics.log_rollout(number, run.args, samples, None, 1.0)
    first, second = logged
    assert sum(first[f"rollout/stop/{stop}"] for stop in StopReason) == 5
    assert first["rollout/stop/failed"] == first["rollout/episodes_failed"] == 1
    assert first["rollout/episodes_finished"] == 4 and first["rollout/episode_turns_max"] == 4
    facts = [(result[0] if isinstance(result, list) else result).metadata for result in results]
    turns = sum(known["episode_turns"] for known in facts if known["stop"] != "failed")
    assert first["rollout/turns"] == turns > 4
    assert first["rollout/episode_turns_mean"] == turns / 4
    assert 0 < first["turn/valid_action_ratio"] < 1
    assert {f"rollout/faults/{name}" for name in FAULTS} <= set(first)
    assert first["rollout/faults/env_raised"] > 0 == second["rollout/faults/env_raised"]


async def test_an_evaluation_in_slimes_own_loop_logs_success_and_stop_reasons(
    tmp_path: Path, logged: list[dict[str, Any]]
) -> None:
    async with playing(tmp_path, lambda body, number: "ACTION: left") as run:
        episodes = [await run.episode() for _ in range(3)]
    held_out = {"rewards": [1.0] * 3, "samples": episodes}
    assert metrics.log_eval_rollout(0, run.args, {"held_out": held_out})
    assert (
        logged[0]["eval/held_out/success"] == 1.0
        and logged[0]["eval/held_out/stop/terminated"] == 3.0
    )
