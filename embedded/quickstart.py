"""BabyAI end to end on one machine without a GPU: imitation, evaluation, PPO, evaluation, report.

`python -m embedded.quickstart --seed 0` writes outputs/quickstart/; with `--seeds 0 1 2`, each seed has a folder there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_verlog import command

if TYPE_CHECKING:
    from embedded.warmstart.imitation import WarmStart

CONFIG = "custom_configs/quickstart.yaml"


def read_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a tiny policy on BabyAI with PPO and dual-discount GAE.")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, default=0, help="seed of imitation, training episodes and sampling")
    seeds.add_argument("--seeds", type=int, nargs="+", help="train once per seed, each in OUT/seed_N")
    parser.add_argument("--updates", type=int, default=40, help="PPO updates, critic warm-up included")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--config", default=CONFIG, help="YAML with environment, memory, discounts and evaluation")
    return parser.parse_args(argv)


@command()
def main(argv: list[str] | None = None) -> None:
    """Train one seed, or several and print their table."""
    flags = read_flags(argv)
    set_up_process()
    if flags.seeds is None:
        run_seed(flags.seed, flags.out, flags.config, flags.updates)
        return
    summaries = [run_seed(s, flags.out / f"seed_{s}", flags.config, flags.updates) for s in flags.seeds]
    (flags.out / "seeds.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    print(seeds_table(summaries))


def run_seed(
    seed: int, folder: Path, config: str, updates: int, warm_start: WarmStart | None = None, **flags: Any
) -> dict[str, Any]:
    """Imitate, evaluate, train, evaluate and report; the returned summary is also in `folder`.

    Args:
        flags: slime's flags by name; see `embedded.arguments.EmbeddedFlags`.

    Raises:
        ConfigError: the YAML or a flag is rejected, or the environment has no expert to imitate.
        MissingDependencyError: an optional package is not installed.
    """
    from embedded.arguments import make_args
    from embedded.report import RunReport, describe
    from embedded.train import train
    from embedded.warmstart.imitation import WarmStart, make_policy
    from rollout.bridge.settings import load_settings
    from rollout.data_source import try_each_task

    policy = folder / "policy"
    given = {"rollout_seed": seed, "num_rollout": updates, "eval_interval": 20, **flags}
    args = make_args(config, hf_checkpoint=str(policy), **given)
    settings = load_settings(args)
    try_each_task(settings)
    report = RunReport(folder, {"config": config, "tasks": list(settings.tasks), "seed": seed, **_machine()})
    print(f"seed {seed}: imitating scripted play", flush=True)
    loss = make_policy(settings, policy, warm_start or WarmStart(), seed)
    print(f"imitation done, loss {loss:.3f} nats per token; training {updates} updates", flush=True)
    train(args, report)
    summary = report.write()
    before, after = summary["win_rate_before"], summary["win_rate_after"]
    print(f"before: {describe(before)}\nafter:  {describe(after)}\nwritten to {folder}/", flush=True)
    return summary


def seeds_table(summaries: Sequence[dict[str, Any]]) -> str:
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
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron")
    transformers_logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _machine() -> dict[str, Any]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}


if __name__ == "__main__":
    main()
