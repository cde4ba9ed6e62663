"""What slime's own adapter trains of an agent that edits its history; ours trains every token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs.agent.test_agent import PROGRAM
from tests.slime.cpu.harness import Slime

SCRIPT = Path(__file__).parent / "cpu" / "agent_adapter.py"


def test_slimes_adapter_drops_the_answers_that_an_agent_rewrites(
    slime: Slime, tmp_path: Path
) -> None:
    """The same agent here: tests/rollout/test_agent_rollout.py trains 24 of 24 tokens."""
    if not (slime.path / "slime" / "agent" / "adapters").is_dir():
        pytest.skip("this slime has no adapters for agents; they came after v0.3.1")
    command = [str(slime.python), str(SCRIPT), sys.executable, str(PROGRAM), "edits"]
    variables = {**os.environ, "PYTHONPATH": str(slime.path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"samples": 1, "generated": 24, "trained": 8}
