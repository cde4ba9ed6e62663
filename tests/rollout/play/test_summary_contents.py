"""Notes in separate turns beside tools and images: what the prompts show, and what reaches tools
and training."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.play.notes import SUMMARY_REQUEST
from tests.envs.tools.test_tool_env import call
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import one_slot, playing, turns_of
from tests.fixtures.scripted_engine import ScriptedEngine
from tests.rollout.play.test_summary_turns import asked
from tests.rollout.test_tool_rollout import overrides, schemas, tokenizer_of

NOTES = {"kind": "notes", "every": 2, "budget": 4000, "keep": 1, "max_tokens": 64}
WRITTEN = call("counter", step=100)


async def play(
    folder: Path, tokenizer: Any, answer: str, notes: str, batches: range = range(1), **keys: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """All turns of these batches, and the requests; every response is `answer`, or `notes` if they
    are asked for."""
    script = lambda body, number: notes if asked(tokenizer.decode(body["input_ids"])) else answer
    engine = ScriptedEngine(tokenizer, script)
    async with playing(folder, engine, load=batches[0] - 1, memory=NOTES, **keys) as run:
        outputs = await run.batches(batches)
    assert all(output.metrics["rollout/faults/episodes_lost_at_resume"] == 0 for output in outputs)
    return turns_of(*outputs), engine.requests


@pytest.mark.parametrize("family", [None, "qwen3"])
async def test_a_tool_call_in_the_notes_runs_nothing_and_later_prompts_show_it_as_text(
    tmp_path: Path, family: str | None
) -> None:
    tokenizer = tokenizer_of(family)
    keys = overrides(tmp_path, family, history="window", **one_slot(6))
    turns, requests = await play(tmp_path, tokenizer, call("counter"), WRITTEN, **keys)
    texts = [tokenizer.decode(request["input_ids"]) for request in requests]
    assert (
        [asked(text) for text in texts]
        == ["summary" in turn.metadata for turn in turns]
        == [False, False, True] * 2
    )
    system = texts[0].partition("<|im_start|>user")[0]
    assert all(json.dumps(schema) in system for schema in schemas())
    assert all(text.startswith(system) for text in texts), (
        "the request for notes keeps the tools, and so the prefix"
    )
    assert f"{SUMMARY_REQUEST.format(64)}<|im_end|>\n<|im_start|>assistant\n" in texts[2]
    assert texts[2].count("What is 2 + 3?") == 1 and texts[2].count("Previous plan:") == 2
    for text in texts[3:]:
        assert f"Your notes:\n{WRITTEN}" in text and text.count("What is 2 + 3?") == 1
    shown = [text.rpartition("Current Observation:")[2] for text in texts]
    assert [f"count {k}" in text for k, text in zip((1, 2, 2, 3, 4), shown[1:], strict=True)] == [
        True
    ] * 5
    assert [turn.metadata["env_metrics"]["tool_calls"] for turn in turns] == [1, 2, 2, 3, 4, 4]
    assert [turn.metadata["reward"] for turn in turns if "summary" in turn.metadata] == [0.0, 0.0]


async def test_a_run_resumed_after_any_turn_replays_no_call_of_the_notes(tmp_path: Path) -> None:
    async def played(batches: range) -> list[list[int]]:
        keys = overrides(tmp_path, None, history="window", **one_slot(1))
        turns, _ = await play(
            tmp_path, chatml_tokenizer(), call("counter"), WRITTEN, batches, **keys
        )
        return [turn.tokens for turn in turns]

    whole = await played(range(6))
    for turn in range(1, 6):
        assert await played(range(turn, turn + 1)) == whole[turn : turn + 1]
