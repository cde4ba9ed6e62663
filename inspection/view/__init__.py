"""Writes a run as one HTML page: how it trained, and its episodes. The page works offline and needs
no server.

    slime-verlog view outputs/evaluation              writes outputs/evaluation/episodes.html
    slime-verlog view outputs/before outputs/after    two runs, paired by task and seed
    slime-verlog view outputs/seeds                   several runs: curves, and what differs
    slime-verlog view outputs/evaluation --follow     rewrites the page as the run goes on

RUN is a training run's folder (also one of slime's with its tensorboard/), a file of episodes, a
folder that holds one, or what slime writes for --dump-details, --save-debug-rollout-data and
--save-debug-train-data. `episodes.html#episode=3&turn=12` opens a turn; both numbers start at 1.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of `slime-verlog view`."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="one run, two to compare, or more"
    )
    parser.add_argument(
        "--out", type=Path, help="the page; default: episodes.html (two runs: compare.html) in RUN"
    )
    parser.add_argument(
        "--worlds", type=int, default=200, metavar="N", help="episodes to draw (default: 200)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="rewrite the page when the run grows, until Ctrl-C"
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="tokenizer for slime's dumps; default: DUMP/tokenizer"
    )
    trust = "load dumps with any Python object and replay any environment, which may run code"
    parser.add_argument("--trust", action="store_true", help=trust)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(options: Namespace) -> int:
    """Write the page; return 0."""
    from inspection.view.build import follow, write_once

    return follow(options) if options.follow else write_once(options)
