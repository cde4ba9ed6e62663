"""Grades a run of guess.py by the file that it leaves."""

import json

from envs.agent import AgentRun


def grade(run: AgentRun) -> float:
    """1 if the number was found, else 0."""
    result = run.read_text("result.json")
    return float(bool(result) and json.loads(result)["found"])
