"""Steps per CPU-second of the environments, with text only and with images, compared with BALROG's wrappers.

    python benchmarks/envs.py [--seconds 2] [--only babyai]

BALROG is measured in the same run if BALROG_PYTHON names an interpreter that can import it and its environments
(`benchmarks/balrog_speed.py`). Its own settings render every step. "with images" means that ours also renders every
step. The rows of envs.tools call the same tool as a Python function and on an MCP server. The CPU time of servers is
not counted.
"""

import argparse
import contextlib
import importlib.util
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


@dataclass(frozen=True)
class Row:
    """One row of the table; `server` is the command of a server that prints its URL.

    `balrog` is BALROG's family and task, if it has the same one. `answers` are played in environments without
    a list of actions, which have no images either. `images` says whether the others have.
    """

    module: str
    task: str
    balrog: tuple[str, str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    extra: str = "envs"
    answers: tuple[str, ...] = ()
    images: bool = True
    server: tuple[str, ...] = ()


_COMMANDS = ("look", "inventory", "go north", "go south", "go east", "go west", "open box", "take all")
_ADD = ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',)
_NETHACK = {"id": "envs.nethack_text:make", "task_kwarg": "task", "describe": "envs.nethack_text:describe"}
_ASKED = {"data": [{"question": "?"}], "max_steps": 1000}
_PYTHON_TOOL = {"tools": "tests.envs.tools.toolbox:add", **_ASKED}
_MCP_COMMAND = [sys.executable, str(Path(sys.path[0]) / "tests" / "fixtures" / "mcp_server.py")]
_MCP_TOOL = {"tools": {"mcp": {"command": _MCP_COMMAND, "include": ["add"]}}, **_ASKED}
_GUESS_SERVER = ("-m", "tests.fixtures.openenv_server", "guess", "0")
ROWS = [
    Row("envs.babyai", "goto", ("babyai", "BabyAI-MixedTrainLocal-v0/goto"), needs=("minigrid",)),
    Row("envs.babyai", "open", ("babyai", "BabyAI-MixedTrainLocal-v0/open"), needs=("minigrid",)),
    Row("envs.babyai", "BossLevel", needs=("minigrid",)),
    Row("envs.babaisai", "goto_win", ("babaisai", "env/goto_win")),
    Row("envs.babaisai", "two_room-goto_win", ("babaisai", "env/two_room-goto_win")),
    Row("envs.crafter", "default", ("crafter", "default"), needs=("crafter",)),
    Row("envs.sokoban", "two_boxes"),
    Row("envs.sokoban", "four_boxes"),
    Row("envs.textworld", "treasure_hunter", None, {"games": 2}, ("textworld",), "text-games", _COMMANDS),
    Row("envs.gymnasium_text", "MiniHack-Room-5x5-v0", None, _NETHACK, ("minihack",), "nethack", images=False),
    Row("envs.gymnasium_text", "NetHackScore-v0", None, _NETHACK, ("nle",), "nethack", images=False),
    Row("envs.tools", "python", None, _PYTHON_TOOL, ("jsonschema",), "tools", _ADD),
    Row("envs.tools", "mcp", None, _MCP_TOOL, ("mcp",), "mcp", _ADD),
    Row("envs.openenv", "guess", None, {"max_steps": 1000}, ("websockets",), "openenv", ("1",), server=_GUESS_SERVER),
]


@contextlib.contextmanager
def served(row: Row) -> Iterator[dict[str, str]]:
    """Options of the row's environment that name its server, if it has one; the server runs meanwhile."""
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


def measure(row: Row, seconds: float, **options: Any) -> tuple[float, float]:
    """Play random legal actions for `seconds` of CPU time; returns steps per CPU-second and CPU-milliseconds per reset.

    A first episode of up to 50 steps, which fills the caches of this process, is not measured.
    """
    rng, steps, step_time, reset_times = random.Random(0), 0, 0.0, []

    def play(seed: int, limit: float) -> tuple[int, float]:
        """Play until the episode or the time is over; the clock is read every 50 steps."""
        env = build_env_from(row.module, {"task": row.task, "seed": seed}, {**row.options, **options})
        began = time.process_time()
        env.reset()
        reset_times.append(time.process_time() - began)
        answers, done, taken = row.answers or list(env.actions), False, 0
        began = time.process_time()
        while not done and time.process_time() - began < limit:
            for answer in rng.choices(answers, k=50):
                _, done, _ = env.step(answer)
                taken += 1
                if done:
                    break
        spent = time.process_time() - began
        env.close()
        return taken, spent

    play(0, 0.001)
    reset_times.clear()
    while step_time < seconds:
        taken, spent = play(len(reset_times), seconds - step_time)
        steps, step_time = steps + taken, step_time + spent
    return steps / step_time, 1000 * sum(reset_times) / len(reset_times)


def balrog_speed(names: tuple[str, str], seconds: float) -> float | None:
    """Steps per CPU-second of BALROG's environment with this family and task; None without BALROG_PYTHON."""
    if not (python := os.environ.get("BALROG_PYTHON")):
        return None
    command = [python, str(Path(__file__).with_name("balrog_speed.py")), *names, str(seconds)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds per figure (default: %(default)g)")
    parser.add_argument("--only", default="", help="only rows whose module or task contains this text")
    arguments = parser.parse_args()
    line = "{:<34}{:>14}{:>13}{:>9}{:>9}{:>11}"
    print(line.format("environment", "text steps/s", "with images", "BALROG", "ratio", "reset ms"))
    for row in ROWS:
        name = f"{row.module.removeprefix('envs.')} {row.task}"
        if arguments.only not in name:
            continue
        missing = [need for need in row.needs if importlib.util.find_spec(need) is None]
        if missing:
            print(f"{name:<34}  needs {', '.join(missing)}; pip install 'slime-verlog[{row.extra}]'")
            continue
        drawn = "-" if row.answers or not row.images else f"{measure(row, arguments.seconds, vlm=True)[0]:,.0f}"
        with served(row) as options:
            steps, reset_ms = measure(row, arguments.seconds, **options)
        theirs = balrog_speed(row.balrog, arguments.seconds) if row.balrog else None
        ratio = ("-", "-") if theirs is None else (f"{theirs:,.0f}", f"{steps / theirs:.1f} x")
        print(line.format(name, f"{steps:,.0f}", drawn, *ratio, f"{reset_ms:.2f}"))


if __name__ == "__main__":
    main()
