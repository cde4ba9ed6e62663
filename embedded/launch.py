"""Trains a policy in a text environment on this machine: imitation, evaluation, PPO, evaluation, report.

`slime-verlog train` and the quickstart are two names for this.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedded.run.ending import ending, seeds_table
from embedded.run.folder import (
    CHECKPOINTS,
    SUMMARY,
    TRAINING,
    check_folder,
    claimed,
    is_finished,
    rewind,
    saved_updates,
    write_about,
    write_text,
)

if TYPE_CHECKING:
    from embedded.run.report import RunReport
    from embedded.warmstart.imitation import WarmStart
    from rollout.bridge.settings import RolloutSettings

CRITIC_ONLY = 6
"""Updates at the start that train the critic alone; at most half of all updates."""
WARMUP_NOTE = (
    "critic_warmup of the YAML is left out, because it is made for long runs; here the critic trains alone for the "
    f"first {CRITIC_ONLY} updates, at most half of all. To keep it, add --set-flag num_critic_only_steps=N, with "
    "N = w_epoch + w_iter"
)
IMITATION: dict[str, Any] = {"least_steps": 200}
"""Fields of `WarmStart`: short episodes give few demonstrated turns, so the policy sees them more often."""
LANGUAGE_MODEL: dict[str, Any] = {"episodes": 20, "epochs": 1, "batch_size": 32, "lr": 1e-4}
"""Fields of `WarmStart` with `--model`: such a model needs little to learn the form of an answer."""


def add_arguments(parser: ArgumentParser, config: str | None, out: str, resume: bool = False) -> None:
    """Declare the command's flags; without a default `config`, the YAML is the first argument.

    `resume` says whether the run in a folder is continued without being asked to.
    """
    if config is None:
        parser.add_argument("config", metavar="YAML", help="the environment and its tasks")
    else:
        parser.add_argument("--config", default=config, metavar="YAML", help="default: %(default)s")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, default=0, help="seed of imitation, training episodes and sampling")
    seeds.add_argument("--seeds", type=int, nargs="+", help="train once per seed, each in OUT/seed_N")
    parser.add_argument("--updates", type=int, default=40, help="PPO updates, critic warm-up included (default: 40)")
    parser.add_argument("--episodes", type=int, metavar="N", help="held-out episodes per task; default: the YAML's")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", default=resume, help="continue the run in FOLDER")
    parser.add_argument("--model", help="start from this model, a Hugging Face folder or hub name, not from a new one")
    text = "episodes to imitate first (default: 40, with --model 20); 0, with --model: none"
    parser.add_argument("--demonstrations", type=int, metavar="N", help=text)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a YAML key")
    parser.add_argument("--set-flag", action="append", default=[], metavar="NAME=VALUE", help="slime's flag: lr=1e-4")


def launch(options: Namespace) -> int:
    """Train one seed, or several and print their table; returns 1 if an actor did not train or an episode failed."""
    from embedded.arguments import EmbeddedFlags, read_keys
    from rollout.bridge.settings import set_key, with_assignments
    from slime_verlog import read_settings

    flags = with_assignments({}, options.set_flag, "--set-flag", "lr=1e-4")
    read_settings(EmbeddedFlags, {"hf_checkpoint": "", **flags}, "--set-flag ")
    keys = with_assignments(read_keys(options.config), options.set, "--set")
    if options.episodes is not None:
        keys = set_key(keys, "eval.episodes", options.episodes)
    folders = {options.seed: options.out}
    if options.seeds:
        folders = {seed: options.out / f"seed_{seed}" for seed in options.seeds}
    for folder in folders.values():
        check_folder(folder, options.resume)
    set_up_process()
    start = _start(options.model, options.demonstrations, flags)
    summaries = [
        run_seed(seed, folder, options.config, options.updates, start, keys, options.resume, **flags)
        for seed, folder in folders.items()
    ]
    if options.seeds:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in options.out.glob(f"seed_*/{SUMMARY}")]
        found.sort(key=lambda summary: summary["seed"])
        write_text(options.out / "seeds.json", json.dumps(found, indent=2) + "\n")
        print(seeds_table(summaries))
    return int(any(summary["fault"] or summary["failed_episodes"] for summary in summaries))


def _start(model: str | None, demonstrations: int | None, flags: Mapping[str, Any]) -> WarmStart | Path:
    """Return how the policy begins: a `WarmStart` for imitation, or the folder of a model that is used as it is."""
    from embedded.warmstart.imitation import WarmStart
    from embedded.warmstart.policy import find_model
    from slime_verlog import ConfigError, read_settings

    if model is None and demonstrations == 0:
        raise ConfigError("--demonstrations 0 needs --model, because a new policy cannot give valid answers")
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
        start: how the policy learns by imitation, or the folder of a model that PPO starts from without imitation.
        keys: its keys with overrides; default: as in the file.
        resume: continue the run in the folder. A finished one stays as it is.
        flags: slime's flags by name; see `embedded.arguments.EmbeddedFlags`.

    Raises:
        SlimeVerlogError: the YAML or a flag is rejected, or the environment cannot be played or learned.
        KeyboardInterrupt: after Ctrl-C; what was trained is kept, and the text says how to continue.
    """
    from embedded.arguments import read_keys
    from embedded.warmstart.imitation import WarmStart

    keys = dict(read_keys(config) if keys is None else keys)
    note = ""
    own = {"rollout_seed": seed, "num_rollout": updates, "eval_interval": 20, "save_interval": 1}
    has_critic = not keys.get("group_estimator") and flags.get("advantage_estimator", "ppo") == "ppo"
    if "num_critic_only_steps" not in flags:
        own["num_critic_only_steps"] = min(CRITIC_ONLY, updates // 2) if has_critic else 0
        note = f"{WARMUP_NOTE}\n" if keys.pop("critic_warmup", None) and has_critic else ""
    given = {**own, **flags}
    start = start or WarmStart(**IMITATION)
    run = _Run(folder, start, keys, given)
    settings = run.check()
    warm = str(start) if isinstance(start, Path) else start.model_dump(mode="json")
    with claimed(folder, {"keys": keys, "flags": given, "warm": warm}, resume):
        if is_finished(folder):
            print(f"{folder} holds this run, finished; another --out trains it again")
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        else:
            print(f"{note}seed {seed}: {_beginning(start, settings)}", flush=True)
            summary = run.until_interrupted(settings, {"config": config, "tasks": list(settings.tasks), "seed": seed})
        print(ending(summary, folder), flush=True)
    return summary


class _Run:
    """A run that starts, or continues from its latest checkpoint, in a folder that is its own."""

    def __init__(
        self, folder: Path, start: WarmStart | Path, keys: Mapping[str, Any], flags: Mapping[str, Any]
    ) -> None:
        from embedded.pretraining import split_run
        from slime_verlog import ConfigError

        reserved = {
            "save": f"checkpoints are in {folder / CHECKPOINTS}, and --resume reads them",
            "load": f"checkpoints are in {folder / CHECKPOINTS}, and --resume reads them",
            "hf_checkpoint": "give the model as --model, so that it is imitated and reported",
            "custom_config_path": "the YAML is an argument of the command itself",
        }
        for name in reserved.keys() & flags.keys():
            raise ConfigError(f"--set-flag {name}: {reserved[name]}")
        self.folder, self.start = folder, start
        self.policy = start if isinstance(start, Path) else folder / "policy_before"
        self.checkpoints = folder / CHECKPOINTS
        paths = {"hf_checkpoint": str(self.policy), "save": str(self.checkpoints)}
        self.pretraining, self.ppo = split_run(keys, {**paths, **flags}, folder / "critic")

    def check(self) -> RolloutSettings:
        """Try all that can fail early and return PPO's settings, or raise the first error; writes nothing."""
        from embedded.arguments import build_args, check_run_keys
        from rollout.data_source import EpisodeSource
        from rollout.tasks import try_each_task

        settings = check_run_keys(self.ppo.keys)
        for stage in filter(None, (self.pretraining, self.ppo)):
            EpisodeSource(build_args(stage.keys, **stage.flags))
        try_each_task(settings)
        return settings

    def until_interrupted(self, settings: RolloutSettings, about: Mapping[str, Any]) -> dict[str, Any]:
        """Train to the end; on Ctrl-C, keep the last update's policy and what was evaluated."""
        import torch

        from embedded.run.report import RunReport

        installed = next(iter(distributions(name="slime-verlog")), None)
        about = {
            **about,
            "python": platform.python_version(),
            "torch": version("torch"),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "slime_verlog": installed.version if installed else "a checkout that is not installed",
        }
        report = RunReport(self.folder, about, self.policy)
        typed = ["python", *sys.orig_argv[1:]] if sys.argv[0].endswith(".py") else ["slime-verlog", *sys.argv[1:]]
        about |= {"command": shlex.join(typed), "started": round(time.time(), 1)}
        write_about(self.folder, about)
        try:
            self._train(settings, report)
        except KeyboardInterrupt:
            # A second Ctrl-C must not disturb the ending.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                updates = self._keep_last_policy()
                report.write(interrupted_after=updates)
            finally:
                signal.signal(signal.SIGINT, handler)
            kept = f"policy_after/ is the policy after {updates} updates" if updates else "no update was made"
            continues = f"the same command with --resume continues the run in {self.folder}/"
            raise KeyboardInterrupt(f"interrupted after {updates} updates; {kept}, and {continues}") from None
        except Exception as error:
            with suppress(OSError):  # the disk may be full
                write_about(self.folder, {**about, "stopped": str(error) or type(error).__name__})
            raise
        summary = report.write()
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        return summary

    def _train(self, settings: RolloutSettings, report: RunReport) -> None:
        import yaml
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        from advantage.settings import advantage_settings
        from embedded.arguments import embedded_flags, make_args, with_absolute_files
        from embedded.pretraining import pretrain_critic
        from embedded.run.alarms import warnings_of, warnings_of_plan
        from embedded.run.record import TrainingRecord
        from embedded.train import train
        from embedded.warmstart.imitation import read_imitation

        config = self.folder / "config.yaml"
        # With absolute paths, the folder works from every directory.
        write_text(config, yaml.safe_dump(with_absolute_files(self.ppo.keys), sort_keys=False))
        lengths = {} if isinstance(self.start, Path) else self._imitate(settings, self.start)
        if self.pretraining:
            pretrain_critic(self.pretraining, lengths)
        resumed = saved_updates(self.folder)
        load = str(self.checkpoints) if resumed >= 0 else None
        if load:
            print(f"continuing after {resumed} updates", flush=True)
        args = make_args(config, **{**lengths, **self.ppo.flags, "load": load})
        flags = embedded_flags(args)
        if lengths:
            warnings = list(warnings_of(read_imitation(self.policy), flags, settings.n_env))
        else:
            warnings = list(warnings_of_plan(flags))
        for sentence in warnings:
            print(f"warning: {sentence}", flush=True)
        # By the names that `slime-verlog evaluate` has for them.
        limits = {"max_response_len": flags.rollout_max_response_len, "max_context_len": flags.rollout_max_context_len}
        report.about = {**report.about, "lengths": limits, "warnings": warnings}
        rewind(self.folder / TRAINING, resumed)
        tokenizer = AutoTokenizer.from_pretrained(self.policy)
        record = TrainingRecord(self.folder / TRAINING, tokenizer, advantage_settings(args), flags.kl_coef)
        train(args, report, report.evaluations.keys(), record)

    def _imitate(self, settings: RolloutSettings, warm: WarmStart) -> dict[str, int]:
        """Make the policy that PPO starts from, unless it is there; returns the lengths that it needs."""
        from embedded.arguments import EmbeddedFlags, build_args
        from embedded.warmstart.imitation import IMITATION_FILE, make_policy, read_imitation
        from rollout.bridge.flags import RolloutFlags

        new = not (self.policy / IMITATION_FILE).exists()
        if new:
            args = build_args(self.ppo.keys, **{"rollout_max_context_len": None, **self.ppo.flags})
            flags = RolloutFlags.read(args)
            make_policy(settings, self.policy, warm, flags.rollout_seed, flags)
        imitation, defaults = read_imitation(self.policy), EmbeddedFlags(hf_checkpoint="")
        lengths = imitation.lengths(defaults)
        changed = []
        for name, value in lengths.items():
            if name not in self.ppo.flags and value != getattr(defaults, name):
                changed.append(f"{name} {value}")
        if changed:
            longest = f"prompt has {imitation.longest_prompt} tokens and the longest answer {imitation.longest_answer}"
            print(f"the longest {longest}, so these flags are raised: {', '.join(changed)}")
        if new:
            updates = self.ppo.flags["num_rollout"]
            print(f"imitation done, loss {imitation.loss:.3f} nats per token; training {updates} updates", flush=True)
        return lengths

    def _keep_last_policy(self) -> int:
        """Write the latest checkpoint's policy as `policy_after/`; returns how many updates it had."""
        from transformers.models.auto.configuration_auto import AutoConfig

        from embedded.engine.decoder import write_policy
        from embedded.trainer.checkpoint import saved_actor
        from embedded.trainer.megatron import megatron_to_hf

        updates = saved_updates(self.folder)
        if updates <= 0:
            return 0
        weights = megatron_to_hf(saved_actor(self.checkpoints), AutoConfig.from_pretrained(self.policy))
        write_policy(self.policy, weights, self.folder / "policy_after")
        return updates


def _beginning(start: WarmStart | Path, settings: RolloutSettings) -> str:
    if isinstance(start, Path):
        return f"starting from {start}"
    from envs.loading import load_env_module
    from rollout.tasks import read_tasks

    paths = dict.fromkeys(task.env_path for task in read_tasks(settings))
    untaught = [path for path in paths if getattr(load_env_module(path), "expert_action", None) is None]
    if not untaught:
        return "imitating scripted play"
    return (
        f"{', '.join(untaught)} has no expert_action(env), so the policy imitates random actions: that teaches it to "
        "give valid answers and to prefer no action, and PPO starts from there"
    )


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
