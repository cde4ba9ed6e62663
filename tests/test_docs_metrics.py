"""docs/metrics.md explains every number that a run logs; tests/embedded/trainer/test_trainer.py
adds the trainer's."""

import re
from collections import Counter
from pathlib import Path

from envs.base import make_observation
from rollout.batches.metrics import batch_metrics, whole_episode_metrics
from rollout.bridge.settings import MemorySettings
from rollout.evaluate import eval_metrics
from rollout.play.conversation import Conversation
from rollout.play.held_out import EpisodeResult
from rollout.play.memory import build_memory
from rollout.play.notes import measure_notes
from rollout.play.parts import FAULTS
from rollout.play.transcript import Transcript
from rollout.spec import EnvSpec, EpisodeSpec
from rollout.turn import EnvReply, FinishReason, Generation, NotesEvent, Prompt, StopReason
from tests.fixtures.metrics_page import unexplained
from tests.rollout.batches.test_metrics import IDLE, segment

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("rollout", "advantage", "embedded", "inspection")
LITERAL = re.compile(
    r'"((?:rollout|turn|episode|warmup|perf|train|actor|critic)/[a-z_0-9/]*[a-z_0-9])"'
)


def test_every_name_of_a_batch_is_explained() -> None:
    segments = [segment(stop, 1) for stop in StopReason]
    faults = Counter(dict.fromkeys([*FAULTS, "engine_http_503"], 1))
    assert not unexplained(batch_metrics(segments, faults, IDLE, [1]))


def test_every_name_of_a_batch_with_several_tasks_is_explained() -> None:
    segments = [segment("terminated", 1, task=task) for task in ("a", "b")]
    names = batch_metrics(segments, Counter(), IDLE, [])
    assert any(name.startswith("task/a/") for name in names)
    assert not unexplained(
        name.replace("task/a/", "episode/").replace("task/b/", "episode/") for name in names
    )


def test_every_name_of_whole_episodes_is_explained() -> None:
    facts = {
        "stop": StopReason.TERMINATED,
        "episode_turns": 2,
        "episode_return": 1.0,
        "success": 1.0,
    }
    notes = dict.fromkeys(NotesEvent, 1)
    assert not unexplained(
        whole_episode_metrics(
            [{**facts, "valid_turns": 2, "length_stops": 0, "notes_events": notes}]
        )
    )


def test_every_measure_of_notes_is_explained() -> None:
    generation = Generation([1, 2, 3, 4], [0.0] * 4, "red", FinishReason.STOP)
    measures = measure_notes(generation, "red", Prompt([1]), (), ())
    conversation = Conversation(build_memory(MemorySettings(kind="notes")))
    names = set(measures)
    for facts in (["a"], ["a", "b"], *[["a", "b", "c"]] * 4):
        message = {"role": "user", "content": ""}
        conversation.show(EnvReply(make_observation(""), [message], "", "", "", True, facts=facts))
        conversation.noted("")
        names |= set(conversation.facts_kept())
    assert len(names) == 10 and not unexplained(
        {"summary/turns", *(f"summary/{name}" for name in names)}
    )


def test_every_name_of_an_evaluation_is_explained() -> None:
    spec = EpisodeSpec(0, "goto", EnvSpec("envs.babyai", {"task": "goto", "seed": 0}))
    names = eval_metrics(
        {"goto": [EpisodeResult(spec, (), StopReason.TERMINATED, None, Transcript())]}
    )
    assert len(names) == 8 and not unexplained(names)


def test_every_name_that_the_code_spells_out_is_explained() -> None:
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    names = {name for path in files for name in LITERAL.findall(path.read_text(encoding="utf-8"))}
    assert len(names) > 40
    assert not unexplained(names)
