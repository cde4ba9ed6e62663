"""The controls of what notes are worth, in real episodes of recall against a scripted engine."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.note_controls import Notes, main
from rollout.data_source import EpisodeSource
from rollout.evaluate import evaluate
from rollout.play.runtime import close_runtimes
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine

RECALL = {"rollout_interaction_env_path": "envs.recall", "tasks": ["recall"], "env": {"max_steps": 12, "ask_every": 4}}
MEMORY = {"kind": "notes", "every": 2, "keep": 1, "budget": 2000, "max_tokens": 16}
COLOUR = re.compile(r"first light is (\w+)\.|Your notes:\n(\w+)")


async def test_an_episode_gets_its_own_notes_none_or_those_of_an_episode_with_another_fact(tmp_path: Path) -> None:
    tokenizer, notes, scores = chatml_tokenizer(), Notes(), {}

    def remembers(body: dict[str, Any], _number: int) -> str:
        """Writes the colour that the prompt shows, and answers with it when it is asked."""
        prompt = tokenizer.decode(body["input_ids"])
        shown = [a or b for a, b in COLOUR.findall(prompt)]
        if "Write your notes now" in prompt:
            return shown[-1] if shown else "nothing"
        asks = "Which colour did the first light have?" in prompt.rpartition("Current Observation:")[2]
        return f"ACTION: {shown[-1] if asks and shown else 'next'}"

    for control in ("own", "empty", "foreign"):
        async with ScriptedEngine(tokenizer, remembers) as engine:
            args = rollout_args(tmp_path, engine.port, **RECALL, memory=MEMORY, eval={"episodes": 8})
            with notes.controlled(control) as kept:
                metrics = (await evaluate(args, EpisodeSource(args))).metrics
            await close_runtimes()
        assert metrics is not None
        scores[control] = metrics["eval/recall/progression"], sum(kept) / len(kept)
    assert scores == {"own": (1.0, 1.0), "empty": (0.0, 0.0), "foreign": (0.0, 0.0)}
    assert len(notes.written) == 8 and len(set(notes.facts.values())) > 1


def test_without_a_finished_run_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no finished run of notes_400 with a policy; use --keep-policies"):
        main(["--out", str(tmp_path)])
