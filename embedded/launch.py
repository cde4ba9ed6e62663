"""Trains a small policy in a text environment on this machine: imitation, evaluation, PPO, evaluation, report.

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
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedded.pretraining import Stage
    from embedded.report import RunReport
    from embedded.warmstart.imitation import Imitation, WarmStart
    from rollout.bridge.settings import RolloutSettings

CRITIC_ONLY = 6
"""Updates at the start that train the critic alone; at most half of all updates."""
IMITATION: dict[str, Any] = {"least_steps": 200}
"""Fields of `WarmStart`: short episodes give few demonstrated turns, so the policy sees them more often."""


def add_arguments(parser: ArgumentParser, config: str | None, out: str) -> None:
    """Declare the command's flags; without a default `config`, it must be given."""
    parser.add_argument("--config", default=config, required=config is None, metavar="YAML", help="the environment")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, default=0, help="seed of imitation, training episodes and sampling")
    seeds.add_argument("--seeds", type=int, nargs="+", help="train once per seed, each in OUT/seed_N")
    parser.add_argument("--updates", type=int, default=40, help="PPO updates, critic warm-up included (default: 40)")
    parser.add_argument("--episodes", type=int, metavar="N", help="held-out episodes per task; default: the YAML's")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a YAML key")
    parser.add_argument("--set-flag", action="append", default=[], metavar="NAME=VALUE", help="slime's flag: lr=1e-4")


def launch(options: Namespace) -> int:
    """Train one seed, or several and print their table; returns 1 if an actor did not train or an episode failed.

    Raises:
        SlimeVerlogError: as `run_seed`.
    """
    from embedded.arguments import read_keys
    from rollout.bridge.overrides import set_key, with_assignments

    flags = with_assignments({}, options.set_flag, "--set-flag", "lr=1e-4")
    keys = with_assignments(read_keys(options.config), options.set, "--set")
    if options.episodes is not None:
        keys = set_key(keys, "eval.episodes", options.episodes)
    set_up_process()
    if options.seeds is None:
        summaries = [run_seed(options.seed, options.out, options.config, options.updates, keys=keys, **flags)]
    else:
        folders = {seed: options.out / f"seed_{seed}" for seed in options.seeds}
        summaries = [
            run_seed(s, out, options.config, options.updates, keys=keys, **flags) for s, out in folders.items()
        ]
        (options.out / "seeds.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
        print(seeds_table(summaries))
    return int(any(summary["fault"] or summary["failed_episodes"] for summary in summaries))


def run_seed(
    seed: int,
    folder: Path,
    config: str,
    updates: int,
    warm_start: WarmStart | None = None,
    keys: Mapping[str, Any] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """Imitate, evaluate, train, evaluate and report; the returned summary is also in `folder`.

    Args:
        config: path of the YAML.
        keys: its keys with overrides; default: as in the file.
        flags: slime's flags by name; see `embedded.arguments.EmbeddedFlags`.

    Raises:
        ConfigError: the YAML or a flag is rejected, or the policy cannot learn to answer in this environment.
        EnvironmentFault: the environment cannot be built or played.
        MissingDependencyError: an optional package is not installed.
    """
    import yaml

    from embedded.arguments import make_args, read_keys
    from embedded.pretraining import split_run
    from embedded.report import RunReport
    from embedded.warmstart.imitation import WarmStart, make_policy

    policy = folder / "policy_before"
    keys, note = _without_warmup(read_keys(config) if keys is None else keys, flags)
    given = {"rollout_seed": seed, "num_rollout": updates, "eval_interval": 20, "hf_checkpoint": str(policy)}
    has_critic = flags.get("advantage_estimator", "ppo") == "ppo"
    given |= {"num_critic_only_steps": min(CRITIC_ONLY, updates // 2) if has_critic else 0, **flags}
    pretraining, ppo = split_run(keys, given, folder / "critic")
    settings = _check([stage for stage in (pretraining, ppo) if stage], folder)
    report = RunReport(folder, {"config": config, "tasks": list(settings.tasks), "seed": seed, **_machine()}, policy)
    run_config = folder / "config.yaml"
    run_config.write_text(yaml.safe_dump(dict(ppo.keys), sort_keys=False), encoding="utf-8")
    print(*note, f"seed {seed}: {_teacher(settings)}", sep="\n", flush=True)
    imitation = make_policy(settings, policy, warm_start or WarmStart(**IMITATION), seed)
    lengths = _lengths(imitation, flags)
    args = make_args(run_config, **{**lengths, **ppo.flags})
    print(f"imitation done, loss {imitation.loss:.3f} nats per token; training {updates} updates", flush=True)
    _train(pretraining, args, lengths, report, folder)
    summary = report.write()
    print(ending(summary, folder, args), flush=True)
    return summary


def _train(
    pretraining: Stage | None, args: Namespace, lengths: Mapping[str, int], report: RunReport, folder: Path
) -> None:
    """Pretrain the critic, if that is a stage of the run, then train; Ctrl-C keeps what was evaluated until then."""
    from embedded.pretraining import pretrain_critic
    from embedded.train import train

    try:
        if pretraining:
            shutil.rmtree(folder / "critic", ignore_errors=True)  # an earlier run's, of another policy
            pretrain_critic(pretraining, lengths)
        train(args, report)
    except KeyboardInterrupt:
        if report.evaluations:
            report.write()
        done = len(report.history)
        raise SystemExit(f"interrupted after {done} updates; what was evaluated until then is in {folder}/") from None


def _without_warmup(keys: Mapping[str, Any], flags: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys without a cluster's critic warm-up, unless the flags ask for as many updates; and a note about it."""
    if "num_critic_only_steps" in flags or not keys.get("critic_warmup"):
        return dict(keys), []
    note = (
        "critic_warmup of the YAML is left out, because it is made for long runs; here the critic trains alone for the "
        f"first {CRITIC_ONLY} updates, at most half of all. To keep it, add --set-flag num_critic_only_steps=N, with "
        "N = w_epoch + w_iter"
    )
    return {key: value for key, value in keys.items() if key != "critic_warmup"}, [note]


def _check(stages: Sequence[Stage], folder: Path) -> RolloutSettings:
    """Try everything that can fail early; nothing is written. Returns the settings of the last stage.

    Raises:
        SlimeVerlogError: about the first mistake.
    """
    from embedded.arguments import build_args
    from rollout.bridge.settings import check_keys
    from rollout.data_source import EpisodeSource
    from rollout.tasks import try_each_task
    from slime_verlog import ConfigError

    for stage in stages:
        EpisodeSource(build_args(stage.keys, **stage.flags))
    settings = check_keys(stages[-1].keys)
    if (folder / "episodes.jsonl").exists() and not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} holds episodes, but not of a training run; choose another --out")
    try_each_task(settings)
    return settings


def _teacher(settings: RolloutSettings) -> str:
    """What the policy imitates, in words."""
    from embedded.warmstart.demonstrations import find_expert
    from rollout.tasks import read_tasks

    paths = dict.fromkeys(task.env_path for task in read_tasks(settings))
    untaught = [path for path in paths if find_expert(path) is None]
    if not untaught:
        return "imitating scripted play"
    return (
        f"{', '.join(untaught)} has no expert_action(env), so the policy imitates random actions: that teaches it to "
        "give valid answers and to prefer no action, and PPO starts from there"
    )


def _lengths(imitation: Imitation, flags: Mapping[str, Any]) -> dict[str, int]:
    """The limits on prompts and answers, printed if they are not the defaults."""
    from embedded.arguments import EmbeddedFlags

    lengths = imitation.lengths(EmbeddedFlags(hf_checkpoint=""))
    changed = [
        f"{name} {value}"
        for name, value in lengths.items()
        if value != EmbeddedFlags.model_fields[name].default and name not in flags
    ]
    if changed:
        print(
            f"the longest prompt has {imitation.longest_prompt} tokens and the longest answer "
            f"{imitation.longest_answer}, so these flags are raised: {', '.join(changed)}"
        )
    return lengths


def ending(summary: Mapping[str, Any], folder: Path, args: Namespace) -> str:
    """The last lines of a run: results, warnings, and the commands that continue from here."""
    from embedded.report import describe

    lines = [f"before: {describe(summary['win_rate_before'])}", f"after:  {describe(summary['win_rate_after'])}"]
    if not summary["win_rate_after"]["mean"]:
        before, after = summary["return_before"], summary["return_after"]
        lines.append(f"return: {before['mean']:.3f} ± {before['se']:.3f} → {after['mean']:.3f} ± {after['se']:.3f}")
    if summary["failed_episodes"]:
        lines.append(
            f"error: {summary['failed_episodes']} held-out episodes lost their environment and count as 0; the first: "
            f"{summary['first_failure']}"
        )
    if summary["note"]:
        lines.append(f"note: {summary['note']}")
    if summary["fault"]:
        lines.append(f"error: {summary['fault']}")
    lines.append(f"written to {folder}/; policy_best/ is the policy after {summary['best_update']} updates")
    return "\n".join([*lines, *(f"  {command}" for command in commands(folder, args, summary["updates"]))])


def commands(folder: Path, args: Namespace, updates: int) -> list[str]:
    """The commands that evaluate the last policy, show the episodes, and compare before with after."""
    from embedded.report import setting_of

    me = "slime-verlog" if shutil.which("slime-verlog") else f"{shlex.quote(sys.executable)} -m inspection"
    here = shlex.quote(str(folder))
    lengths = f"--max-response-len {args.rollout_max_response_len} --max-context-len {args.rollout_max_context_len}"
    return [
        f"{me} evaluate --config {here}/config.yaml --player {here}/policy_after {lengths} --out {here}/evaluation",
        f"{me} view {here}",
        f"{me} compare {here} {here} --settings '{setting_of(0)}' '{setting_of(updates)}'",
    ]


def seeds_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table with one row per seed."""
    lines = ["", "| seed | win rate before | after | turns per episode before | after | wall time |"]
    lines += ["|---|---|---|---|---|---|"]
    for s in summaries:
        before, after = s["win_rate_before"], s["win_rate_after"]
        lines.append(
            f"| {s['seed']} | {before['mean']:.2f} ± {before['se']:.2f} | {after['mean']:.2f} ± {after['se']:.2f} "
            f"| {s['turns_per_episode_before']:.0f} | {s['turns_per_episode_after']:.0f} | {s['wall_time_s']:.0f} s |"
        )
    return "\n".join(lines)


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


def _machine() -> dict[str, Any]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
