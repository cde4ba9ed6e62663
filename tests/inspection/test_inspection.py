"""Evaluation tables and the trajectory viewer, on a scripted engine over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspection import evaluate, viewer
from rollout.bridge.framework import Sample
from rollout.errors import ConfigError
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """A scripted engine on its own event loop, because the command blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    script = lambda body, number: ("ACTION: left", "ACTION: <b>dance</b>")[draw(body, 2)]
    server = ScriptedEngine(chatml_tokenizer(), script)
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    yield server
    asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def arguments(engine: ScriptedEngine, tmp_path: Path) -> list[str]:
    config = {
        "rollout_interaction_env_path": "tests.fixtures.counting_env",
        "tasks": ["count", {"task": "count", "name": "short", "options": {"max_length": 2}}],
        "eval": {"episodes": 4},
        "env_backend": "inline",
        "n_env": 4,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    checkpoint = rollout_args(tmp_path).hf_checkpoint
    return [
        *("--config", str(tmp_path / "config.yaml"), "--checkpoint", checkpoint),
        *("--engine", f"http://127.0.0.1:{engine.port}", "--out", str(tmp_path / "out"), "--max-response-len", "32"),
    ]


def test_a_sweep_prints_one_row_per_value_and_task_with_standard_errors(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.main([*arguments, "--sweep", "memory.n=0,2"])
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [(row["setting"], row["task"]) for row in table] == [
        ({"memory.n": 0}, "count"),
        ({"memory.n": 0}, "short"),
        ({"memory.n": 2}, "count"),
        ({"memory.n": 2}, "short"),
    ]
    for row in table:
        assert row["success"] == {"mean": 1.0, "se": 0.0, "n": 4}
        assert 0 < row["valid_action_ratio"]["mean"] < 1
    assert capsys.readouterr().out.count("memory.n=2") == 2


def test_the_viewer_shows_every_episode_and_escapes_the_models_text(arguments: list[str], tmp_path: Path) -> None:
    evaluate.main(arguments)
    viewer.main([str(tmp_path / "out" / "episodes.jsonl")])
    page = (tmp_path / "out" / "episodes.html").read_text()
    assert page.count("<article") == 8
    assert "&lt;b&gt;dance&lt;/b&gt;" in page and "<b>dance" not in page


def test_the_summary_is_the_mean_with_its_standard_error() -> None:
    samples = []
    for value in (0.0, 1.0, 1.0, 1.0):
        sample = Sample()
        sample.reward = value
        sample.metadata = {key: value for key in evaluate.COLUMNS}
        samples.append(sample)
    assert evaluate.summarize(samples)["success"] == {"mean": 0.75, "se": pytest.approx(0.25), "n": 4}


@pytest.mark.parametrize(
    ("extra", "words"),
    [(["--engine", "localhost"], "--engine must look like"), (["--sweep", "memory.n"], "memory.n=1,2,4")],
)
def test_a_wrong_argument_is_one_sentence_that_shows_the_expected_form(
    arguments: list[str], extra: list[str], words: str
) -> None:
    with pytest.raises(SystemExit, match=f"error: .*{words}"):
        evaluate.main([*arguments, *extra])


@pytest.mark.parametrize("text", ["{", "[]", '{"story": 3}'])
def test_a_line_that_is_not_an_episode_is_refused_by_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1, is not an episode"):
        viewer.read_episodes(path, 10)


def test_setting_a_dotted_key_leaves_the_others_unchanged() -> None:
    config: dict[str, Any] = {"memory": {"kind": "window", "n": 1}}
    assert evaluate.set_key(config, "memory.n", 4) == {"memory": {"kind": "window", "n": 4}}
    assert config["memory"]["n"] == 1
