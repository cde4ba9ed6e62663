"""Plays an environment in the terminal, with the prompts that the model gets.

    slime-verlog play custom_configs/babyai.yaml --seed 3
    slime-verlog play my_game.py --task island --set memory.n=4

Type an action, or a whole answer such as: THINK: the key is left. ACTION: turn left. Each turn
shows what is new in the prompt, then the reward, whether the answer was valid, and the executed
action. Commands: /prompt (or p) shows the whole prompt, /actions, /expert asks the environment's
expert, /restart, /next (seed), /quit, /help.
"""

import argparse
from pathlib import Path

from inspection import target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    target.add_arguments(parser)
    parser.add_argument("--seed", type=int, help="episode's seed; default: the YAML's seed_start")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/play"), help="of pictures; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Play until the input ends."""
    from inspection.play.session import Game, Session

    target.check_numbers(options, {"seed": 0})
    chosen = target.read_target(options.target, options.task, options.set)
    task, others = chosen.tasks[0], [task.name for task in chosen.tasks[1:]]
    seed = chosen.settings.seed_start if options.seed is None else options.seed
    if others:
        print(f"task {task.name}; choose another with --task: {', '.join(others)}\n")
    with Game(chosen, task) as game:
        game.restart(seed)
        return Session(game, options.out).run()
