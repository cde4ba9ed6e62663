"""The options of `slime-verlog view`, as its parser makes them."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from inspection.view import add_arguments


def view_options(*runs: Path, **changes: Any) -> Namespace:
    """The defaults for these runs, with some changed."""
    parser = ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args([str(run) for run in runs])
    return Namespace(**{**vars(options), **changes})
