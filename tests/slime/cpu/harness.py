"""Drives a slime checkout's own train.py from a test, and reads back what happened inside.

Runs on a CPU unless a test says otherwise (`tests/slime/gpu`). `SLIME_PATH` names the checkout,
`SLIME_CPU_PYTHON` the interpreter that `install.sh` made. One `Run` is one folder: model,
checkpoints, ledger of the environments, record of the training; it may be started, killed and
resumed.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from aiohttp.test_utils import unused_port

from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer
from tests.slime.cpu.ledger_env import read_ledger

REPO = Path(__file__).parents[3]
IMPORTS = Path(__file__).parent / "imports"
SIZE = PolicySize(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, context=512)

LOCAL_FLAGS = (
    "--transformer-impl local --spec tests.slime.cpu.megatron_on_cpu layer_spec",
    "--attention-backend unfused",
    "--no-rope-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion",
    "--no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion",
)
"""Megatron without TransformerEngine and Apex."""
NO_DROPOUT = "--attention-dropout 0.0 --hidden-dropout 0.0"
CPU_FLAGS = (*LOCAL_FLAGS, NO_DROPOUT, "--distributed-backend gloo")
OPTIMIZER_FLAGS = (
    "--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.0",
    "--adam-beta1 0.9 --adam-beta2 0.98",
)
HOOKS = {
    "rollout_function_path": "rollout.fixed_turn.generate_rollout",
    "data_source_path": "rollout.data_source.EpisodeSource",
    "custom_convert_samples_to_train_data_path": "rollout.samples.convert_samples_to_train_data",
    "custom_megatron_init_path": "advantage.patch.install",
    "custom_rollout_log_function_path": "inspection.metrics.log_rollout",
    "custom_eval_rollout_log_function_path": "inspection.metrics.log_eval_rollout",
}


@dataclass(frozen=True)
class Slime:
    """A slime checkout, the interpreter that can run it, and the flags and variables of its
    device."""

    path: Path
    python: Path
    megatron_flags: Sequence[str] = CPU_FLAGS
    environment: Mapping[str, str] = field(default_factory=dict)
    """PYTHONPATH, if it is among them, follows the folders that every run needs."""


def find_slime() -> Slime:
    """The checkout and interpreter that the environment names; skips the test where there are
    none."""
    path, python = os.environ.get("SLIME_PATH"), os.environ.get("SLIME_CPU_PYTHON")
    if not path or not python:
        pytest.skip(
            "set SLIME_PATH to a slime checkout and SLIME_CPU_PYTHON to the interpreter that "
            "tests/slime/cpu/install.sh makes"
        )
    return Slime(Path(path.split(os.pathsep)[0]), Path(python))


def make_model(folder: Path, size: PolicySize = SIZE, *, tied: bool = False) -> Path:
    """A tiny random Qwen2 with a tokenizer of its own, sharp enough that its choices are not
    ties."""
    texts = ["go on and on", "seed 12 turn 3\nleft 4", "wait for it, and then some"] * 4
    tokenizer = train_tokenizer(texts, ["Current Observation:\n"], vocab_size=300)
    model = build_policy(tokenizer, size, seed=1)
    if tied:  # the output layer is the embedding, as in Qwen2.5-3B
        model.config.tie_word_embeddings = True
        model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    save_policy(model.bfloat16(), tokenizer, folder)
    return folder


def model_flags(folder: Path) -> list[str]:
    """Megatron's description of the Hugging Face model in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config.get("rope_parameters", {}).get("rope_theta") or config["rope_theta"]
    return [
        "--swiglu --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias",
        f"--normalization RMSNorm --norm-epsilon {config['rms_norm_eps']}",
        f"--group-query-attention --num-query-groups {config['num_key_value_heads']}",
        f"--num-attention-heads {config['num_attention_heads']}",
        f"--num-layers {config['num_hidden_layers']} --hidden-size {config['hidden_size']}",
        f"--ffn-hidden-size {config['intermediate_size']} --rotary-base {int(rotary)}",
        f"--vocab-size {config['vocab_size']}",
        "" if config["tie_word_embeddings"] else "--untie-embeddings-and-output-weights",
        "--make-vocab-size-divisible-by 1",
    ]


@dataclass
class Run:
    """One experiment on disk. `config` is the custom YAML, `flags`, of which one text may hold
    several, come last on the command line and win."""

    slime: Slime
    work: Path
    model: Path
    reference: Path
    config: Mapping[str, Any]
    flags: Sequence[str]
    gpus: int = 1
    script: str = "train.py"
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.work / "train.log"
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "config.yaml").write_text(yaml.safe_dump(dict(self.config)))

    def command(self, extra: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
        """train.py's flags: model, device, optimizer, hooks (but for those `without`), then this
        run's own."""
        hooks = {name: path for name, path in HOOKS.items() if name not in without}
        return [
            *model_flags(self.model),
            *self.slime.megatron_flags,
            *OPTIMIZER_FLAGS,
            *(f"--{name.replace('_', '-')} {path}" for name, path in hooks.items()),
            f"--custom-config-path {self.work}/config.yaml",
            f"--hf-checkpoint {self.model} --ref-load {self.reference} --actor-num-nodes 1",
            f"--actor-num-gpus-per-node {self.gpus} --num-gpus-per-node {self.gpus}",
            f"--update-weight-transport disk --update-weight-disk-dir {self.work}/weights",
            "--use-dynamic-batch-size --max-tokens-per-gpu 512 --advantage-estimator ppo",
            f"--save-debug-rollout-data {self.work}/samples/{{rollout_id}}.pt",
            *self.flags,
            *extra,
        ]

    def start(
        self, extra: Sequence[str] = (), without: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start `script` in the background; output goes to `log`."""
        return start_script(
            self.slime, self.work, self.script, self.command(extra, without), self.gpus
        )

    def finish(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        """Wait for the end; a failed run shows the end of its log."""
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop_all(self.work)
        assert code == 0, f"{self.script} ended with {code}:\n{self.tail()}"

    def train(
        self, extra: Sequence[str] = (), without: Sequence[str] = (), timeout_s: float = 1200
    ) -> None:
        """Run to the end."""
        self.finish(self.start(extra, without), timeout_s)

    def refusal(self, extra: Sequence[str] = (), timeout_s: float = 600) -> str:
        """What a run that must fail has logged, with single blanks."""
        process = self.start(extra)
        try:
            assert process.wait(timeout_s) != 0
        finally:
            stop_all(self.work)
        return re.sub(r"\s+", " ", self.log.read_text(errors="replace"))

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def logged(self, name: str) -> list[float]:
        """Every value of a metric in slime's log, in order."""
        return [
            float(value)
            for value in re.findall(rf"'{name}': ([-+\d.e]+)", self.log.read_text(errors="replace"))
        ]

    def samples(self, rollout_id: int | str) -> list[dict[str, Any]]:
        """The samples that the rollout handed to slime, in order; `eval_0` and so on for
        evaluations."""
        return torch.load(self.work / "samples" / f"{rollout_id}.pt", weights_only=False)["samples"]

    def turns(self, rollout_id: int) -> list[dict[str, Any]]:
        """The samples of turns, without those that bootstrap."""
        samples = self.samples(rollout_id)
        return [sample for sample in samples if sample["metadata"]["kind"] == "turn"]

    def versions(self, rollout_ids: Iterable[int]) -> list[set[int]]:
        """The weights that played each batch's turns."""
        return [
            {int(version) for turn in self.turns(k) for version in turn["weight_versions"]}
            for k in rollout_ids
        ]

    def records(self, role: str, rollout_id: int) -> list[dict[str, Any]]:
        """What each rank trained on (see `recorder.py`), by rank; empty if the role did not
        train."""
        paths = sorted((self.work / "record").glob(f"{role}-{rollout_id}-*.pt"))
        return [torch.load(path, weights_only=False) for path in paths]

    def payments(self) -> dict[tuple[int, int, str], dict[str, Any]]:
        """The ledger, by seed, turn and answer."""
        return read_ledger(self.work / "ledger")


def micro_batches(record: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """What reached the loss of each micro-batch, and the numbers of its samples."""
    return zip(record["batches"], record["data"]["micro_batch_indices"], strict=True)


def place_of(sample: Mapping[str, Any]) -> tuple[int, int]:
    """Episode and turn index of a sample."""
    return sample["metadata"]["episode_id"], sample["metadata"]["round_number"]


def start_script(
    slime: Slime, work: Path, script: str, arguments: Sequence[str], gpus: int = 1
) -> subprocess.Popen[bytes]:
    """Start one of slime's scripts under the imports of this harness, in a new process group.

    An argument may hold several words."""
    preload = work / "preload" / "torch_memory_saver_hook_mode_preload.abi3.so"
    preload.parent.mkdir(parents=True, exist_ok=True)
    preload.touch()
    # Megatron writes its choice of attention into the environment, where it was used in this
    # process before.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    folders = [str(IMPORTS), str(slime.path), str(REPO), slime.environment.get("PYTHONPATH")]
    environment = {
        **inherited,
        **slime.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "SLIME_CPU_WORK": str(work),
        "SLIME_CPU_GPUS": str(gpus),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **(
            {} if script.startswith("train") else {**ONE_PROCESS, "MASTER_PORT": str(unused_port())}
        ),
    }
    command = [
        str(slime.python),
        str(Path(__file__).with_name("run_train.py")),
        str(slime.path / script),
        *" ".join(arguments).split(),
    ]
    with open(work / "train.log", "ab") as log:
        return subprocess.Popen(
            command,
            cwd=work,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


ONE_PROCESS = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def convert_checkpoint(slime: Slime, work: Path, model: Path) -> Path:
    """The model as a Megatron checkpoint, by slime's own tool: what the critic starts from."""
    target = work / "reference"
    work.mkdir(parents=True, exist_ok=True)
    arguments = [
        *model_flags(model),
        *slime.megatron_flags,
        f"--hf-checkpoint {model} --save {target}",
    ]
    process = start_script(slime, work, "tools/convert_hf_to_torch_dist.py", arguments)
    code = process.wait(300)
    assert code == 0, (
        f"the conversion ended with {code}:\n{(work / 'train.log').read_text()[-4000:]}"
    )
    return target


def stop_all(work: Path) -> None:
    """Kill what this run started, wherever it has got to: the processes that carry its folder in
    their environment."""
    mine = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLIME_CPU_WORK") == str(work):
                process.send_signal(signal.SIGKILL)
                mine.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    psutil.wait_procs(mine, timeout=10)
