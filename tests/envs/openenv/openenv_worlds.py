"""`envs.openenv` on a small server that this process starts: the task names the game."""

import functools
from types import SimpleNamespace
from typing import Any

from envs import openenv
from envs.base import describe_task
from tests.fixtures.openenv_server import TinyServer


@functools.cache
def server(game: str) -> TinyServer:
    """The game's server; it ends with this process."""
    return TinyServer(game).__enter__()


def build_env(sample: Any, args: Any) -> Any:
    """Build the environment on the game's server."""
    game, _ = describe_task(sample)
    return openenv.build_env(sample, SimpleNamespace(env={**args.env, "url": server(game).url}))
