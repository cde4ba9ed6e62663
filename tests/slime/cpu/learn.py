"""The quickstart's policy trained by slime's own loop on CPU: does it learn there as it does in the embedded one?

    SLIME_PATH=... SLIME_CPU_PYTHON=... python -m tests.slime.cpu.learn --updates 40 --out outputs/slime_cpu

Writes `curve.csv` (updates so far, held-out win rate, its standard error, turns an episode) and `curve.png`.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from embedded.engine import EngineOptions
from embedded.quickstart import quiet
from embedded.server import EngineServer
from embedded.warmstart import WarmStart, make_policy
from rollout.config import load_config
from tests.slime.cpu.harness import Run, convert_checkpoint, find_slime

CONFIG = "custom_configs/quickstart.yaml"
CRITIC_ONLY = 6
FLAGS = (
    *("--rollout-batch-size", "256", "--n-samples-per-prompt", "1", "--global-batch-size", "64"),
    *("--rollout-max-response-len", "40", "--rollout-max-context-len", "512", "--rollout-temperature", "1.0"),
    *("--num-critic-only-steps", str(CRITIC_ONLY), "--kl-coef", "0.001", "--entropy-coef", "0.001"),
    *("--eps-clip", "0.2", "--eps-clip-c", "3.0", "--value-clip", "0.5", "--lr", "3e-4"),
    *("--max-tokens-per-gpu", "8192", "--eval-prompt-data", "held-out", "from-the-yaml"),
    *("--rollout-data-postprocess-path", "advantage.kl_split.log_kl_split"),
)


def evaluations(log: str) -> list[tuple[int, dict[str, float]]]:
    """Updates trained so far, and the metrics of every evaluation in slime's log."""
    found = []
    for rollout, metrics in re.findall(r" eval (\d+): (\{.*?\})\s*$", log, flags=re.MULTILINE):
        before_training = not found and rollout == "0"
        found.append((0 if before_training else int(rollout) + 1, ast.literal_eval(metrics)))
    return found


def write_curve(out: Path, points: Sequence[tuple[int, dict[str, float]]], task: str) -> None:
    """The table and the picture of the held-out win rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [
        (updates, m[f"eval/{task}/success"], m[f"eval/{task}/success_se"], m[f"eval/{task}/turns"])
        for updates, m in points
    ]
    with open(out / "curve.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("updates", "win_rate", "standard_error", "turns"))
        writer.writerows(rows)
    figure, axis = plt.subplots(figsize=(6, 4))
    updates, wins, errors, _ = zip(*rows, strict=True)
    axis.errorbar(updates, wins, yerr=errors, capsize=3)
    axis.set(xlabel="updates", ylabel="held-out win rate", ylim=(0, 1), title="BabyAI goto in slime's train.py, on CPU")
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=120)


def main() -> None:
    """Make the policy, train it inside slime, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40, help="critic-only steps included")
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/slime_cpu"))
    options = parser.parse_args()
    quiet()
    slime, work = find_slime(), Path(tempfile.mkdtemp(prefix="sv-", dir="/tmp"))
    options.out.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    policy = work / "policy"
    config = load_config(argparse.Namespace(custom_config_path=CONFIG))
    loss = make_policy(config, policy, WarmStart(), options.seed)
    print(f"warm start: {loss:.3f} nats a token", flush=True)
    reference = convert_checkpoint(slime, work / "conversion", policy)
    roles = {"name": "default", "role": "critic", "overrides": {"lr": 1e-3, "save": str(work / "critic")}}
    (work / "roles.yaml").write_text(yaml.safe_dump({"megatron": [roles]}))
    with EngineServer(EngineOptions(model_path=str(policy), max_running_requests=32)) as engine:
        flags = [
            *FLAGS,
            *("--rollout-external-engine-addrs", f"127.0.0.1:{engine.port}", "--rollout-seed", str(options.seed)),
            *("--num-rollout", str(options.updates), "--eval-interval", str(options.eval_interval)),
            *("--megatron-config-path", str(work / "roles.yaml")),
        ]
        run = Run(slime, work / "run", policy, reference, settings, flags)
        run.train(timeout_s=6 * 3600)
    shutil.copy(run.log, options.out / "train.log")
    points = evaluations(run.log.read_text(errors="replace"))
    write_curve(options.out, points, settings["tasks"][0])
    for updates, metrics in points:
        task = settings["tasks"][0]
        success, error = metrics[f"eval/{task}/success"], metrics[f"eval/{task}/success_se"]
        print(f"{updates:>4} updates  win rate {success:.3f} ± {error:.3f}")
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
