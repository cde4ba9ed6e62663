"""Held-out episodes have their own turn limit, because training waits for the longest of them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from rollout.bridge.settings import load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, EngineError
from rollout.evaluate import evaluate
from rollout.play.runtime import close_runtimes
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine

LONG = {"length_of": "tests.rollout.test_eval_limit.thirty"}
CONFIGS = Path(__file__).parents[2] / "custom_configs"


def thirty(_seed: int) -> int:
    return 30


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
    async with ScriptedEngine(chatml_tokenizer(), lambda _body, _n: "ACTION: left") as engine:
        args = rollout_args(tmp_path, engine.port, env=LONG, **keys)
        source = EpisodeSource(args)
        try:
            output = await evaluate(args, source)
        finally:
            await close_runtimes()
        assert source.episode(0).env.max_turns == keys.get("max_turns")
    (result,) = output.data.values()
    assert [sample.metadata["turns"] for sample in result["samples"]] == [most] * 4
    answers = {turn["response"] for sample in result["samples"] for turn in sample.metadata["story"]}
    assert answers == {"ACTION: left"}, "as the environment read them, without the end-of-turn token"


def test_a_limit_below_one_turn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.max_turns"):
        load_settings(rollout_args(tmp_path, eval={"max_turns": 0}))


@pytest.mark.parametrize("name", ["crafter.yaml", "crafter_vlm.yaml"])
def test_crafter_whose_games_may_last_10000_turns_has_a_limit(name: str) -> None:
    assert yaml.safe_load((CONFIGS / name).read_text())["eval"]["max_turns"] <= 500


@pytest.mark.parametrize(
    ("words", "stop", "turns"),
    [("the prompt exceeds the maximum context length", "context", 2), ("unknown content", "failed", 2)],
)
async def test_a_prompt_that_the_engine_refuses_costs_one_episode(
    tmp_path: Path, words: str, stop: str, turns: int
) -> None:
    """Three episodes of 30 turns; the third request is refused."""
    refusal = lambda: web.json_response({"error": {"message": words}}, status=400)
    script = lambda _body, number: refusal if number == 2 else "ACTION: left"
    async with ScriptedEngine(chatml_tokenizer(), script) as engine:
        args = rollout_args(tmp_path, engine.port, env=LONG, eval={"episodes": 3}, n_env=1)
        output = await evaluate(args, EpisodeSource(args))
        facts = [sample.metadata for sample in output.data["count"]["samples"]]
        await close_runtimes()
    assert [(fact["stop"], fact["turns"]) for fact in facts] == [(stop, turns), ("terminated", 30), ("terminated", 30)]
    assert (words in (facts[0]["fault"] or "")) == (stop == "failed")


async def test_an_evaluation_ends_at_a_wrong_address(tmp_path: Path) -> None:
    missing = lambda: web.json_response({"message": "no such page"}, status=404)
    async with ScriptedEngine(chatml_tokenizer(), lambda *_: missing) as engine:
        args = rollout_args(tmp_path, engine.port, eval={"episodes": 3}, n_env=1)
        with pytest.raises(EngineError, match="refused the request: HTTP 404: no such page"):
            await evaluate(args, EpisodeSource(args))
        await close_runtimes()
        assert len(engine.requests) == 1
