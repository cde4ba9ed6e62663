"""How busy each rollout loop keeps simulated SGLang engines, and what a turn costs the rollout process.

    python -m benchmarks.rollout [--loops NAME ...] [--turns 512 2048] [--engines 1] [--processes 1]

The loops are Verlog's order (lock-step), our fixed-turn and continuous batches, and slime's own `generate_rollout` with
our `generate`. slime's run if SLIME_PATH names a checkout and SLIME_CPU_PYTHON an interpreter that can import it.

Real: the loops, their HTTP requests, tokenizer, prompts and samples; their CPU time. Simulated: the engines' time
(`benchmarks/simulated_sglang.py`), training (22 ms per turn and engine), and an environment that answers at
once. The clock is simulated, too (`benchmarks/engine_server.py`), so the shares hardly depend on the machine's load.

Columns, of rollouts alone; continuous loops play on while training runs.

- turns/s: turns per simulated second
- of saturated: tokens for training per second, as a share of the same engines with a queue that is never empty
- of updated: the same share of saturated engines that get new weights as often per turn, which aborts the running
  responses and empties the prefix cache
- stale: share of turns that are 0, 1, or more updates old when they are trained on
- host ms: CPU milliseconds of the rollout process per turn; with several processes, of the one that keeps the batch
- bare ms: the same of a client that sends the requests of the last turns again and parses the responses, with aiohttp
  and orjson alone; 0 if several processes play
- players ms: CPU milliseconds of the processes that play per turn, with `--processes` above 1
- busy: share of the time for which the rollout process computes, and the same of the players on average

`--processes` counts the processes that play (`rollout_processes`). Each is charged its own core (see
`benchmarks/engine_server.py` for how, and for what that cannot show). Continuous loops play more batches than `--warm`
and `--batches` say if every place would otherwise have few turns.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loops, slime_loop
from benchmarks.engines import REPOSITORY
from inspection.text import align
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.tokenizers import CACHE, real_tokenizer

FAMILY = "qwen2_5"
COLUMNS = (
    ("loop", "{label}"),
    ("engines", "{engines}"),
    ("turns", "{turns}"),
    ("turns/s", "{turns_per_s:.1f}"),
    ("of saturated", "{share_of_saturated:.1%}"),
    ("of updated", "{share_of_updated:.1%}"),
    ("stale 0/1/2+", "{ages}"),
    ("processes", "{processes}"),
    ("host ms", "{host_cpu_ms_per_turn:.2f}"),
    ("bare ms", "{bare_cpu_ms_per_turn:.2f}"),
    ("players ms", "{players_cpu_ms_per_turn:.2f}"),
    ("busy", "{host_busy_share:.0%} / {players_busy_share:.0%}"),
)
LABELS = {**{name: loop.label for name, loop in loops.LOOPS.items()}, **slime_loop.LABELS}


def find_tokenizer(folder: Path) -> Path:
    """Find Qwen2.5's tokenizer, downloaded once; the project's own in `folder` if it cannot be had."""
    try:
        real_tokenizer(FAMILY)
    except (pytest.skip.Exception, ImportError) as problem:
        print(f"the project's own small tokenizer instead of Qwen's: {problem}", file=sys.stderr)
        chatml_tokenizer().save_pretrained(folder)
        return folder
    return CACHE / FAMILY


def run_slime(cases: Sequence[loops.Case], checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of slime's loop, from slime's interpreter; none, and a sentence on stderr, if it is not there."""
    path = os.environ.get("SLIME_PATH")
    python = os.environ.get("SLIME_CPU_PYTHON")
    if not path or not python:
        missing = "set SLIME_PATH to a checkout and SLIME_CPU_PYTHON to what tests/slime/cpu/install.sh makes"
        print(f"slime's loop is left out: {missing}", file=sys.stderr)
        return
    lines = [json.dumps({**asdict(case), "checkpoint": str(checkpoint)}) + "\n" for case in cases]
    command = [python, "-m", "benchmarks.slime_loop"]
    environment = {**os.environ, "PYTHONPATH": f"{path.split(os.pathsep)[0]}:{REPOSITORY}"}
    done = subprocess.run(
        command, input="".join(lines), capture_output=True, text=True, env=environment, cwd=REPOSITORY
    )
    if done.returncode:
        raise SystemExit(f"slime's loop failed:\n{done.stderr[-4000:]}")
    yield from map(json.loads, done.stdout.splitlines())


def run_all(cases: Sequence[loops.Case], checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per case, slime's last."""
    for case in cases:
        if case.loop in loops.LOOPS:
            yield loops.run_case(case, checkpoint)
    if slimes := [case for case in cases if case.loop in slime_loop.LABELS]:
        yield from run_slime(slimes, checkpoint)


def cells(row: dict[str, Any]) -> list[str]:
    """Format the columns of one row."""
    young = [row["staleness"].get(age, 0.0) for age in ("0", "1")]
    shares = [*young, max(0.0, 1 - sum(young))]
    ages = " / ".join(f"{share:.0%}" for share in shares)
    shown = {"bare_cpu_ms_per_turn": 0.0, **row, "label": LABELS[row["loop"]], "ages": ages}
    return [form.format(**shown) for _, form in COLUMNS]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", nargs="+", choices=sorted(LABELS), default=list(LABELS), metavar="NAME")
    parser.add_argument("--turns", nargs="+", type=int, default=[512, 2048], help="turns per batch")
    parser.add_argument("--engines", nargs="+", type=int, default=[1])
    parser.add_argument("--processes", nargs="+", type=int, default=[1], help="processes that play (not slime's loop)")
    parser.add_argument("--places", type=int, default=96, help="requests that one engine runs at once")
    parser.add_argument("--answer-tokens", type=float, default=150.0, help="mean tokens of a response")
    parser.add_argument("--batches", type=int, default=2, help="measured batches")
    parser.add_argument("--warm", type=int, default=1, help="batches before them")
    parser.add_argument("--max-staleness", type=int, help="for continuous loops; 1 or 2 by default")
    options = vars(parser.parse_args(arguments))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names, turns, engines, processes = (options.pop(name) for name in ("loops", "turns", "engines", "processes"))
    cases = [
        loops.Case(loop, *sizes, **options)
        for sizes in itertools.product(turns, engines, processes)
        for loop in names
        if sizes[2] == 1 or loop in loops.LOOPS
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [cells(row) for row in run_all(cases, find_tokenizer(Path(folder)))]
    print("\n".join(align([[heading for heading, _ in COLUMNS], *rows], 1)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load average {load}")


if __name__ == "__main__":
    main()
