"""Grades a run of guess.py by the file that it leaves."""

import json

from envs.agent import AgentRun


def grade(run: AgentRun) -> float:
    """1 if the number was found, else 0."""
    result = run.folder / "result.json"
    return float(result.is_file() and json.loads(result.read_text())["found"])
