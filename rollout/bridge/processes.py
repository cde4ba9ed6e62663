"""How many processes play (`rollout_processes`), and which numbers are refused."""

from typing import Any

from rollout.bridge.flags import RolloutFlags
from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError

GENERATE = "rollout.generate.generate"
ENGINES_PER_PROCESS = 4
"""Engines that one process feeds, with `rollout_processes: auto`."""


def process_count(args: Any, config: RolloutSettings) -> int:
    """Return the number of processes that play; 1 under `rollout.generate`, which plays inside slime's own loop."""
    if getattr(args, "custom_generate_function_path", None) == GENERATE:
        return 1
    if config.rollout_processes == "auto":
        return min(-(-RolloutFlags.read(args).engines // ENGINES_PER_PROCESS), config.n_env)
    return config.rollout_processes


def check_processes(args: Any, config: RolloutSettings) -> None:
    """Raise ConfigError if `rollout_processes` is more than the slots, or if slime's own loop plays."""
    count = config.rollout_processes
    if count in (1, "auto"):
        return
    if getattr(args, "custom_generate_function_path", None) == GENERATE:
        raise ConfigError(
            f"rollout_processes: {count} is for fixed-turn and continuous batches; with "
            f"--custom-generate-function-path {GENERATE}, slime's own process plays, so leave it out"
        )
    if count > config.n_env:
        raise ConfigError(
            f"rollout_processes: {count} is more than n_env: {config.n_env}, so some processes would have no slot; "
            "lower the first or raise the second"
        )
