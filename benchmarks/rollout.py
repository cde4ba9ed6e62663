"""How busy each rollout loop keeps simulated SGLang engines, and what a turn costs the rollout
process.

    python -m benchmarks.rollout [--loops NAME ...] [--turns 512 2048] [--engines 1] [--processes 1]
    PYTHONPATH=tests/slime/cpu/imports:SLIME:. SLIME_CPU_WORK=/tmp \\
        $SLIME_CPU_PYTHON -m benchmarks.rollout --loops slime slime-partial slime-double

The loops are Verlog's order (lock-step), our fixed-turn and continuous batches, and slime's own
`generate_rollout` with our `generate`, in an interpreter that can import slime
(`tests/slime/cpu/install.sh` makes one).

Real: the loops, their HTTP requests, tokenizer, prompts and samples; their CPU time. Simulated: the
engines' time (`benchmarks/simulated_sglang.py`), training (22 ms per turn and engine), and an
environment that answers at once. The clock is simulated, too (`benchmarks/engine_server.py`), so
the shares hardly depend on the machine's load.

Columns, of rollouts alone; continuous loops play on while training runs.

- turns/s: turns per simulated second
- of saturated: tokens for training per second, as a share of the same engines with a queue that is
  never empty
- of updated: the same share of saturated engines that get new weights as often per turn, which
  aborts the running responses and empties the prefix cache
- stale: share of turns that are 0, 1, or more updates old when they are trained on
- host ms: CPU milliseconds of the rollout process per turn; with several processes, of the one that
  keeps the batch
- bare ms: the same of a client that sends the requests of the last turns again and parses the
  responses, with aiohttp and orjson alone; 0 if several processes play
- players ms: CPU milliseconds of the processes that play per turn, with `--processes` above 1
- busy: share of the time for which the rollout process computes, and the same of the players on
  average

`--processes` counts the processes that play (`rollout_processes`). Each is charged its own core
(see `benchmarks/engine_server.py` for how, and for what that cannot show). Continuous loops play
more batches than `--warm` and `--batches` say if every place would otherwise have few turns.
"""

import argparse
import itertools
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.loops import LOOPS, Case, run_case
from inspection.text import align

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


def cells(row: dict[str, Any]) -> list[str]:
    """Format the columns of one row."""
    young = [row["staleness"].get(age, 0.0) for age in ("0", "1")]
    shares = [*young, max(0.0, 1 - sum(young))]
    ages = " / ".join(f"{share:.0%}" for share in shares)
    label = LOOPS[row["loop"]].label
    return [form.format(**row, label=label, ages=ages) for _, form in COLUMNS]


def main() -> None:
    ours = [name for name, loop in LOOPS.items() if loop.collect]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = list(LOOPS) if find_spec("slime") else ours
    parser.add_argument(
        "--loops", nargs="+", choices=sorted(LOOPS), default=default, metavar="NAME"
    )
    parser.add_argument("--turns", nargs="+", type=int, default=[512, 2048], help="turns per batch")
    parser.add_argument("--engines", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        default=[1],
        help="processes that play (not slime's loop)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="default: a tiny ChatML one"
    )
    parser.add_argument(
        "--answer-tokens", type=float, default=150.0, help="mean tokens of a response"
    )
    parser.add_argument("--batches", type=int, default=2, help="measured batches")
    parser.add_argument("--warm", type=int, default=1, help="batches before them")
    parser.add_argument("--max-staleness", type=int, help="for continuous loops; 1 or 2 by default")
    options = vars(parser.parse_args())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names, turns, engines, processes = (
        options.pop(name) for name in ("loops", "turns", "engines", "processes")
    )
    tokenizer: Path | None = options.pop("tokenizer")
    rows = [[heading for heading, _ in COLUMNS]]
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is None:
            from tests.fixtures.chatml import chatml_tokenizer

            tokenizer = Path(folder)
            chatml_tokenizer().save_pretrained(tokenizer)
        for sizes in itertools.product(turns, engines, processes):
            for name in names if sizes[2] == 1 else set(names) & set(ours):
                rows.append(cells(run_case(Case(name, *sizes, **options), tokenizer)))
    print("\n".join(align(rows, 1)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load average {load}")


if __name__ == "__main__":
    main()
