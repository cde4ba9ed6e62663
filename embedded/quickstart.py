"""BabyAI end to end on one machine without a GPU: warm start, zero-shot evaluation, PPO, evaluation, report.

`python -m embedded.quickstart --seed 0` writes outputs/quickstart/; `--seeds 0 1 2` one folder a seed below it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import warnings
from pathlib import Path
from typing import Any

CONFIG = "custom_configs/quickstart.yaml"


def read_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a tiny policy on BabyAI with PPO and dual-discount GAE.")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, default=0, help="seed of warm start, training episodes and sampling")
    seeds.add_argument("--seeds", type=int, nargs="+", help="several runs, each in OUT/seed_N")
    parser.add_argument("--updates", type=int, default=40, help="PPO updates, critic warm-up included")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--config", default=CONFIG, help="custom YAML: environment, memory, discounts, evaluation")
    return parser.parse_args(argv)


def run_seed(
    seed: int, folder: Path, config: str, updates: int, warm_start: Any = None, **flags: Any
) -> dict[str, Any]:
    """One whole run; returns its summary, which is also in `folder`. `flags` are slime's, by name.

    Raises:
        ConfigError: the YAML is refused, or its environment cannot be demonstrated.
        MissingDependencyError: an optional package is not installed.
    """
    from embedded.arguments import make_args
    from embedded.report import RunReport, describe
    from embedded.train import train
    from embedded.warmstart.imitation import WarmStart, make_policy
    from rollout.bridge.settings import load_settings

    policy = folder / "policy"
    given = {"rollout_seed": seed, "num_rollout": updates, "eval_interval": 20, **flags}
    args = make_args(config, hf_checkpoint=str(policy), **given)
    settings = load_settings(args)
    report = RunReport(folder, {"config": config, "tasks": list(settings.tasks), "seed": seed, **_machine()})
    print(f"seed {seed}: warm start from scripted play", flush=True)
    loss = make_policy(settings, policy, warm_start or WarmStart(), seed)
    print(f"warm start done, {loss:.3f} nats a token; training {updates} updates", flush=True)
    train(args, report)
    summary = report.write()
    before, after = summary["win_rate_before"], summary["win_rate_after"]
    print(f"before: {describe(before)}\nafter:  {describe(after)}\nwritten to {folder}/", flush=True)
    return summary


def _machine() -> dict[str, Any]:
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}


def main(argv: list[str] | None = None) -> None:
    """Run one seed or several."""
    flags = read_flags(argv)
    quiet()
    from rollout.errors import SlimeVerlogError

    try:
        if flags.seeds is None:
            run_seed(flags.seed, flags.out, flags.config, flags.updates)
            return
        summaries = [run_seed(s, flags.out / f"seed_{s}", flags.config, flags.updates) for s in flags.seeds]
    except SlimeVerlogError as error:
        raise SystemExit(f"error: {error}") from error
    (flags.out / "seeds.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    print("\n| seed | win rate before | after | turns an episode before | after | wall time |")
    print("|---|---|---|---|---|---|")
    for s in summaries:
        before, after = s["win_rate_before"], s["win_rate_after"]
        print(
            f"| {s['seed']} | {before['mean']:.2f} ± {before['se']:.2f} | {after['mean']:.2f} ± {after['se']:.2f} "
            f"| {s['turns_per_episode_before']:.0f} | {s['turns_per_episode_after']:.0f} | {s['wall_time_s']:.0f} s |"
        )


def quiet() -> None:
    """Keep other packages' notes off the screen, so that progress stays readable."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="megatron")
    transformers_logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
