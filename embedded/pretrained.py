"""PPO with dual-discount GAE on a language model that exists, in place of the quickstart's own tiny one; for one GPU.

`python -m embedded.pretrained --model FOLDER` trains it on BabyAI goto and writes what the quickstart writes. Whatever
`embedded.engine.decoder` serves will do: Llama-, Qwen2-, Qwen3- and Mistral-shaped models, in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

CONFIG = "custom_configs/quickstart.yaml"


def read_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--config", default=CONFIG, help="custom YAML: environment, memory, discounts, evaluation")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--updates", type=int, default=60, help="critic warm-up included")
    parser.add_argument("--turns", type=int, default=256, help="turns a batch")
    parser.add_argument("--step-turns", type=int, default=64, help="turns a training step")
    parser.add_argument("--response-len", type=int, default=48)
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--critic-lr", type=float, default=2e-5)
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens a micro-batch")
    parser.add_argument("--demonstrations", type=int, default=20, help="episodes to imitate first; 0 starts zero-shot")
    parser.add_argument("--eval-episodes", type=int, help="held-out episodes, in place of the YAML's")
    parser.add_argument("--max-turns", type=int, help="turns an episode, in place of the YAML's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrained"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Check the device, then train."""
    flags = read_flags(argv)
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if flags.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"error: torch {torch.__version__} finds no CUDA device; run this on a machine with a GPU, or give "
            "--device cpu for a trial of a few turns"
        )
    from embedded.quickstart import quiet
    from rollout.errors import SlimeVerlogError

    quiet()
    try:
        train_model(flags)
    except SlimeVerlogError as error:
        sys.exit(f"error: {error}")


def train_model(flags: argparse.Namespace) -> dict[str, Any]:
    """Imitate, evaluate, train, evaluate, report; returns the summary.

    Raises:
        ConfigError: the YAML or the model is refused.
    """
    from embedded.arguments import make_args
    from embedded.report import RunReport, describe
    from embedded.train import train
    from embedded.warmstart.imitation import WarmStart, adapt_policy
    from rollout.bridge.settings import load_settings

    args = make_args(_write_config(flags), hf_checkpoint=str(flags.model), **_slime_flags(flags))
    config = load_settings(args)
    report = RunReport(flags.out, {"model": flags.model.name, "seed": flags.seed, "device": _device_name()})
    if flags.demonstrations:
        given = {"episodes": flags.demonstrations, "epochs": 1, "lr": 1e-4, "max_tokens": flags.max_tokens}
        folder = flags.out / "policy"
        loss = adapt_policy(config, flags.model, folder, WarmStart(**given), flags.seed)
        args.hf_checkpoint = str(folder)
        print(f"imitated {flags.demonstrations} episodes, {loss:.3f} nats a token", flush=True)
    train(args, report)
    report.facts = {**report.facts, "rollout_tokens_per_s": _tokens_per_s(report.history)}
    summary = report.write()
    for name in ("before", "after"):
        print(f"{name}: {describe(summary[f'win_rate_{name}'])}")
    print(f"{summary['device']}, {summary['rollout_tokens_per_s']} new tokens/s; written to {flags.out}/", flush=True)
    return summary


def _write_config(flags: argparse.Namespace) -> Path:
    """The YAML with what the command line changes in it, in the run's folder."""
    keys = yaml.safe_load(Path(flags.config).read_text(encoding="utf-8"))
    if flags.eval_episodes:
        keys["eval"] = {**keys.get("eval", {}), "episodes": flags.eval_episodes}
    if flags.max_turns:
        keys["max_turns"] = flags.max_turns
    flags.out.mkdir(parents=True, exist_ok=True)
    path = flags.out / "config.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def _slime_flags(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_rollout": flags.updates,
        "num_critic_only_steps": min(6, flags.updates // 2),
        "eval_interval": 20,
        "rollout_seed": flags.seed,
        "rollout_batch_size": flags.turns,
        "global_batch_size": flags.step_turns,
        "rollout_max_response_len": flags.response_len,
        "rollout_max_context_len": flags.context_len,
        "max_tokens_per_gpu": flags.max_tokens,
        "lr": flags.lr,
        "critic_lr": flags.critic_lr,
        "adam_beta2": 0.999,
    }


def _tokens_per_s(history: list[dict[str, float]]) -> float:
    """New tokens a second of rollout, environments included."""
    played = [row for row in history if "turn/response_tokens" in row]
    tokens = sum(row["turn/response_tokens"] * row["rollout/turns"] for row in played)
    return round(tokens / max(sum(row["perf/rollout_s"] for row in played), 1e-9), 1)


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
