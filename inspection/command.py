"""The command `slime-verlog`: looks at environments, models and runs before, during and after
training.

Each part is a module of this package with `add_arguments(parser)` and `run(options)`, which returns
the exit code. It imports other packages inside `run`, so that `--help` answers at once, even before
they are installed.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from inspection.text import HelpFormatter

VERSION = "0.1.0"
PARTS = {
    "init": "write a new environment to start from, with its YAML and a test",
    "check": "try an environment: build every task, play, and check the contract",
    "build-images": "build the images of Harbor tasks, without a container daemon",
    "play": "play an environment in the terminal, with the model's own prompts",
    "evaluate": "play held-out episodes with a model or a scripted player; write a table",
    "panel": "print the held-out episodes, and a hash that names them",
    "compare": "compare two evaluations seed by seed",
    "branch": "continue recorded episodes from chosen turns: values of states, and what a critic could explain",
    "rescore": "score recorded episodes with another reward or judge, without playing",
    "report": "what the answers show before training: diversity, reasoning, valid actions, failures",
    "view": "write episodes as one HTML page",
    "train": "train a small policy on this machine, in a text environment with named actions or an expert",
    "export": "write episodes as rows for supervised training",
}


def module_of(part: str) -> ModuleType:
    """Return the module of a part."""
    return importlib.import_module(f"inspection.{part.replace('-', '_')}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one part; its exit code is 0 only if all went well."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="slime-verlog", description="The author's bench of slime-verlog."
    )
    parser.add_argument("--version", action="version", version=f"slime-verlog {VERSION}")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, text in PARTS.items():
        part = parts.add_parser(name, help=text, formatter_class=HelpFormatter)
        if name == chosen:
            module = module_of(name)
            part.description = module.__doc__
            module.add_arguments(part)
            part.set_defaults(run=module.run)
    options, unknown = parser.parse_known_args(given)
    if unknown:  # argparse would answer with the usage of the whole command
        parts.choices[options.part].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        from slime_verlog import command
    except ModuleNotFoundError as error:
        hint = "run: bash scripts/install.sh && source .venv/bin/activate"
        raise SystemExit(f"error: the package {error.name} is missing; {hint}") from error
    with command():
        code = options.run(options)
    raise SystemExit(code)
