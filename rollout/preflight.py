"""Checks a command line before any GPU is requested: `python -m rollout.preflight [train.py|train_async.py] FLAGS`.

The framework's own parser reads the flags, this project's checks follow, and one environment of every task is tried.
The verdict is one sentence, on the last line; slime's own output is shown only after an unexpected error.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from advantage.patch.versions import find_framework
from rollout.bridge.checks import SOURCE, check_flags, installs_advantages
from rollout.bridge.command_line import captured_output, flags_without_effect, parse_command_line
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.framework import FRAMEWORK
from rollout.bridge.roles import check_start_weights
from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, MissingDependencyError
from rollout.play.memory import Conversation, build_memory
from rollout.play.runtime import encoders_of
from rollout.spec import EpisodeSpec
from rollout.tasks import try_each_task
from rollout.workers.reply import EnvReply
from slime_verlog import command


@command()
def main() -> None:
    """Print the verdict; exit with status 1 and a sentence on stderr if training must not start."""
    if FRAMEWORK == "none":
        raise MissingDependencyError("neither slime nor miles can be imported; put a checkout on PYTHONPATH")
    script = Path(sys.argv.pop(1)).name if sys.argv[1:2] and sys.argv[1].endswith(".py") else "train.py"
    with captured_output():
        args = parse_command_line()
        if script == "train_async.py" and RolloutFlags.read(args).colocate:
            raise ConfigError(
                "train_async.py plays and trains at the same time, so --colocate cannot share their GPUs: leave it out "
                "and give --rollout-num-gpus (our scripts: --disaggregated), or run train.py"
            )
        notes = check(args)
        check_start_weights(args)
        if installs_advantages(args):
            find_framework()
        warnings = flags_without_effect(args, {word.partition("=")[0] for word in sys.argv[1:]})
    for warning in [*notes, *warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    print("preflight: flags, YAML and environments are fine")


def check(args: Any) -> list[str]:
    """Check flags and YAML, and try one environment of every task; returns notes about what could not be tried."""
    if args.data_source_path != SOURCE:
        check_flags(args, load_settings(args))
        return []
    source = EpisodeSource(args)  # checks the flags
    return try_each_task(source.settings, first_prompt_check(source.settings, RolloutFlags.read(args)))


def first_prompt_check(config: RolloutSettings, flags: RolloutFlags) -> Callable[[EpisodeSpec, EnvReply], None] | None:
    """Return a check that a task's first prompt fits into the context and `memory.budget`; None without notes."""
    if config.memory.kind not in ("inline_notes", "notes"):
        return None
    encoder = encoders_of(flags.hf_checkpoint, config)()

    def look(episode: EpisodeSpec, reply: EnvReply) -> None:
        if not reply.whole_prompts:  # otherwise the memory does not apply
            prompt = encoder.prompt(Conversation(build_memory(config.memory)).show(reply))
            flags.check_first_prompt(episode.name, len(prompt.token_ids), config.memory)

    return look


if __name__ == "__main__":
    main()
