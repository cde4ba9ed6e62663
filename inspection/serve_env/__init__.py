"""Serves environments to other trainers, as an OpenEnv server.

    slime-verlog serve-env custom_configs/babyai.yaml
    slime-verlog serve-env custom_configs/crafter.yaml --port 8001 --capacity 64 --set env.preset=balrog

Each client gets its own environment. It sends `reset` with a `seed` and one of the `tasks` (both optional), then `step`
with the model's answer as `message`. It reads the observation as text and PNG pictures, the reward, and how the episode
ended. The server has no passwords: give it only addresses that you trust. Web pages are refused unless `--allow-origin`
names them. Ctrl-C ends it.
"""

import argparse
import functools

from inspection import target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    target.add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port; default: %(default)s")
    add = functools.partial(parser.add_argument, action="append", default=[])
    add("--allow-host", metavar="NAME", help="a further name by which clients call this server")
    add("--allow-origin", metavar="URL", help="web pages that may use it; default: none")
    silent = "end silent sessions after S; default: %(default)g"
    parser.add_argument("--idle-timeout", type=float, default=3600.0, metavar="S", help=silent)
    parser.add_argument("--capacity", type=int, metavar="N", help="clients at a time; default: the YAML's n_env")


def run(options: argparse.Namespace) -> int:
    """Try every task once, then serve until Ctrl-C."""
    import asyncio
    import sys

    from inspection.serve_env.server import Access, EnvServer
    from inspection.serve_env.session import Catalogue
    from rollout.tasks import make_episode, read_tasks
    from rollout.workers.trial import try_environments
    from slime_verlog import ConfigError

    target.check_numbers(options, {"capacity": 1})
    if not options.idle_timeout > 0:
        raise ConfigError(f"--idle-timeout must be above 0, got {options.idle_timeout:g}")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must lie between 0 and 65535, got {options.port}")
    chosen = target.read_target(options.target, options.task, options.set)
    settings = chosen.settings
    episodes = [make_episode(settings, task, 0, settings.seed_start) for task in chosen.tasks]
    with chosen.explained():
        for note in try_environments(episodes, settings):
            print(f"note: {note}", file=sys.stderr)
    capacity = options.capacity or settings.n_env
    drawn = chosen.tasks if options.task else read_tasks(settings)
    catalogue = Catalogue(settings, drawn, chosen.tasks)
    access = Access((options.host, *options.allow_host), tuple(options.allow_origin), options.idle_timeout)
    server = EnvServer(catalogue, options.target, capacity, access)

    def ready(url: str) -> None:
        tasks = ", ".join(catalogue.tasks)
        print(f"serving {tasks} at {url} to at most {capacity} clients; Ctrl-C ends it", flush=True)

    try:
        asyncio.run(server.run(options.host, options.port, ready))
    finally:
        catalogue.pool.close()
    return 0
