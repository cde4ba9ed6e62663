"""Trains a policy in a text environment on this machine: imitation, evaluation, PPO, evaluation,
report.

`slime-verlog train` and the quickstart are two names for this.
"""

from __future__ import annotations

import gc
import json
import logging
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedded.run.ending import ending, seeds_table
from embedded.run.folder import SUMMARY, check_folder, claimed, is_finished, write_text

if TYPE_CHECKING:
    from embedded.warmstart.imitation import WarmStart

CRITIC_ONLY = 6
"""Updates at the start that train the critic alone; at most half of all updates."""
WARMUP_NOTE = (
    "critic_warmup of the YAML is left out, because it is made for long runs; here the critic "
    f"trains alone for the first {CRITIC_ONLY} updates, at most half of all. To keep it, add "
    "--set-flag num_critic_only_steps=N, with N = w_epoch + w_iter"
)
IMITATION: dict[str, Any] = {"least_steps": 200}
"""Fields of `WarmStart`: short episodes give few demonstrated turns, so the policy sees them more
often."""
LANGUAGE_MODEL: dict[str, Any] = {"episodes": 20, "epochs": 1, "batch_size": 32, "lr": 1e-4}
"""Fields of `WarmStart` with `--model`: such a model needs little to learn the form of an
answer."""


def add_arguments(
    parser: ArgumentParser, config: str | None, out: str, resume: bool = False
) -> None:
    """Declare the command's flags; without a default `config`, the YAML is the first argument.

    `resume` says whether the run in a folder is continued without being asked to.
    """
    if config is None:
        parser.add_argument("config", metavar="YAML", help="the environment and its tasks")
    else:
        parser.add_argument("--config", default=config, metavar="YAML", help="default: %(default)s")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument(
        "--seed", type=int, default=0, help="seed of imitation, training episodes and sampling"
    )
    seeds.add_argument(
        "--seeds", type=int, nargs="+", help="train once per seed, each in OUT/seed_N"
    )
    parser.add_argument(
        "--updates", type=int, default=40, help="PPO updates, critic warm-up included (default: 40)"
    )
    parser.add_argument(
        "--episodes", type=int, metavar="N", help="held-out episodes per task; default: the YAML's"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(out), metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument(
        "--resume", action="store_true", default=resume, help="continue the run in FOLDER"
    )
    parser.add_argument(
        "--model",
        help="start from this model, a Hugging Face folder or hub name, not from a new one",
    )
    text = "episodes to imitate first (default: 40, with --model 20); 0, with --model: none"
    parser.add_argument("--demonstrations", type=int, metavar="N", help=text)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a YAML key"
    )
    parser.add_argument(
        "--set-flag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="slime's flag: lr=1e-4",
    )


def launch(options: Namespace) -> int:
    """Train one seed, or several and print their table; returns 1 if an actor did not train or an
    episode failed."""
    from embedded.arguments import EmbeddedFlags, read_keys
    from rollout.bridge.settings import set_key, with_assignments
    from slime_verlog import ConfigError, read_settings

    flags = with_assignments({}, options.set_flag, "--set-flag", "lr=1e-4")
    read_settings(EmbeddedFlags, {"hf_checkpoint": "", **flags}, "--set-flag ")
    keys = with_assignments(read_keys(options.config), options.set, "--set")
    if options.episodes is not None:
        keys = set_key(keys, "eval.episodes", options.episodes)
    if len(set(options.seeds or ())) < len(options.seeds or ()):
        raise ConfigError("--seeds names a seed twice; give each once")
    folders = {options.seed: options.out}
    if options.seeds:
        folders = {seed: options.out / f"seed_{seed}" for seed in options.seeds}
    for folder in folders.values():
        check_folder(folder, options.resume)
    set_up_process()
    start = _start(options.model, options.demonstrations, flags)
    summaries = [
        run_seed(
            seed, folder, options.config, options.updates, start, keys, options.resume, **flags
        )
        for seed, folder in folders.items()
    ]
    if options.seeds:
        found = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in options.out.glob(f"seed_*/{SUMMARY}")
        ]
        found.sort(key=lambda summary: summary["seed"])
        write_text(options.out / "seeds.json", json.dumps(found, indent=2) + "\n")
        print(seeds_table(summaries))
    return int(any(summary["fault"] or summary["failed_episodes"] for summary in summaries))


def _start(
    model: str | None, demonstrations: int | None, flags: Mapping[str, Any]
) -> WarmStart | Path:
    """Return how the policy begins: a `WarmStart` for imitation, or the folder of a model that is
    used as it is."""
    from embedded.warmstart.imitation import WarmStart
    from embedded.warmstart.policy import find_model
    from slime_verlog import ConfigError, read_settings

    if model is None and demonstrations == 0:
        raise ConfigError(
            "--demonstrations 0 needs --model, because a new policy cannot give valid answers"
        )
    given: dict[str, Any] = IMITATION
    if model is not None:
        folder = find_model(model)
        if demonstrations == 0:
            return folder
        shared = {"max_tokens_per_gpu": "max_tokens", "bf16": "bf16"}
        given = {**LANGUAGE_MODEL, "model": str(folder)}
        given |= {field: flags[flag] for flag, field in shared.items() if flag in flags}
    episodes = {} if demonstrations is None else {"episodes": demonstrations}
    return read_settings(WarmStart, {**given, **episodes}, "demonstrations.")


def run_seed(
    seed: int,
    folder: Path,
    config: str,
    updates: int,
    start: WarmStart | Path | None = None,
    keys: Mapping[str, Any] | None = None,
    resume: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """Imitate, evaluate, train, evaluate and report; the returned summary is also in `folder`.

    Args:
        config: path of the YAML.
        start: how the policy learns by imitation, or the folder of a model that PPO starts from
            without imitation.
        keys: its keys with overrides; default: as in the file.
        resume: continue the run in the folder. A finished one stays as it is.
        flags: slime's flags by name; see `embedded.arguments.EmbeddedFlags`.

    Raises:
        SlimeVerlogError: the YAML or a flag is rejected, or the environment cannot be played or
            learned.
        KeyboardInterrupt: after Ctrl-C; what was trained is kept, and the text says how to
            continue.
    """
    from embedded.arguments import read_keys
    from embedded.training_run import TrainingRun, beginning
    from embedded.warmstart.imitation import WarmStart
    from slime_verlog import ConfigError

    keys = dict(read_keys(config) if keys is None else keys)
    note = ""
    own = {"rollout_seed": seed, "num_rollout": updates, "eval_interval": 20, "save_interval": 1}
    has_critic = (
        not keys.get("group_estimator") and flags.get("advantage_estimator", "ppo") == "ppo"
    )
    if "num_critic_only_steps" not in flags:
        own["num_critic_only_steps"] = min(CRITIC_ONLY, updates // 2) if has_critic else 0
        note = f"{WARMUP_NOTE}\n" if keys.pop("critic_warmup", None) and has_critic else ""
    given = {**own, **flags}
    start = start or WarmStart(**IMITATION)
    run = TrainingRun(folder, start, keys, given)
    for name in ("num_critic_only_steps", "critic_load"):
        if run.pretraining and name in flags:
            raise ConfigError(
                f"--set-flag {name}: value_pretraining trains the critic that PPO starts from; "
                "leave one of them out"
            )
    settings = run.check()
    warm = str(start) if isinstance(start, Path) else start.model_dump(mode="json")
    with claimed(folder, {"keys": keys, "flags": given, "warm": warm}, resume):
        if is_finished(folder):
            print(f"{folder} holds this run, finished; another --out trains it again")
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        else:
            print(f"{note}seed {seed}: {beginning(start, settings)}", flush=True)
            summary = run.until_interrupted(
                settings, {"config": config, "tasks": list(settings.tasks), "seed": seed}
            )
        print(ending(summary, folder), flush=True)
    return summary


def set_up_process() -> None:
    """Use one torch thread, and silence other packages' notes so that progress stays readable."""
    # Imports make a million lasting objects; walking them again and again takes 15 % of the start.
    gc.set_threshold(50_000)
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron")
    transformers_logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.ERROR)
