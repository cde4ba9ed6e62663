"""Held-out episodes have their own turn limit, because training waits for the longest of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollout.bridge.settings import EvalSettings, RolloutSettings
from rollout.errors import EngineError
from rollout.tasks import training_seed
from tests.fixtures.playing import playing

LONG = {"length_of": "tests.rollout.test_evaluate.thirty"}


def thirty(_seed: int) -> int:
    return 30


def left(body: dict[str, Any], number: int) -> str:
    return "ACTION: left"


def refusal(status: int, words: str) -> Any:
    return lambda: web.json_response({"error": {"message": words}}, status=status)


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"eval": {"episodes": 4, "max_turns": 3}}, 3),
        ({"eval": {"episodes": 4, "max_turns": 3}, "max_turns": 9}, 3),
        ({"eval": {"episodes": 4}, "max_turns": 5}, 5),
    ],
)
async def test_an_evaluation_ends_every_episode_at_its_own_limit(
    tmp_path: Path, keys: dict[str, Any], most: int
) -> None:
    async with playing(tmp_path, left, env=LONG, **keys) as run:
        output = await run.evaluation()
        assert run.source.episode(0).env.max_turns == keys.get("max_turns")
    (result,) = output.data.values()
    assert [sample.metadata["turns"] for sample in result["samples"]] == [most] * 4
    answers = {
        turn["response"] for sample in result["samples"] for turn in sample.metadata["story"]
    }
    assert answers == {"ACTION: left"}, (
        "as the environment read them, without the end-of-turn token"
    )


@pytest.mark.parametrize(
    ("words", "stop", "turns"),
    [
        ("the prompt exceeds the maximum context length", "context", 2),
        ("unknown content", "failed", 2),
    ],
)
async def test_a_prompt_that_the_engine_refuses_costs_one_episode(
    tmp_path: Path, words: str, stop: str, turns: int
) -> None:
    """Three episodes of 30 turns; the third request is refused."""
    script = lambda body, number: refusal(400, words) if number == 2 else left(body, number)
    async with playing(tmp_path, script, env=LONG, eval={"episodes": 3}, n_env=1) as run:
        output = await run.evaluation()
    facts = [sample.metadata for sample in output.data["count"]["samples"]]
    assert [(fact["stop"], fact["turns"]) for fact in facts] == [
        (stop, turns),
        ("terminated", 30),
        ("terminated", 30),
    ]
    assert (words in (facts[0]["fault"] or "")) == (stop == "failed")
    assert [turn["done"] for turn in facts[0]["story"]] == [False, True]
    assert output.metrics is not None
    counts = [
        output.metrics[f"eval/count/{name}"] for name in ("episodes", "episodes_failed", "turns")
    ]
    assert counts == ([2, 1, 30] if stop == "failed" else [3, 0, 62 / 3]), (
        "a failed episode is in no mean"
    )
    assert (
        len(output.data["count"]["rewards"]) == len(output.data["count"]["truncated"]) == counts[0]
    )


async def test_a_task_whose_held_out_episodes_all_fail_has_no_means_and_the_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing(
        tmp_path, lambda *_: refusal(400, "unknown content"), eval={"episodes": 3}
    ) as run:
        output = await run.evaluation()
    assert output.data["count"]["rewards"] == [0.0] * 3, "slime divides by their number"
    assert output.metrics == {"eval/count/episodes": 0, "eval/count/episodes_failed": 3}
    assert "3 of 3 held-out episodes of count" in caplog.text and "unknown content" in caplog.text


async def test_an_error_ends_all_episodes_of_an_evaluation(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def late() -> str:
        await ended.wait()
        return "ACTION: left"

    script = lambda _body, number: late() if number else refusal(404, "no such page")
    async with playing(tmp_path, script, env=LONG, eval={"episodes": 3}, n_env=3) as run:
        with pytest.raises(EngineError, match="no such page"):
            await run.evaluation()
        still_playing = [
            task for task in asyncio.all_tasks() if "evaluate" in repr(task.get_coro())
        ]
        ended.set()
    assert still_playing == []


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_no_training_episode_plays_a_held_out_seed(
    start: int, held_out: int, episodes: int
) -> None:
    settings = RolloutSettings(
        rollout_interaction_env_path="x",
        seed_start=start,
        eval=EvalSettings(seed_start=held_out, episodes=episodes),
    )
    seeds = [training_seed(settings, k) for k in range(200)]
    free = [
        seed for seed in range(300) if seed >= start and not held_out <= seed < held_out + episodes
    ]
    assert seeds == free[:200], "the first seeds that are not held out, in order"


@pytest.mark.parametrize(("training", "held_out"), [(800, 16), (16, 800)])
async def test_a_held_out_prompt_must_leave_room_for_a_held_out_response(
    tmp_path: Path, training: int, held_out: int
) -> None:
    lengths = {
        "rollout_max_response_len": training,
        "eval_max_response_len": held_out,
        "rollout_max_context_len": 1200,
    }
    env = {"length_of": "tests.fixtures.counting_env.always_long"}
    evaluation = {"episodes": 1, "max_turns": 20}
    async with playing(tmp_path, left, history="full", env=env, eval=evaluation, **lengths) as run:
        output = await run.evaluation()
    longest = max(len(body["input_ids"]) for body in run.engine.requests)
    assert (
        longest + held_out <= 1200
        and output.data["count"]["samples"][0].metadata["stop"] == "context"
    )
    assert (longest + training > 1200) == (held_out < training), (
        "room for a response of training is not needed"
    )
