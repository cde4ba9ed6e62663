"""The quickstart's policy trained by slime's own loop on CPU: does it learn there as it does in the
embedded one?

    SLIME_PATH=... SLIME_CPU_PYTHON=... python -m tests.slime.cpu.learn --seeds 0 1 2 --out OUT

Writes `curve.csv` (seed, updates so far, held-out win rate, its standard error, turns per episode).
"""

import argparse
import ast
import csv
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from embedded.launch import set_up_process
from embedded.warmstart.imitation import WarmStart, make_policy
from rollout.bridge.settings import load_settings
from tests.slime.cpu.harness import Run, convert_checkpoint, find_slime

CONFIG = "custom_configs/quickstart.yaml"
CRITIC_ONLY = 6
FLAGS = (
    "--rollout-batch-size 256 --n-samples-per-prompt 1 --global-batch-size 64",
    "--rollout-max-response-len 40 --rollout-max-context-len 512 --rollout-temperature 1.0",
    f"--num-critic-only-steps {CRITIC_ONLY} --kl-coef 0.001 --entropy-coef 0.001",
    "--eps-clip 0.2 --eps-clip-c 3.0 --value-clip 0.5 --lr 3e-4",
    "--max-tokens-per-gpu 8192 --eval-prompt-data held-out from-the-yaml",
    "--rollout-data-postprocess-path advantage.kl_split.log_kl_split",
)


def evaluations(log: str) -> list[tuple[int, dict[str, float]]]:
    """Updates trained so far, and the metrics of every evaluation in slime's log."""
    found = []
    for rollout, metrics in re.findall(r" eval (\d+): (\{.*?\})\s*$", log, flags=re.MULTILINE):
        before_training = not found and rollout == "0"
        found.append((0 if before_training else int(rollout) + 1, ast.literal_eval(metrics)))
    return found


def learn(
    seed: int, updates: int, eval_interval: int, out: Path
) -> list[tuple[int, dict[str, float]]]:
    """Make the policy, train it inside slime, and return what its evaluations found."""
    slime, work = find_slime(), Path(tempfile.mkdtemp(prefix="sv-", dir="/tmp"))
    settings: dict[str, Any] = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    policy = work / "policy"
    config = load_settings(argparse.Namespace(custom_config_path=CONFIG))
    loss = make_policy(config, policy, WarmStart(), seed).loss
    print(f"seed {seed}: warm start, {loss:.3f} nats a token", flush=True)
    reference = convert_checkpoint(slime, work / "conversion", policy)
    roles = {
        "name": "default",
        "role": "critic",
        "overrides": {"lr": 1e-3, "save": str(work / "critic")},
    }
    (work / "roles.yaml").write_text(yaml.safe_dump({"megatron": [roles]}))
    with EngineServer(EngineOptions(model_path=str(policy), max_running_requests=32)) as engine:
        flags = [
            *FLAGS,
            f"--rollout-external-engine-addrs 127.0.0.1:{engine.port} --rollout-seed {seed}",
            f"--num-rollout {updates} --eval-interval {eval_interval}",
            f"--megatron-config-path {work}/roles.yaml",
        ]
        run = Run(slime, work / "run", policy, reference, settings, flags)
        run.train(timeout_s=6 * 3600)
    shutil.copy(run.log, out / f"train_{seed}.log")
    points = evaluations(run.log.read_text(errors="replace"))
    shutil.rmtree(work, ignore_errors=True)
    return points


def main() -> None:
    """Train every seed; the table grows with each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=30, help="critic-only steps included")
    parser.add_argument("--eval-interval", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/slime_cpu"))
    options = parser.parse_args()
    set_up_process()
    options.out.mkdir(parents=True, exist_ok=True)
    task = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))["tasks"][0]
    with open(options.out / "curve.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("seed", "updates", "win_rate", "standard_error", "turns"))
        for seed in options.seeds:
            for updates, metrics in learn(
                seed, options.updates, options.eval_interval, options.out
            ):
                wins, error, turns = (
                    metrics[f"eval/{task}/{key}"] for key in ("success", "success_se", "turns")
                )
                writer.writerow((seed, updates, wins, error, turns))
                print(f"{updates:>4} updates  win rate {wins:.3f} ± {error:.3f}", flush=True)
            file.flush()


if __name__ == "__main__":
    main()
