"""Compares two evaluations episode by episode: the same task with the same seed is a pair.

    slime-verlog compare outputs/before outputs/after
    slime-verlog compare outputs/sweep outputs/sweep --settings memory.n=1 memory.n=4

Prints the difference B - A of win rate, return, progression and turns, with a 95 % confidence
interval from a paired bootstrap, and the seeds that only one of the two won.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "a", type=Path, metavar="A", help="folder of an evaluation, or a file of episodes"
    )
    parser.add_argument("b", type=Path, metavar="B", help="the same")
    parser.add_argument(
        "--settings", nargs=2, metavar=("A", "B"), help="compare one point of a sweep with another"
    )


def run(options: argparse.Namespace) -> int:
    """Print the comparison."""
    from inspection.evaluate.pairs import compare

    print(compare(options.a, options.b, options.settings))
    return 0
