"""slime's timeline viewer reads where each turn's time went: engine, environment, tools, judge."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.bridge.trace import is_traced
from tests.fixtures.checkouts import CHECKOUTS, ROOT, checkout_or_skip
from tests.fixtures.rollout_args import rollout_args


def play(folder: Path, checkout: Path, switch: str) -> list[str]:
    """Play inside slime; the names of the tracing modules that were imported."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{ROOT}", "OMP_NUM_THREADS": "1"}
    program = "-W ignore -m tests.fixtures.traced_rollout"
    command = [sys.executable, *program.split(), str(folder), switch]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def timeline(checkout: Path, dump: Path) -> list[list[dict[str, Any]]]:
    """The spans of each row of slime's viewer."""
    path = checkout / "tools" / "trace_timeline_viewer.py"
    spec = importlib.util.spec_from_file_location("trace_timeline_viewer", path)
    assert spec is not None and spec.loader is not None
    viewer = sys.modules["trace_timeline_viewer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(viewer)
    rows = viewer._build_cache_data(dump)["rows"]
    assert all(
        item["type"] == "span" and item["state"] == "closed_span"
        for row in rows
        for item in row["items"]
    )
    return [row["items"] for row in rows]


@pytest.mark.parametrize("name", CHECKOUTS)
def test_every_turn_shows_engine_environment_tools_and_judge(name: str, tmp_path: Path) -> None:
    checkout = checkout_or_skip(name)
    play(tmp_path, checkout, "on")
    rows = timeline(checkout, tmp_path / "turns.pt")
    assert len(rows) == 4
    for number, items in enumerate(rows):
        spans = {item["name"]: item for item in items}
        tool = {"tool add"} if number % 2 == 0 else set()
        assert spans.keys() == {"turn", "engine", "environment", "judge"} | tool
        parents = {
            "engine": "turn",
            "environment": "turn",
            "judge": "environment",
            "tool add": "environment",
        }
        for name, item in spans.items():
            assert item["parent_span_name"] == parents.get(name)
            outer = spans[parents.get(name, name)]
            assert outer["start_ts"] <= item["start_ts"] <= item["end_ts"] <= outer["end_ts"] + 1e-6
        assert spans["engine"]["end_ts"] <= spans["environment"]["start_ts"] + 1e-6
        assert spans["engine"]["attrs"]["end_attrs"]["completion_tokens"] > 0
    (episode,) = timeline(checkout, tmp_path / "episode.pt")
    assert [item["name"] for item in episode].count("turn") == 2


def test_without_the_flag_nothing_is_traced_and_nothing_imported(tmp_path: Path) -> None:
    assert play(tmp_path, checkout_or_skip(next(iter(CHECKOUTS))), "off") == []
    samples = torch.load(tmp_path / "turns.pt", weights_only=False)["samples"]
    assert samples and not any("trace" in sample for sample in samples)


def test_without_slime_the_flag_does_nothing(tmp_path: Path) -> None:
    assert not is_traced(rollout_args(tmp_path, save_debug_rollout_data="{rollout_id}.pt"))
