"""What has to hold on a GPU, checked there: `scripts/check_gpu.sh` runs this and shows what it saw.

    python -m tests.gpu.check                  on CUDA; ends with a sentence where there is none
    python -m tests.gpu.check --device cpu     the same checks without a GPU, gloo in place of NCCL

Advantages against the float64 definition, their exchange over a real process group of one rank, the
trainer against itself on the CPU, and the embedded loop (engine, rollout, trainer) with the
log-probs of both sides held together.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

import torch
import yaml

NO_GPU = (
    "this machine has no CUDA device that torch {version} can use, so nothing was checked; run it "
    "on a machine with an NVIDIA GPU and a CUDA build of torch, or give --device cpu to try the "
    "checks themselves"
)
DISCOUNTS = {"gamma_step": 0.97, "lambda_step": 0.9, "gamma_token": 0.995, "lambda_token": 0.98}
UPDATES = 2


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    size: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.error <= self.bound


def check_hook(device: torch.device, turns: int, longest: int) -> Iterator[Finding]:
    """The hook in both precisions against the definition, then through the collectives against
    itself.

    Errors are relative to 1 + |advantage|.
    """
    from advantage import exchange
    from tests.advantage.batches import expected, in_float64, make_args, make_samples

    drawn = make_samples(random.Random(1), max(1, turns // 8), longest=longest, most_turns=16)
    args = make_args(**DISCOUNTS)
    right = torch.cat([torch.cat(rows) for rows in zip(*expected(drawn, args), strict=True)])
    size = f"{len(drawn)} samples, {sum(len(sample.mask) for sample in drawn)} tokens"
    for samples, name, bound in ((in_float64(drawn), "float64", 1e-12), (drawn, "float32", 1e-6)):
        _run_hook(samples, args, device)  # the first call warms up
        found, took = _run_hook(samples, args, device)
        error = (found - right).abs() / (1 + right.abs())
        yield Finding(
            f"dual-discount GAE, {name}", f"{size}, {took:.1f} ms", float(error.max()), bound
        )
    group = exchange.current_layout().data

    def gathered_rows(self: exchange.Exchange, own: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """As with several ranks: the collectives run in this group of one too."""
        table, start = exchange.gather_turns(own, group)
        return table.cpu(), slice(start, start + len(own))

    with mock_patch.object(exchange.Exchange, "rows", gathered_rows):
        gathered, _ = _run_hook(drawn, args, device)
    backend = torch.distributed.get_backend(group.handle)
    difference = float((gathered - found).abs().max())
    yield Finding(
        f"hook over {backend} against without", f"{group.size} rank, {size}", difference, 0.0
    )


def _run_hook(
    samples: list[Any], args: argparse.Namespace, device: torch.device
) -> tuple[torch.Tensor, float]:
    """All advantages, then all returns, of data on the device as a rank has them; and the
    milliseconds."""
    from advantage.hook import compute_advantages
    from tests.advantage.batches import rollout_data

    keys = ("values", "kl", "loss_masks")
    columns = rollout_data(samples).items()
    data = {
        key: [row.to(device) for row in column] if key in keys else column
        for key, column in columns
    }
    began = _now(device)
    compute_advantages(args, data)
    took = 1e3 * (_now(device) - began)
    return torch.cat([*data["advantages"], *data["returns"]]).cpu().double(), took


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer_numbers(folder: Path) -> dict[str, float]:
    """What two updates on made-up batches report, on the device that the trainer chooses."""
    from embedded.trainer.ppo import PpoTrainer
    from tests.embedded.conftest import made_up_batch, trainer_args

    trainer = PpoTrainer(trainer_args(hf_checkpoint=str(folder)))
    numbers: dict[str, float] = {}
    for update in range(UPDATES):
        metrics = trainer.train(update, made_up_batch(seed=update))
        numbers |= {f"{update} {name}": value for name, value in metrics.items()}
    return numbers


def check_trainer(folder: Path) -> Iterator[Finding]:
    """Every number that two updates report here, against another process that sees no GPU."""
    here = trainer_numbers(folder)
    command = [
        sys.executable,
        "-m",
        "tests.gpu.check",
        "--device",
        "cpu",
        "--trainer-numbers",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer failed on the CPU:\n{done.stderr[-2000:]}")
    there: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    error = max(abs(here[name] - there[name]) / (1 + abs(there[name])) for name in here)
    yield Finding(
        "embedded trainer against the CPU's", f"{UPDATES} updates, {len(here)} numbers", error, 1e-3
    )


def record_difference(args: Any, rollout_id: int, data: Mapping[str, Any]) -> None:
    """`--rollout-data-postprocess-path`: how far training and rollout are apart on trained
    log-probs, onto `args`."""
    pairs = zip(data["log_probs"], data["rollout_log_probs"], data["loss_masks"], strict=True)
    args.log_prob_differences.append(
        max(float(((p - q).abs() * mask).max()) for p, q, mask in pairs)
    )


def check_loop(folder: Path, work: Path) -> Iterator[Finding]:
    """Engine, rollout and trainer together, on a game that takes no time."""
    from embedded.arguments import make_args
    from embedded.train import train

    path = work / "loop.yaml"
    game = {
        "rollout_interaction_env_path": "tests.fixtures.counting_env",
        "tasks": ["count"],
        "env_backend": "inline",
    }
    path.write_text(
        yaml.safe_dump({**game, "env": {"max_length": 6}, "eval": {"episodes": 4}, "n_env": 8})
    )
    sizes = {"rollout_batch_size": 32, "global_batch_size": 8, "rollout_max_response_len": 12}
    args = make_args(
        path,
        **{**sizes, "rollout_max_context_len": 256, "num_rollout": 4, "num_critic_only_steps": 1},
        hf_checkpoint=str(folder),
        rollout_data_postprocess_path="tests.gpu.check.record_difference",
    )
    turns: list[float] = []
    args.log_prob_differences = []
    train(args, _Tracker(turns))
    size = f"{len(turns)} updates, {sum(turns):.0f} turns"
    yield Finding(
        "embedded loop: log-probs, trainer - engine", size, max(args.log_prob_differences), 1e-4
    )


@dataclass
class _Tracker:
    """Counts the turns of a run of the embedded trainer."""

    turns: list[float]

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        self.turns.append(metrics["rollout/turns"])

    def evaluation(self, rollout_id: int, result: Any, weights: Any) -> None:
        pass


def make_policy(folder: Path) -> Path:
    """A small random policy with a tokenizer, sharp enough that its choices are not ties."""
    from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer
    from tests.embedded.conftest import TEXTS, sharpen

    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, ["Current Observation:\n"])
    size = PolicySize(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, context=256)
    save_policy(sharpen(build_policy(tokenizer, size, seed=1), 3.0), tokenizer, folder)
    return folder


def run_checks(device: torch.device, turns: int, longest: int, show: Callable[[str], None]) -> bool:
    """Run everything and show a line each; returns whether all of it holds."""
    from embedded.launch import set_up_process
    from embedded.trainer.megatron import initialize

    set_up_process()
    show(f"device: {describe(device)}")
    found = initialize()
    assert found.type == device.type, f"the embedded trainer chose {found}"
    holds = True
    with tempfile.TemporaryDirectory() as work:
        folder = make_policy(Path(work) / "policy")
        checks = (
            check_hook(device, turns, longest),
            check_trainer(folder),
            check_loop(folder, Path(work)),
        )
        for finding in (finding for check in checks for finding in check):
            verdict = "ok" if finding.holds else "FAILED"
            show(
                f"{verdict:6} {finding.what}: error {finding.error:.1e} (at most "
                f"{finding.bound:g}); {finding.size}"
            )
            holds = holds and finding.holds
    return holds


def describe(device: torch.device) -> str:
    """The device and the software that drives it."""
    if device.type == "cpu":
        return f"CPU, torch {torch.__version__}; no GPU was checked"
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory / 2**30
    return (
        f"{properties.name}, {memory:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def main(argv: list[str] | None = None) -> int:
    """Check, and say what was seen; 0 if all holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=2048, help="turns of the GAE batch, about")
    parser.add_argument("--longest", type=int, default=512, help="tokens of its longest turns")
    parser.add_argument("--trainer-numbers", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        print(f"error: {NO_GPU.format(version=torch.__version__)}", file=sys.stderr)
        return 1
    if options.trainer_numbers:
        print(json.dumps(trainer_numbers(options.trainer_numbers)))
        return 0
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    holds = run_checks(device, options.turns, options.longest, lambda line: print(line, flush=True))
    print("all checks hold" if holds else "some checks failed")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
