"""`envs.balrog` with the stand-in package in BALROG's place, whether or not the real one is
installed."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envs import balrog

PACKAGE = str(Path(__file__).parent / "package")


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Import `balrog` from here meanwhile."""
    real = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "balrog"
    }
    sys.path.insert(0, PACKAGE)
    try:
        yield
    finally:
        sys.path.remove(PACKAGE)
        for name in [name for name in sys.modules if name.split(".")[0] == "balrog"]:
            del sys.modules[name]
        sys.modules.update(real)


def build_env(sample: Any, args: Any) -> balrog.Balrog:
    with stand_in():
        return balrog.build_env(sample, args)
