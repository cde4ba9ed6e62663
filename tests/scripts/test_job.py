"""A job: help, GPUs, what is printed, what is checked, and the Ray cluster that it is given to."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from scripts.launcher import cluster
from scripts.launcher.cluster import find_ray
from scripts.launcher.config import HYBRID
from scripts.launcher.gpus import layout
from scripts.launcher.job import dry_run
from scripts.launcher.resume import TRACKER
from scripts.launcher.variables import Variables
from slime_verlog import ConfigError
from tests.cases import pairs
from tests.scripts.conftest import REPO, Machine, by_flag, job_environment, train_flags
from tests.scripts.conftest import SCRIPTS as CLUSTER_SCRIPTS

SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.sh"))


def bash(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository's folder with the functions of scripts/lib in reach."""
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    command = ["bash", "-euo", "pipefail", "-c", program]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=variables)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_how_the_script_is_called(machine: Machine, script: str) -> None:
    done = machine.run(script, "--help", VENV=str(machine.home / "venv"))
    assert done.returncode == 0 and not done.stderr and f"bash scripts/{script}" in done.stdout
    assert not (machine.home / "venv").exists(), "it installs nothing"


@pytest.mark.parametrize("script", ["run_quickstart.sh", "run_embedded_gpu.sh", "run_ablation.sh"])
def test_variables_reach_the_programs_on_one_machine_and_options_win(
    tmp_path: Path, script: str
) -> None:
    """An installed environment whose Python says what it was asked to run."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$1" != -m ] || echo "$*"\n')
    python.chmod(0o755)
    stamp = bash(
        "source scripts/install.sh; stamp_of envs,embedded; stamp_of envs,embedded,studies",
        VENV=str(tmp_path),
    )
    for path in stamp.stdout.split():
        Path(path).touch()
    given = {"VENV": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "CONFIG": "my.yaml", "UPDATES": "7"}
    words = bash(f"bash scripts/{script} --updates 9", **given).stdout.split()
    assert words.index("--config=my.yaml") < words.index("--updates=7") < len(words) - 2
    assert words[-2:] == ["--updates", "9"]
    with_turns = bash(f"bash scripts/{script}", **given, TURNS="64")
    if script == "run_ablation.sh":
        assert with_turns.returncode == 2 and "TURNS=64 has no meaning here" in with_turns.stderr
    else:
        flags = [word for word in with_turns.stdout.split() if "rollout_batch_size" in word]
        assert flags[-1] == "--set-flag=rollout_batch_size=64"


PYTHON = """#!/bin/sh
case "$*" in
  "-c import sglang") exit 0 ;;
  "-m sglang.launch_server"*) exec sleep 60 ;;
  *) echo "$*"; exit 7 ;;
esac
"""


@pytest.mark.parametrize(
    ("given", "player"),
    [
        ("random", "random"),
        ("http://host:1 --tokenizer t", "http://host:1 --tokenizer t"),
        ("{folder} --out x", "http://127.0.0.1:30000 --tokenizer {folder} --model {name} --out x"),
    ],
)
def test_the_evaluation_script_names_the_player_and_ends_as_the_command_does(
    tmp_path: Path, given: str, player: str
) -> None:
    """SGLang is there; its server answers at once, and ends with the script."""
    for name, text in {"python3": PYTHON, "curl": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = {"folder": tmp_path, "name": tmp_path.name}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash(f"bash scripts/evaluate.sh c.yaml {given.format(**words)}", PATH=path)
    assert done.returncode == 7
    assert done.stdout == f"-m inspection evaluate c.yaml --player {player.format(**words)}\n"


def test_a_dry_run_prints_the_job_as_a_script_with_one_flag_per_line(machine: Machine) -> None:
    odd = """{"image": "it's $HOME"}"""
    job = machine.build("run_babyai.sh", "--", "--multimodal-keys", odd)
    printed = dry_run(job)
    assert machine.words(printed) == job.submission() and job.submission()[-1] == odd
    lines = printed.splitlines()
    flags = [line for line in lines if line.startswith("  --") and not line.startswith("  -- ")]
    assert len(flags) > 50 and all(line.count(" --") == 1 for line in flags)
    assert job.run_dir in lines[1]


def test_a_dry_run_writes_only_into_the_runs_folder_and_ends_with_what_is_missing(
    machine: Machine,
) -> None:
    slime = machine.home / "none"
    critic = {"PRETRAINED_CRITIC": str(machine.home / "critic")}
    done = machine.run("run_babyai.sh", "--dry-run", SLIME_PATH=str(slime), **critic)
    assert done.returncode == 0 and done.stdout.startswith("#!/usr/bin/env bash")
    written = {
        path.name for path in machine.home.rglob("*") if path.is_file() and path.suffix != ".sh"
    }
    assert written == {"config.yaml", "roles.yaml"}
    _, verdict = done.stderr.split("NOT READY. ")
    wanted = [
        f"no {slime}/train.py",
        "Qwen2.5-3B-Instruct_torch_dist holds no finished checkpoint; run: bash",
        "critic holds no finished checkpoint; correct PRETRAINED_CRITIC",
    ]
    wanted += [
        "does not describe Qwen2.5-3B-Instruct",
        "cannot import slime",
        "there is no model in",
    ]
    assert all(words in verdict for words in wanted)
    (config,) = machine.home.rglob("config.yaml")
    (config.parent / "critic").mkdir()
    (config.parent / "critic" / TRACKER).write_text("3\n")
    again = machine.run("run_babyai.sh", "--dry-run", SLIME_PATH=str(slime), **critic)
    assert "PRETRAINED_CRITIC" not in again.stderr, "a resumed run loads its own critic"


def test_a_python_without_packages_hands_over_to_the_environment(machine: Machine) -> None:
    """`python3` has no packages; the environment's Python says what it was asked to run."""
    machine.install("python3", f'exec {sys.executable} -S "$@"')
    machine.install("python", 'echo "$@"')
    done = machine.run("run_babyai.sh", "--flat", VENV=str(machine.home))
    assert "-m pip install" in done.stderr and "pydantic" in done.stderr
    assert "-m scripts.launch " in done.stdout and done.stdout.endswith("-- --flat\n")
    shown = machine.run("run_babyai.sh", "--help", VENV=str(machine.home))
    assert "bash scripts/run_babyai.sh" in shown.stdout and not shown.stderr, "it installs nothing"


def test_the_critics_folders_may_have_any_name(machine: Machine) -> None:
    out = machine.home / "it's, a #1: folder"
    job = machine.build("run_babyai.sh", OUTPUT=str(out))
    (role,) = yaml.safe_load(Path(job.run_dir, "roles.yaml").read_text())["megatron"]
    assert role["overrides"]["save"] == f"{job.run_dir}/critic"


PREFLIGHT = """
case "$*" in
  *rollout.preflight*)
    [ "$CUDA_DEVICE_MAX_CONNECTIONS" = 1 ] || { echo "error: tensor parallelism needs it" >&2; exit 1; }
    env > "$HOME/preflight" ;;
  *scripts.launch*) exec PYTHON "$@" ;;
esac
"""
"""A `python3` in which preflight writes down its environment, after Megatron has looked at it."""


@pytest.mark.parametrize(("script", "options"), pairs(CLUSTER_SCRIPTS, [("--dry-run",), ()]))
def test_preflight_runs_in_the_environment_that_ray_gives_to_the_job(
    machine: Machine, job_server: str, script: str, options: tuple[str, ...]
) -> None:
    """The machine has slime and the model, and a Ray cluster that takes whatever it is given."""
    words = machine.job(script)
    machine.install("python3", PREFLIGHT.replace("PYTHON", sys.executable))
    machine.install("hf", "exit 0")
    machine.install("ray", 'printf "%s\\0" ray "$@" > "$HOME/submitted"')
    (machine.slime / "train.py").write_text("")
    flags = by_flag(train_flags(words))
    for flag, name in (
        ("--hf-checkpoint", "config.json"),
        ("--ref-load", "latest_checkpointed_iteration.txt"),
    ):
        if flag in flags:
            Path(flags[flag][0]).mkdir(parents=True)
            (Path(flags[flag][0]) / name).write_text("")
    done = machine.run(script, *options, RAY_ADDRESS=job_server)
    assert done.returncode == 0, done.stderr
    if not options:
        words = (machine.home / "submitted").read_text().split("\0")
    had = dict(line.split("=", 1) for line in (machine.home / "preflight").read_text().splitlines())
    given = job_environment(words)
    assert {name: had.get(name) for name in given} == given


def test_checkpoints_rotate_unless_all_are_wanted(machine: Machine) -> None:
    def kept(**environment: str) -> object:
        return yaml.safe_load(machine.build("run_babyai.sh", **environment).config).get(
            "checkpoints_kept"
        )

    assert (kept(), kept(CHECKPOINTS_KEPT="5"), kept(CHECKPOINTS_KEPT="all")) == (2, 5, None)


THINKING = "Qwen3-4B Qwen3-0.6B Qwen3-30B-A3B Qwen3-235B-A22B Qwen3-8B-FP8 Qwen3.5-4B Qwen3.5-35B-A3B Qwen3.5-0.8B"
OTHERS = (
    "Qwen2.5-3B-Instruct Qwen3-4B-Instruct-2507 Qwen3-30B-A3B-Thinking-2507 "
    "Qwen3-Next-80B-A3B-Instruct Qwen3-Coder-30B-A3B-Instruct GLM-Z1-9B-0414"
)


def test_thinking_is_off_for_every_hybrid_and_left_alone_elsewhere(machine: Machine) -> None:
    assert all(HYBRID.fullmatch(name) for name in THINKING.split())
    assert not any(HYBRID.fullmatch(name) for name in OTHERS.split())
    config = yaml.safe_load(machine.build("run_babyai.sh", "--model", "Qwen3-4B").config)
    assert config["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in yaml.safe_load(machine.build("run_babyai.sh").config)


def gpus(**given: int) -> Variables:
    """The variables of a run on four GPUs."""
    sizes = {"num_gpus": 4, **given}
    named = {name.upper(): value for name, value in sizes.items()}
    return Variables(CONFIG="c.yaml", MODEL="m", PROMPT_LEN=1, RESPONSE_LEN=1, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("disaggregated", "given", "words"),
    [
        (False, {"tensor_parallel": 3}, "TENSOR_PARALLEL=3 does not divide the 4 GPUs that train"),
        (
            False,
            {"engine_gpus": 3, "num_nodes": 3},
            "ENGINE_GPUS=3 must divide NUM_GPUS=4 or be a multiple of it",
        ),
        (
            True,
            {"rollout_gpus": 3, "num_nodes": 2},
            "ROLLOUT_GPUS=3 and NUM_NODES=2, serving starts inside a node",
        ),
        (True, {"num_gpus": 1}, "ROLLOUT_GPUS=0 leaves none of NUM_GPUS=1"),
    ],
)
def test_gpus_that_do_not_divide_are_refused(
    disaggregated: bool, given: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        layout(gpus(**given), disaggregated, given.get("engine_gpus", 1))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_nodes": 3}, (2, 4, 4)),
        ({"num_nodes": 5, "engine_gpus": 8}, (3, 4, 8)),
        ({"num_nodes": 2, "rollout_gpus": 1}, (2, 3, 2)),
        ({"num_nodes": 4, "rollout_gpus": 3}, (4, 1, 12)),
    ],
)
def test_serving_starts_with_a_node_or_ends_in_the_node_where_it_starts(
    given: dict[str, int], expected: tuple[int, ...]
) -> None:
    flags = by_flag(layout(gpus(**given), True, given.get("engine_gpus", 1)))
    names = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus")
    assert tuple(int(flags[name][0]) for name in names) == expected


@pytest.fixture
def job_server() -> Iterator[str]:
    """An HTTP server that answers as Ray's job server does when it is asked for its version."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/version" else 404)
            self.end_headers()
            self.wfile.write(b'{"version": "4", "ray_version": "2.50.0", "ray_commit": "x"}')

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that start Ray, none of which does."""
    commands: list[list[str]] = []

    def run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert "RAY_ADDRESS" not in env
        commands.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(cluster.subprocess, "run", run)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    return commands


@pytest.mark.parametrize("end", ["", "/"])
def test_a_cluster_that_runs_is_used(job_server: str, started: list[list[str]], end: str) -> None:
    find_ray(gpus().model_copy(update={"ray_address": job_server + end}))
    assert not started


def test_a_head_is_started_on_this_machine_where_none_answers(started: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="its job server does not answer at http://127.0.0.1:1"):
        find_ray(gpus().model_copy(update={"ray_address": "http://127.0.0.1:1"}), wait_s=1)
    assert started == [
        ["ray", "start", "--head", "--num-gpus=4", "--dashboard-port=1", "--disable-usage-stats"]
    ]


@pytest.mark.parametrize(
    ("address", "nodes", "words"),
    [
        ("http://127.0.0.1:1", 2, "join the other nodes first"),
        ("http://192.0.2.1.invalid:8265", 1, "start one on that host"),
        ("10.0.0.1:6379", 1, "give it as http://HOST:8265"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_not_replaced_by_another(
    started: list[list[str]], address: str, nodes: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        find_ray(gpus().model_copy(update={"ray_address": address, "num_nodes": nodes}))
    assert not started
