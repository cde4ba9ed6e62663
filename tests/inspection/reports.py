"""Episodes with known numbers for the tests of the report, and the command as a person types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inspection.command import main
from inspection.records import append_episode

ASK = "\n\nACTION: one allowed action"


def make_turn(observation: str, response: str, executed: str = "go", valid: bool = True, **more: Any) -> dict[str, Any]:
    """A turn with its observation, which `write` turns into a message."""
    return {"observation": observation, "response": response, "executed_action": executed, "valid": valid, **more}


def write(
    path: Path, turns: Sequence[dict[str, Any]], player: str = "policy", setting: str = "-", **facts: Any
) -> None:
    """Append an episode to `path/episodes.jsonl` in the form of `rollout.story.Story.facts`."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Play."}]
    story = []
    for turn in turns:
        rest = dict(turn)
        messages.append({"role": "user", "content": "Current Observation:\n" + rest.pop("observation") + ASK})
        ended = {"reward": 0.0, "terminated": False, "truncated": False, "done": False, "tokens": None}
        story.append({"prompt": [0, len(messages) - 1], **ended, **rest})
    record = {
        "env_path": "game.py",
        "task": "t",
        "task_name": "t",
        "seed": 1,
        "stop": "terminated",
        "fault": None,
        "turns": len(story),
        "return": 0.0,
        "success": False,
        "progression": 0.0,
        "metrics": {},
        "messages": messages,
        "pictures": {},
        "story": story,
        **facts,
    }
    append_episode(path / "episodes.jsonl", record, player, setting)


def report(*arguments: object, plots: bool = False) -> int:
    """Run `slime-verlog report` and return its exit code."""
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments), *([] if plots else ["--no-plots"])])
    assert end.value.code == 0, end.value.code
    return 0


def numbers(folder: Path, *arguments: object) -> dict[str, Any]:
    """Run the report and return the only column of its `report.json`."""
    report(folder, *arguments)
    (column,) = json.loads((folder / "report.json").read_text())["columns"]
    return column


def number(column: dict[str, Any], key: str) -> Any:
    """One number of a column."""
    return column["numbers"][key]["number"]
