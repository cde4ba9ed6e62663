"""A run in its folder: imitation, value pretraining and PPO, and what is kept when it is
interrupted."""

import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

from advantage.settings import advantage_settings
from embedded.arguments import (
    EmbeddedFlags,
    build_args,
    check_run_keys,
    embedded_flags,
    make_args,
    with_absolute_files,
)
from embedded.engine.decoder import write_policy
from embedded.pretraining import check_stages, pretrain_critic, split_run
from embedded.run.alarms import warnings_of, warnings_of_plan
from embedded.run.folder import (
    CHECKPOINTS,
    TRAINING,
    rewind,
    saved_updates,
    write_about,
    write_text,
)
from embedded.run.record import TrainingRecord
from embedded.run.report import RunReport
from embedded.train import train
from embedded.trainer.checkpoint import keep_critic, saved_actor
from embedded.trainer.megatron import megatron_to_hf
from embedded.warmstart.imitation import IMITATION_FILE, WarmStart, make_policy, read_imitation
from envs.loading import load_env_module
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.settings import RolloutSettings
from rollout.tasks import read_tasks, try_each_task
from slime_verlog import ConfigError


class TrainingRun:
    """A run that starts, or continues from its latest checkpoint, in a folder that is its own."""

    def __init__(
        self,
        folder: Path,
        start: WarmStart | Path,
        keys: Mapping[str, Any],
        flags: Mapping[str, Any],
    ) -> None:
        reserved = {
            "save": f"checkpoints are in {folder / CHECKPOINTS}, and --resume reads them",
            "load": f"checkpoints are in {folder / CHECKPOINTS}, and --resume reads them",
            "hf_checkpoint": "give the model as --model, so that it is imitated and reported",
            "custom_config_path": "the YAML is an argument of the command itself",
        }
        for name in reserved.keys() & flags.keys():
            raise ConfigError(f"--set-flag {name}: {reserved[name]}")
        self.folder = folder
        self.start = start
        self.policy = start if isinstance(start, Path) else folder / "policy_before"
        self.checkpoints = folder / CHECKPOINTS
        paths = {"hf_checkpoint": str(self.policy), "save": str(self.checkpoints)}
        self.pretraining, self.ppo = split_run(keys, {**paths, **flags}, folder / "critic")

    def check(self) -> RolloutSettings:
        """Try all that can fail early and return PPO's settings, or raise the first error; writes
        nothing."""
        settings = check_run_keys(self.ppo.keys)
        check_stages((self.pretraining, self.ppo))
        try_each_task(settings)
        return settings

    def until_interrupted(
        self, settings: RolloutSettings, about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Train to the end; on Ctrl-C, keep the last update's policy and what was evaluated."""
        about = {**about, **_machine()}
        report = RunReport(self.folder, about, self.policy)
        is_script = sys.argv[0].endswith(".py")
        typed = ["python", *sys.orig_argv[1:]] if is_script else ["slime-verlog", *sys.argv[1:]]
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
            kept = (
                f"policy_after/ is the policy after {updates} updates"
                if updates
                else "no update was made"
            )
            continues = f"the same command with --resume continues the run in {self.folder}/"
            raise KeyboardInterrupt(
                f"interrupted after {updates} updates; {kept}, and {continues}"
            ) from None
        except Exception as error:
            with suppress(OSError):  # the disk may be full
                write_about(self.folder, {**about, "stopped": str(error) or type(error).__name__})
            raise
        keep_critic(self.checkpoints, self.folder / "critic_after")
        summary = report.write()
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        return summary

    def _train(self, settings: RolloutSettings, report: RunReport) -> None:
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
        warnings = list(warnings_of_plan(flags))
        if lengths:
            warnings = list(warnings_of(read_imitation(self.policy), flags, settings.n_env))
        for sentence in warnings:
            print(f"warning: {sentence}", flush=True)
        # By the names that `slime-verlog evaluate` has for them.
        limits = {
            "max_response_len": flags.rollout_max_response_len,
            "max_context_len": flags.rollout_max_context_len,
        }
        report.about = {**report.about, "lengths": limits, "warnings": warnings}
        rewind(self.folder / TRAINING, resumed)
        tokenizer = AutoTokenizer.from_pretrained(self.policy)
        record = TrainingRecord(
            self.folder / TRAINING, tokenizer, advantage_settings(args), flags.kl_coef
        )
        train(args, report, report.evaluations.keys(), record)

    def _imitate(self, settings: RolloutSettings, warm: WarmStart) -> dict[str, int]:
        """Make the policy that PPO starts from, unless it is there; returns the lengths that it
        needs."""
        new = not (self.policy / IMITATION_FILE).exists()
        if new:
            args = build_args(self.ppo.keys, **{"rollout_max_context_len": None, **self.ppo.flags})
            flags = RolloutFlags.read(args)
            make_policy(settings, self.policy, warm, flags.rollout_seed, flags)
        imitation = read_imitation(self.policy)
        defaults = EmbeddedFlags(hf_checkpoint="")
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
            print(
                f"imitation done, loss {imitation.loss:.3f} nats per token; training {updates} "
                "updates",
                flush=True,
            )
        return lengths

    def _keep_last_policy(self) -> int:
        """Write the latest checkpoint's policy as `policy_after/`; returns how many updates it
        had."""
        updates = saved_updates(self.folder)
        if updates <= 0:
            return 0
        weights = megatron_to_hf(
            saved_actor(self.checkpoints), AutoConfig.from_pretrained(self.policy)
        )
        write_policy(self.policy, weights, self.folder / "policy_after")
        return updates


def _machine() -> dict[str, Any]:
    installed = next(iter(distributions(name="slime-verlog")), None)
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "slime_verlog": installed.version if installed else "a checkout that is not installed",
    }


def beginning(start: WarmStart | Path, settings: RolloutSettings) -> str:
    """Say how the policy begins."""
    if isinstance(start, Path):
        return f"starting from {start}"
    paths = dict.fromkeys(task.env_path for task in read_tasks(settings))
    untaught = [
        path for path in paths if getattr(load_env_module(path), "expert_action", None) is None
    ]
    if not untaught:
        return "imitating scripted play"
    return (
        f"{', '.join(untaught)} has no expert_action(env), so the policy imitates random actions: "
        "that teaches it to give valid answers and to prefer no action, and PPO starts from there"
    )
