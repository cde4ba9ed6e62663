"""Writes recorded episodes as rows for supervised training.

    slime-verlog export outputs/evaluation --out sft.jsonl --successful
    slime-verlog export outputs/evaluation --out sft.jsonl --min-return 0.5 --valid-only

RUN is a folder with episodes.jsonl, the file, or what slime writes for --dump-details,
--save-debug-rollout-data and --save-debug-train-data. Episodes whose environment was lost are left
out.

A row is one conversation (`messages`), as slime's supervised training and Hugging Face's read it.
`step_loss_mask` is 0 on answers that are only shown as memory.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from inspection.target import finite


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of `slime-verlog export`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder or file with recorded episodes"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file in --out if it exists"
    )
    add = parser.add_argument_group("which episodes").add_argument
    add("--successful", action="store_true", help="only episodes that were won")
    add(
        "--min-return",
        type=finite,
        metavar="X",
        help="only episodes with at least this sum of rewards",
    )
    add(
        "--task",
        action="append",
        default=[],
        metavar="NAME",
        help="only this task; may be repeated",
    )
    add(
        "--setting",
        action="append",
        default=[],
        metavar="NAME",
        help="only this point of a sweep; may be repeated",
    )
    parser.add_argument("--valid-only", action="store_true", help="do not train on invalid answers")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer for slime's dumps; default: DUMP/tokenizer"
    )
    parser.add_argument(
        "--trust", action="store_true", help="load dumps with any Python object, which may run code"
    )


def run(options: Namespace) -> int:
    """Write the file; return 0."""
    from inspection.export.rows import export

    export(options)
    return 0
