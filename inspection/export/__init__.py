"""Writes recorded episodes for other tools: rows for training, or ATIF trajectories.

    slime-verlog export outputs/evaluation --format jsonl --out sft.jsonl --successful
    slime-verlog export outputs/evaluation --format jsonl --out sft.jsonl --min-return 0.5 --valid-only
    slime-verlog export outputs/evaluation --format atif --out trajectories

RUN is a folder with episodes.jsonl, the file, or what slime writes for --dump-details, --save-debug-rollout-data and
--save-debug-train-data. Episodes whose environment was lost are left out.

jsonl: one conversation per row (`messages`), as slime's supervised training and Hugging Face's read it.
`step_loss_mask` is 0 on answers that are only shown as memory.

atif: Harbor's trajectory format, one file per episode in the folder OUT, with token ids and log-probs where they were
recorded.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of `slime-verlog export`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder or file with recorded episodes")
    parser.add_argument("--format", choices=("jsonl", "atif"), required=True, help="what to write")
    where = "file to write; a folder for atif"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=where)
    parser.add_argument("--overwrite", action="store_true", help="jsonl: replace the file in --out if it exists")
    add = parser.add_argument_group("which episodes").add_argument
    add("--successful", action="store_true", help="only episodes that were won")
    add("--min-return", type=float, metavar="X", help="only episodes with at least this sum of rewards")
    add("--task", action="append", default=[], metavar="NAME", help="only this task; may be repeated")
    add("--setting", action="append", default=[], metavar="NAME", help="only this point of a sweep; may be repeated")
    parser.add_argument("--valid-only", action="store_true", help="jsonl: do not train on invalid answers")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer for slime's dumps; default: DUMP/tokenizer")
    parser.add_argument("--trust", action="store_true", help="load dumps with any Python object, which may run code")


def run(options: Namespace) -> int:
    """Write the file or folder; return 0."""
    from inspection.export.writing import rows_of, write_atif
    from inspection.records import write_jsonl
    from inspection.target import check_free

    _check(options)
    check_free(options.out, options.overwrite)
    counts: Counter[str] = Counter()
    episodes = _chosen(options, counts)
    if options.format == "jsonl":
        rows = (row for episode in episodes for row in rows_of(episode, options.valid_only))
        written = write_jsonl(_at_least_one(rows, counts), options.out)
        what = "rows"
    else:
        written = write_atif(_at_least_one(episodes, counts), options.out)
        what = "trajectories"
    print(f"{written} {what} from {counts['kept']} of {counts['read']} episodes written to {options.out}")
    return 0


def _check(options: Namespace) -> None:
    """Raise ConfigError for options that the format does not know."""
    from slime_verlog import ConfigError

    if options.format == "jsonl" and options.out.suffix != ".jsonl":
        raise ConfigError(f"--out must end in .jsonl, which tells slime the format; got {options.out}")
    if options.format == "atif" and (options.valid_only or options.overwrite):
        raise ConfigError("--valid-only and --overwrite are for jsonl; atif holds every answer and takes a new folder")


def _chosen(options: Namespace, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """The episodes to export, one at a time; counts how many were `read` and `kept`."""
    from inspection.report.reading import read_record
    from inspection.view.sources import read_run

    for run in options.runs:
        for number, episode in enumerate(read_run(run, options.tokenizer, options.trust, with_ids=True), 1):
            counts["read"] += 1
            if episode["messages"]:  # of slime's dumps, some have none
                read_record(episode, f"{run}, episode {number},")
            if _is_chosen(options, episode):
                counts["kept"] += 1
                yield episode


def _is_chosen(options: Namespace, episode: Mapping[str, Any]) -> bool:
    """Whether the episode was played and fulfils every filter."""
    if episode.get("stop") == "failed" or not episode["story"]:
        return False
    if options.successful and episode.get("success") is not True:
        return False
    total = episode.get("return")
    if options.min_return is not None and (total is None or total < options.min_return):
        return False
    if options.task and episode.get("task_name") not in options.task:
        return False
    return not options.setting or episode.get("setting") in options.setting


def _at_least_one(items: Iterator[T], counts: Counter[str]) -> Iterator[T]:
    """Yield the items; raises ConfigError if there are none."""
    from slime_verlog import ConfigError

    is_empty = True
    for item in items:  # none is kept, the first neither
        is_empty = False
        yield item
    if not counts["read"]:
        raise ConfigError("the runs hold no episodes, so there is nothing to write; give another RUN")
    if is_empty:
        filters = "--successful, --min-return, --task, --setting or --valid-only"
        raise ConfigError(f"none of the {counts['read']} episodes is left to write; relax {filters}")
