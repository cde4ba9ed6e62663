r"""The servers of the package openenv and of its repository, played as they are.

    SLIME_VERLOG_OPENENV_PYTHON=openenv-venv/bin/python SLIME_VERLOG_OPENENV_PATH=OpenEnv \
        bash scripts/run_tests.sh -m slow tests/envs/openenv/test_openenv_real.py

SLIME_VERLOG_OPENENV_PYTHON is an interpreter with openenv 0.10.0 and textarena,
SLIME_VERLOG_OPENENV_PATH a checkout of meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from envs.errors import EnvironmentFault
from envs.loading import build_env_from

pytest.importorskip(
    "websockets", reason="websockets is not installed; pip install 'slime-verlog[openenv]'"
)
ROOT = Path(__file__).parents[3]
START_S = 120.0
PYTHON = os.environ.get("SLIME_VERLOG_OPENENV_PYTHON")
CHECKOUT = os.environ.get("SLIME_VERLOG_OPENENV_PATH")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None,
        reason="set SLIME_VERLOG_OPENENV_PYTHON to a Python with openenv==0.10.0 (docs/openenv.md)",
    ),
]


class Server:
    """A uvicorn process."""

    def __init__(self, app: str, port: int = 0, **variables: str) -> None:
        self.app, self.port, self.variables = app, port or unused_port(), variables
        self.url = f"http://127.0.0.1:{self.port}"
        path = os.pathsep.join([str(ROOT), *([f"{CHECKOUT}/envs"] if CHECKOUT else [])])
        self._process = subprocess.Popen(
            [str(PYTHON), "-m", "uvicorn", app, "--port", str(self.port), "--log-level", "error"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "MAX_CONCURRENT_ENVS": "8", **variables},
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5),
            ):
                return
            time.sleep(0.2)
        self.kill()
        pytest.fail(f"{app} did not start within {START_S:g} s")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def guess() -> Iterator[Server]:
    server = Server("tests.fixtures.openenv_app:app", MAX_CONCURRENT_ENVS="2")
    yield server
    server.kill()


def started(server: Server, seed: int = 11, **options: Any) -> tuple[Any, str]:
    env = build_env_from(
        "envs.openenv", {"task": "any", "seed": seed}, {"url": server.url, **options}
    )
    return env, env.reset()["obs_str"]


def test_the_packages_server_is_played_and_its_refusals_are_invalid_answers(guess: Server) -> None:
    env, text = started(guess, deterministic=True)
    assert text == "text: Guess."
    observation, done, info = env.step("THINK: low\nACTION: 1")
    assert (observation["obs_str"], done, info["reward"], info["valid_action"]) == (
        "text: higher",
        False,
        0.0,
        True,
    )
    for answer, words in (
        ("21", "number: Input should be less than or equal to 20"),
        ("x", "must be of type integer"),
    ):
        observation, _, info = env.step(answer)
        assert words in observation["obs_str"] and not info["valid_action"]
    with pytest.raises(EnvironmentFault, match="answered step with EXECUTION_ERROR: bad luck"):
        env.step("13")
    env.reset()
    _, done, info = env.step('{"number": 3}')
    assert done and info["terminated"] and info["reward"] == 1.0
