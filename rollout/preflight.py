"""Checks a command line before any GPU is requested: `python -m rollout.preflight
[train.py|train_async.py] FLAGS`.

slime's own parsers read the flags, this project's checks follow, and one environment of every task
is tried. The verdict is one sentence, on the last line; slime's own output is shown only after an
unexpected error. Each of slime's parsers ignores flags that it does not know, so slime itself never
notices a misspelt flag: those that none of them knows are refused here, and idle ones are named.
"""

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from advantage.flags import advantage_flags, kl_warning, overrides_of
from advantage.patch.versions import find_slime
from rollout.bridge.checkpoints import check_start_weights
from rollout.bridge.checks import BATCHES, SOURCE, check_flags, hooks_in_use, installs_advantages
from rollout.bridge.flags import RolloutFlags, sentences
from rollout.bridge.framework import HAS_SLIME
from rollout.bridge.roles import critic_warning, role_args
from rollout.bridge.settings import RolloutSettings, load_settings
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, MissingDependencyError, SlimeVerlogError
from rollout.play.build import encoders_of
from rollout.play.conversation import Conversation
from rollout.play.memory import memory_of
from rollout.spec import EpisodeSpec
from rollout.tasks import try_each_task
from rollout.tokens.rehearsal import rehearse
from rollout.turn import EnvReply
from slime_verlog import command

ENGINE_PREFIXES = ("--sglang-", "--router-", "--prefill-num-servers")
"""Flags of the engine's parser, which slime skips if no engine starts."""
UNREAD_OVERRIDES = {
    "gamma": "the discounts are gamma_step and gamma_token in the YAML",
    "lambd": "the discounts are lambda_step and lambda_token in the YAML",
    **dict.fromkeys(
        ("global_batch_size", "max_tokens_per_gpu"),
        "slime splits batches by the command line's flag",
    ),
}
"""Flags that have no effect in a role's overrides under the patch, and what has it in their
place."""
REFUSES_NESTED_REGIONS = "assert not self._binary_wrapper.cdll.tms_get_interesting_region()"
"""The line of torch_memory_saver up to 0.0.9.post1 that fails in a region inside another; slime's
fork lacks it."""


def parse_command_line() -> Any:
    """Return slime's `args` for `sys.argv`; raises ConfigError for wrong and unknown flags."""
    module = importlib.import_module("slime.utils.arguments")
    with _options_seen() as known:
        try:
            args = module.parse_args()
        except ConfigError:
            raise
        except Exception as error:
            # Many of Megatron's assertions have no text, so the line that raised one stands in for
            # it.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = (
                f": {error}"
                if str(error).strip()
                else f" at {frame.filename}:{frame.lineno}: {frame.line}"
            )
            raise ConfigError(
                f"slime refuses these flags: {type(error).__name__}{reason}"
            ) from error
    refuse_unknown(
        sys.argv[1:], known, ENGINE_PREFIXES if RolloutFlags.read(args).debug_train_only else ()
    )
    return args


@contextlib.contextmanager
def _options_seen() -> Generator[set[str]]:
    """Collect the options of every parser that reads this process's command line; a bad value is a
    ConfigError."""
    found: set[str] = set()
    parser = argparse.ArgumentParser
    original = parser.parse_known_args
    original_error = parser.error

    def recording(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if args is None or list(args) == sys.argv[1:]:
            found.update(self._option_string_actions)
        return original(self, args, namespace)

    def refusing(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ConfigError(f"slime cannot read the flags: {message}")

    parser.parse_known_args = recording
    parser.error = refusing
    try:
        yield found
    finally:
        parser.parse_known_args = original
        parser.error = original_error


def refuse_unknown(words: Sequence[str], known: set[str], ignored: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for flags that are neither `known` nor have an `ignored` prefix; suggests
    known ones."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    hints: list[str] = []
    for flag in dict.fromkeys(flags):
        if flag not in known and not flag.startswith(ignored):
            near = difflib.get_close_matches(flag, known, 1, cutoff=0.8)
            hints.append(f"{flag} (did you mean {near[0]}?)" if near else flag)
    if hints:
        raise ConfigError(
            f"no parser of slime, Megatron or SGLang knows {', '.join(hints)}; it would be ignored "
            "silently"
        )


@contextlib.contextmanager
def captured_output() -> Generator[None]:
    """Hold back what Python prints; show it after an error other than `SlimeVerlogError`."""
    # A file, because Megatron enables faulthandler, which wants stderr's descriptor, and keeps it: so
    # the file is not closed here.
    held = tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            yield
    finally:
        if not isinstance(sys.exception(), SlimeVerlogError | None):
            held.seek(0)
            sys.stderr.write(held.read())


def flags_without_effect(args: Any, given: Collection[str]) -> list[str]:
    """Return one sentence per flag without effect; `given` are the flags on the command line,
    without slime's own."""
    hooks = hooks_in_use(args)
    found = [sentence for flag, sentence in sentences("warned", hooks).items() if flag in given]
    flags = RolloutFlags.read(args)
    evaluates = flags.eval_function_path
    if "batches" in hooks and evaluates and evaluates not in BATCHES:
        found.append(
            f"--eval-function-path {evaluates} plays the evaluations, so eval in the YAML is not "
            "read"
        )
    if "plays" in hooks and flags.loss_type == "custom_loss":
        found.append(
            f"--loss-type custom_loss: {args.custom_loss_function_path} replaces the policy loss, "
            "so clipping, entropy and KL flags have no effect unless it reads them"
        )
    if "plays" in hooks and (charged := kl_warning(advantage_flags(role_args(args, "actor")))):
        found.append(charged)
    if "patch" not in hooks:
        return found
    actor = overrides_of(args, "actor")
    critic = overrides_of(args, "critic")
    for role, overrides in (("actor", actor), ("critic", critic)):
        found += [
            f"{args.megatron_config_path} sets {name} for the {role}, which has no effect: "
            f"{instead}"
            for name, instead in UNREAD_OVERRIDES.items()
            if name in overrides
        ]
    found += [
        f"{args.megatron_config_path} sets {name} {critic[name]} for the critic alone: it changes "
        "the critic's targets and not the actor's advantages, which each role computes for "
        "itself; set it in the YAML for both"
        + (", or lambda_critic for the critic" if name.startswith("lambda") else "")
        for name in ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
        if name in critic and name not in actor
    ]
    return found


def check(args: Any) -> list[str]:
    """Check flags and YAML, and try one environment of every task; returns notes about what could
    not be tried."""
    flags = RolloutFlags.read(args)
    if args.data_source_path != SOURCE:
        check_flags(args, load_settings(args))
        if flags.multimodal_keys and "plays" in hooks_in_use(args):
            check_sight(flags, "--multimodal-keys names pictures")
        return []
    source = EpisodeSource(args)  # checks the flags
    check_prompt = first_prompt_check(source.settings, flags)

    def look(episode: EpisodeSpec, reply: EnvReply) -> None:
        if reply.shows_images:
            check_sight(flags, f"task {episode.name!r} shows pictures (env.vlm)")
        if check_prompt is not None:
            check_prompt(episode, reply)

    notes = try_each_task(source.settings, look)
    return [
        *notes,
        *rehearse(encoders_of(flags.hf_checkpoint, source.settings)(), source.settings.history),
    ]


def check_sight(flags: RolloutFlags, reason: str) -> None:
    """Raise ConfigError, which begins with the reason, unless engine and trainer take pictures."""
    from rollout.tokens.images import image_settings

    if image_settings(flags.hf_checkpoint) is None:
        raise ConfigError(
            f"{reason}, but {flags.hf_checkpoint} has no image processor: take a checkpoint that "
            "sees, or only show text"
        )
    if flags.debug_rollout_only or flags.custom_model_provider_path:
        return
    spec = list(flags.spec or ())
    builds_text_layers = (
        spec and spec[0].startswith("slime_plugins.") and spec[-1].endswith("_spec")
    )
    if not spec or builds_text_layers:
        given = (
            f"--spec {' '.join(spec)} describes"
            if spec
            else "without --spec, Megatron's flags describe"
        )
        raise ConfigError(
            f"{reason}, but {given} a text model, which cannot train on them; give --spec "
            "slime_plugins.models.qwen3_5_vl get_qwen3_5_vl_model_provider, as "
            "scripts/run_crafter_vlm.sh does"
        )


def first_prompt_check(
    config: RolloutSettings, flags: RolloutFlags
) -> Callable[[EpisodeSpec, EnvReply], None] | None:
    """Return a check that a task's first prompt fits into the context and `memory.budget`; None
    without notes."""
    if config.memory.kind not in ("inline_notes", "notes"):
        return None
    make_encoder = encoders_of(flags.hf_checkpoint, config)

    def look(episode: EpisodeSpec, reply: EnvReply) -> None:
        if not reply.whole_prompts:  # otherwise the memory does not apply
            prompt = make_encoder(tools=reply.tools).prompt(
                Conversation(memory_of(config)).show(reply)
            )
            flags.check_first_prompt(episode.name, len(prompt.token_ids), config)

    return look


def check_whitening(args: Any) -> None:
    """Raise ConfigError if slime whitens our advantages by slices of a sequence, which only the
    patch would mend."""
    ours = str(args.custom_advantage_function_path).startswith("advantage.")
    if (
        ours
        and args.normalize_advantages
        and args.context_parallel_size > 1
        and not find_slime().whitens_all_ranks
    ):
        raise ConfigError(
            "this slime whitens each slice of a sequence separately: leave out "
            "--normalize-advantages, or give --context-parallel-size 1"
        )


def check_memory_saver(args: Any) -> None:
    """Raise ConfigError if training is offloaded by a torch_memory_saver whose regions cannot be
    nested.

    slime opens a region for a whole training process, and its Megatron one more inside it for
    parameters and gradients. The package is read and not imported, because its libraries need CUDA.
    """
    found = importlib.util.find_spec("torch_memory_saver") if args.offload_train else None
    if found is None or found.origin is None or args.debug_rollout_only:
        return
    entrypoint = Path(found.origin).with_name("entrypoint.py")
    if entrypoint.is_file() and REFUSES_NESTED_REGIONS in entrypoint.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{entrypoint.parent} refuses the nested memory regions of slime's Megatron, so every "
            "training process would fail; install the fork of torch_memory_saver that slime's "
            "Dockerfile names (TMS_COMMIT)"
        )


@command()
def main() -> None:
    """Print the verdict; exit with status 1 and a sentence on stderr if training must not start."""
    if not HAS_SLIME:
        raise MissingDependencyError("slime cannot be imported; put its checkout on PYTHONPATH")
    script = (
        Path(sys.argv.pop(1)).name if sys.argv[1:2] and sys.argv[1].endswith(".py") else "train.py"
    )
    with captured_output():
        args = parse_command_line()
        if script == "train_async.py" and RolloutFlags.read(args).colocate:
            raise ConfigError(
                "train_async.py plays and trains at the same time, so --colocate cannot share "
                "their GPUs: leave it out and give --rollout-num-gpus (our scripts: "
                "--disaggregated), or run train.py"
            )
        notes = check(args)
        check_start_weights(args)
        check_memory_saver(args)
        if installs_advantages(args):
            find_slime()
        else:
            check_whitening(args)
        warnings = flags_without_effect(args, {word.partition("=")[0] for word in sys.argv[1:]})
        if installs_advantages(args) and (unprepared := critic_warning(args)):
            warnings.append(unprepared)
    for warning in [*notes, *warnings]:
        print(f"warning: {warning}", file=sys.stderr)
    print("preflight: flags, YAML and environments are fine")


if __name__ == "__main__":
    main()
