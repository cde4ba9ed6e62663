"""Train an existing language model on BabyAI with PPO and dual-discount GAE, on one GPU.

`python -m embedded.pretrained` trains SmolLM2-135M-Instruct; `--model` takes any model that `embedded.engine.decoder`
serves: Llama-, Qwen2-, Qwen3- and Mistral-shaped ones, in float32. The output is the same as the quickstart's.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from embedded.run.folder import METRICS, SUMMARY, IfHeld, check_folder, write_text
from slime_verlog import ConfigError, command, read_settings

CONFIG = "custom_configs/quickstart.yaml"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def read_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="Hugging Face folder or hub name (default: %(default)s)")
    parser.add_argument("--config", default=CONFIG, help="YAML with environment, memory, discounts and evaluation")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")

    def add(name: str, flag: str, default: float, meaning: str) -> None:
        parser.add_argument(name, dest=flag, type=type(default), default=default, metavar="N", help=meaning)

    add("--updates", "num_rollout", 60, "PPO updates, critic warm-up included")
    add("--turns", "rollout_batch_size", 256, "turns per batch")
    add("--step-turns", "global_batch_size", 64, "turns per optimizer step")
    add("--response-len", "rollout_max_response_len", 48, "most tokens in a response")
    add("--context-len", "rollout_max_context_len", 1024, "most tokens in prompt and response together")
    add("--lr", "lr", 5e-6, "learning rate of the actor")
    add("--critic-lr", "critic_lr", 2e-5, "learning rate of the critic")
    add("--max-tokens", "max_tokens_per_gpu", 8192, "tokens per micro-batch")
    parser.add_argument("--demonstrations", type=int, default=20, help="episodes to imitate first; 0 skips imitation")
    parser.add_argument("--eval-episodes", type=int, help="held-out episodes; overrides the YAML")
    parser.add_argument("--max-turns", type=int, help="turns per episode; overrides the YAML")
    add("--seed", "rollout_seed", 0, "seed of imitation, training episodes and sampling")
    parser.add_argument("--out", type=Path, default=Path("outputs/pretrained"))
    parser.add_argument("--overwrite", action="store_true", help="delete the run in --out first")
    return parser.parse_args(argv)


@command()
def main(argv: list[str] | None = None) -> None:
    """Check the device, then train."""
    flags = read_flags(argv)
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    if flags.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no CUDA device; take a machine with a GPU or --device cpu")
    from embedded.launch import set_up_process

    set_up_process()
    if train_model(flags)["fault"]:
        raise SystemExit(1)


def train_model(flags: argparse.Namespace) -> dict[str, Any]:
    """Imitate, evaluate, train, evaluate and report; returns the summary. Raises ConfigError for a mistake."""
    from embedded.arguments import EmbeddedFlags, read_keys
    from embedded.launch import run_seed
    from embedded.run.record import read_rows
    from embedded.warmstart.imitation import WarmStart
    from rollout.bridge.settings import set_key

    if_held: IfHeld = "overwrite" if flags.overwrite else "refuse"
    check_folder(flags.out, if_held, resumes=False)
    model = find_model(flags.model)
    keys = read_keys(flags.config)
    if flags.eval_episodes is not None:
        keys = set_key(keys, "eval.episodes", flags.eval_episodes)
    if flags.max_turns is not None:
        keys["max_turns"] = flags.max_turns
    slimes = {name: value for name, value in vars(flags).items() if name in EmbeddedFlags.model_fields}
    slimes |= {"adam_beta2": 0.999, "save_interval": None}
    warm = None
    if flags.demonstrations:
        given = {"model": str(model), "episodes": flags.demonstrations, "epochs": 1, "batch_size": 32, "lr": 1e-4}
        given["max_tokens"] = flags.max_tokens_per_gpu
        warm = read_settings(WarmStart, given, "demonstrations.")
    seed, updates = slimes.pop("rollout_seed"), slimes.pop("num_rollout")
    summary = run_seed(seed, flags.out, flags.config, updates, warm or model, keys, if_held, **slimes)
    played = [row for row in read_rows(flags.out / METRICS) if "turn/response_tokens" in row]
    tokens = sum(row["turn/response_tokens"] * row["rollout/turns"] for row in played)
    # The time that environments take is included.
    summary["rollout_tokens_per_s"] = round(tokens / max(sum(row["perf/rollout_s"] for row in played), 1e-9), 1)
    write_text(flags.out / SUMMARY, json.dumps(summary, indent=2) + "\n")
    print(f"{summary['device']}, {summary['rollout_tokens_per_s']} new tokens/s")
    return summary


def find_model(name: str) -> Path:
    """Find the folder `name`, or download the hub's model of that name; raises ConfigError if neither works."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        failed = f"--model '{name}' is not a folder and could not be downloaded from the hub: {reason}"
        raise ConfigError(f"{failed} Give the folder of a Hugging Face model") from error


if __name__ == "__main__":
    main()
