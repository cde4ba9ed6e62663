"""Continues recorded episodes many times from chosen turns: what a state is worth, and what a
critic could explain.

    slime-verlog branch outputs/random --turn 1,10,20 --times 32 --player random --out branches
    slime-verlog branch outputs/model --sample 200 --player MODEL_FOLDER --out outputs/states

RUN is a folder that `slime-verlog evaluate` wrote, or its episodes.jsonl. The environment that the
records name is started again, gets the recorded responses before turn k, and must show what it
showed then, by digest. From turn k on, the player answers, to the episode's end. Turns count from
1, as in `slime-verlog view`.

With --turn, a table shows the mean return from each turn on, with a 95 % interval, discounted with
the `gamma_step` of the run and not. With --sample, turns are drawn from all episodes, and the
explainable share is printed: the variance of the return between states over the variance in all. A
perfect critic explains so much, and no critic more. A state is the environment with the random
numbers that it is going to draw, of which a prompt shows only a part. With --critic, the critic
that `slime-verlog train` saved is compared with that.

The branches are written as episodes, in the form that `evaluate` has, so `view`, `report` and
`compare` read them. The same command continues an interrupted run; with more turns, samples or
times, it adds to it.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    from inspection.evaluate import add_player_arguments

    parser.add_argument(
        "episodes", type=Path, metavar="RUN", help="folder of an evaluation, or its episodes.jsonl"
    )
    states = parser.add_mutually_exclusive_group(required=True)
    turns = "turns to branch from, such as 1,10,20; may be repeated"
    states.add_argument("--turn", type=_numbers, action="extend", metavar="K[,K]", help=turns)
    states.add_argument(
        "--sample", type=int, metavar="N", help="draw N turns of all episodes, or of --episode"
    )
    parser.add_argument(
        "--times", type=int, default=8, metavar="N", help="branches per turn; default: %(default)s"
    )
    critic = "with --sample: a run's critic_after; tell how much its critic explains"
    parser.add_argument("--critic", type=Path, metavar="FOLDER", help=critic)
    one = "number of one episode in the file, from 1; default: the first, and with --sample all"
    parser.add_argument("--episode", type=int, metavar="NUMBER", help=one)
    parser.add_argument(
        "--out", default="outputs/branches", metavar="FOLDER", help="default: %(default)s"
    )
    speed = "override a YAML key of speed, such as n_env; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=speed)
    add_player_arguments(parser)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must look like 1,10,20, got {text!r}") from error


def run(options: argparse.Namespace) -> int:
    """Play the branches that are missing, print the values, and return the exit code."""
    from inspection.branch.session import branch

    return branch(options)
