"""Steps per CPU-second of the environments, with text only and with images, compared with BALROG's
wrappers.

    python benchmarks/envs.py [--seconds 2] [--only babyai]

BALROG is measured in the same run if BALROG_PYTHON names an interpreter that can import it and its
environments (`benchmarks/balrog_speed.py`). Its own settings render every step. "with images" means
that ours also renders every step. The rows of envs.tools call the same tool as a Python function
and on an MCP server. The CPU time of servers is not counted.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# This file has the same name as the package `envs`, so the repository must come before this folder.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from envs.loading import build_env_from  # noqa: E402
from slime_verlog import MissingDependencyError  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    module: str
    task: str
    balrog: tuple[str, str] | None = None
    """BALROG's family and task, if it has the same one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    """Played in environments without a list of actions."""
    images: bool = False
    """Whether it can render every step."""
    server: tuple[str, ...] = ()
    """Command of a server that prints its URL."""


_COMMANDS = (
    "look",
    "inventory",
    "go north",
    "go south",
    "go east",
    "go west",
    "open box",
    "take all",
)
_ADD = ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',)
_NETHACK = {
    "id": "envs.nethack_text:make",
    "task_kwarg": "task",
    "describe": "envs.nethack_text:describe",
}
_ASKED = {"data": [{"question": "?"}], "max_steps": 1000}
_PYTHON_TOOL = {"tools": "tests.envs.tools.toolbox:add", **_ASKED}
_MCP_COMMAND = [sys.executable, str(Path(sys.path[0]) / "tests" / "fixtures" / "mcp_server.py")]
_MCP_TOOL = {"tools": {"mcp": {"command": _MCP_COMMAND, "include": ["add"]}}, **_ASKED}
_GUESS_SERVER = ("-m", "tests.fixtures.openenv_server", "guess", "0")
ROWS = [
    Row("envs.babyai", "goto", ("babyai", "BabyAI-MixedTrainLocal-v0/goto"), images=True),
    Row("envs.babyai", "open", ("babyai", "BabyAI-MixedTrainLocal-v0/open"), images=True),
    Row("envs.babyai", "BossLevel", images=True),
    Row("envs.babaisai", "goto_win", ("babaisai", "env/goto_win"), images=True),
    Row("envs.babaisai", "two_room-goto_win", ("babaisai", "env/two_room-goto_win"), images=True),
    Row("envs.crafter", "default", ("crafter", "default"), images=True),
    Row("envs.sokoban", "two_boxes", images=True),
    Row("envs.sokoban", "four_boxes", images=True),
    Row("envs.textworld", "treasure_hunter", options={"games": 2}, answers=_COMMANDS),
    Row("envs.gymnasium_text", "MiniHack-Room-5x5-v0", options=_NETHACK),
    Row("envs.gymnasium_text", "NetHackScore-v0", options=_NETHACK),
    Row("envs.tools", "python", options=_PYTHON_TOOL, answers=_ADD),
    Row("envs.tools", "mcp", options=_MCP_TOOL, answers=_ADD),
    Row("envs.openenv", "guess", options={"max_steps": 1000}, answers=("1",), server=_GUESS_SERVER),
]


@contextlib.contextmanager
def served(row: Row) -> Iterator[dict[str, str]]:
    """Options of the row's environment that name its server, if it has one; the server runs
    meanwhile."""
    if not row.server:
        yield {}
        return
    command = [sys.executable, *row.server]
    with subprocess.Popen(command, cwd=sys.path[0], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield {"url": process.stdout.readline().strip()}
        finally:
            process.kill()


def play(
    row: Row, seed: int, limit: float, rng: random.Random, options: Mapping[str, Any]
) -> tuple[int, float, float]:
    """Play random legal actions until episode or time is over; returns steps, and CPU seconds of
    them and of the reset.

    The clock is read every 50 steps.
    """
    env = build_env_from(row.module, {"task": row.task, "seed": seed}, {**row.options, **options})
    began = time.process_time()
    env.reset()
    ready = time.process_time()
    answers = row.answers or list(env.actions)
    steps = 0
    done = False
    while not done and time.process_time() - ready < limit:
        for answer in rng.choices(answers, k=50):
            _, done, _ = env.step(answer)
            steps += 1
            if done:
                break
    spent = time.process_time() - ready
    env.close()
    return steps, spent, ready - began


def measure(row: Row, seconds: float, **options: Any) -> tuple[float, float]:
    """Play for `seconds` of CPU time; returns steps per CPU-second and CPU-milliseconds per reset.

    A first episode of up to 50 steps, which fills the caches of this process, is not measured.
    """
    rng = random.Random(0)
    play(row, 0, 0.001, rng, options)
    steps = 0
    spent = 0.0
    resets = []
    while spent < seconds:
        taken, used, reset = play(row, len(resets), seconds - spent, rng, options)
        steps += taken
        spent += used
        resets.append(reset)
    return steps / spent, 1000 * sum(resets) / len(resets)


def balrog_speed(names: tuple[str, str], seconds: float) -> float | None:
    """Steps per CPU-second of BALROG's environment with this family and task; None without
    BALROG_PYTHON."""
    if not (python := os.environ.get("BALROG_PYTHON")):
        return None
    command = [python, str(Path(__file__).with_name("balrog_speed.py")), *names, str(seconds)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="CPU seconds per figure (default: %(default)g)"
    )
    parser.add_argument(
        "--only", default="", help="only rows whose module or task contains this text"
    )
    arguments = parser.parse_args()
    seconds = arguments.seconds
    line = "{:<34}{:>14}{:>13}{:>9}{:>9}{:>11}"
    print(line.format("environment", "text steps/s", "with images", "BALROG", "ratio", "reset ms"))
    for row in ROWS:
        name = f"{row.module.removeprefix('envs.')} {row.task}"
        if arguments.only not in name:
            continue
        drawn = "-"
        theirs = "-"
        ratio = "-"
        try:
            with served(row) as options:
                steps, reset_ms = measure(row, seconds, **options)
        except MissingDependencyError as error:
            print(f"{name:<34}  {error}")
            continue
        if row.images:
            drawn = f"{measure(row, seconds, vlm=True)[0]:,.0f}"
        if row.balrog and (balrog := balrog_speed(row.balrog, seconds)):
            theirs = f"{balrog:,.0f}"
            ratio = f"{steps / balrog:.1f} x"
        print(line.format(name, f"{steps:,.0f}", drawn, theirs, ratio, f"{reset_ms:.2f}"))


if __name__ == "__main__":
    main()
