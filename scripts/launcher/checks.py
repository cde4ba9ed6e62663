"""What can be checked of a job without slime, Megatron and the model, so also for a script that is
only printed."""

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from rollout.bridge.checks import check_hooks
from rollout.bridge.roles import critic_warning
from rollout.bridge.settings import RolloutSettings
from scripts.launcher.job import Job
from slime_verlog import parse_yaml


def check_without_slime(job: Job, settings: RolloutSettings) -> list[str]:
    """Check the job's flags against its YAML; returns warnings, and raises ConfigError for what
    preflight refuses."""
    with tempfile.TemporaryDirectory() as folder:
        roles = Path(folder, "roles.yaml")
        roles.write_text(job.roles, encoding="utf-8")
        given = {**parse_yaml(job.config, "the YAML"), **read_flags(job.words)}
        given["megatron_config_path"] = str(roles) if job.roles else None
        given["hf_checkpoint"] = None  # preflight reads the model
        args = Namespace(**given)
        check_hooks(args, settings)
        return list(filter(None, [critic_warning(args)]))


def read_flags(words: list[str]) -> dict[str, Any]:
    """Return a command line's flags as slime names them, without its defaults; the last value of a
    flag counts."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            name = flag[2:].replace("-", "_")
            found[name] = _number(value) if has_value else True
        else:
            found[name] = _number(word)
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
