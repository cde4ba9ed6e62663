"""A job from nothing: help without an installation, the printed script, and the Ray cluster that it is given to."""

import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cases import pairs
from tests.scripts.conftest import REPO, Command, Fresh, by_flag, job_environment, train_flags
from tests.scripts.test_run_scripts import SCRIPTS as CLUSTER_SCRIPTS

SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.sh"))


def bash(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository's folder with the functions of scripts/lib in reach."""
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    command = ["bash", "-euo", "pipefail", "-c", program]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=variables)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_with_no_python_and_no_home(tmp_path: Path, script: str, option: str) -> None:
    """Only the tools that print: whatever installs, downloads or trains would fail here."""
    for tool in ("bash", "dirname", "basename", "sed", "cat", "grep"):
        path = next(Path(folder) / tool for folder in os.environ["PATH"].split(":") if (Path(folder) / tool).exists())
        (tmp_path / tool).symlink_to(path)
    done = bash(f"bash scripts/{script} {option}", PATH=str(tmp_path), VENV=str(tmp_path / "venv"))
    assert done.returncode == 0 and not done.stderr and f"bash scripts/{script}" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_compiled_modules_are_kept_where_the_environment_says_otherwise() -> None:
    done = bash("source scripts/install.sh; echo ${PYTHONDONTWRITEBYTECODE-unset}", PYTHONDONTWRITEBYTECODE="1")
    assert (done.stdout, done.stderr) == ("unset\n", "")


OPTIONS = {
    "run_quickstart.sh": "embedded/launch.py",
    "run_ablation.sh": "embedded/studies/run.py",
    "run_embedded_gpu.sh": "embedded/launch.py",
    "evaluate.sh": "inspection/evaluate/__init__.py",
    "check_gpu.sh": "tests/gpu/check.py",
}


@pytest.mark.parametrize("script", OPTIONS)
def test_help_names_every_option_of_the_program_that_the_script_starts(script: str) -> None:
    source = (REPO / OPTIONS[script]).read_text()
    calls = [call.partition("\n")[0] for call in re.split(r'add(?:_argument)?\(\s*"--', source)[1:]]
    options = [f"--{call.partition(chr(34))[0]}" for call in calls if "SUPPRESS" not in call]
    given = {"--player"} if script == "evaluate.sh" else set()
    shown = bash(f"bash scripts/{script} --help").stdout
    assert options and not [option for option in options if option not in shown and option not in given]


@pytest.mark.parametrize("script", ["run_quickstart.sh", "run_embedded_gpu.sh", "run_ablation.sh"])
def test_variables_reach_the_programs_on_one_machine_and_options_win(tmp_path: Path, script: str) -> None:
    """An installed environment whose Python says what it was asked to run."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$1" != -m ] || echo "$*"\n')
    python.chmod(0o755)
    stamp = bash(
        "source scripts/install.sh; stamp_of envs,embedded; stamp_of envs,embedded,studies", VENV=str(tmp_path)
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
        ("https://host/v1 --model gpt", "https://host/v1 --model gpt"),
        ("{folder} --engine http://host:1 --seed 3", "http://host:1 --tokenizer {folder} --model {name} --seed 3"),
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


def test_a_dry_run_prints_a_script_with_one_flag_per_line_under_a_comment_per_group(tmp_path: Path) -> None:
    done = bash("bash scripts/run_babyai.sh --dry-run", SLIME_PATH=str(tmp_path), OUTPUT=str(tmp_path / "out"))
    lines = done.stdout.splitlines()
    groups = [line for line in lines if line.endswith(tuple("abcdefghijklmnopqrstuvwxyz-")) and "=(  # " in line]
    assert len(groups) == 13 and all(line.split("=(  # ")[1] for line in groups)
    flags = [line for line in lines if line.startswith("  --") and not line.startswith("  -- ")]
    assert len(flags) > 50 and all(line.count(" --") == 1 for line in flags)
    assert str(tmp_path / "out/babyai-Qwen2.5-3B-Instruct") in lines[1]


def _written() -> dict[Path, int]:
    """When each file of the repository was written, without what tests that run meanwhile leave in caches."""
    caches = {".git", ".venv", "__pycache__", ".pytest_cache"}
    files = (path for path in REPO.rglob("*") if not caches & set(path.parts) and path.is_file())
    return {path: path.stat().st_mtime_ns for path in files}


def test_a_dry_run_writes_only_into_the_folder_that_it_names(tmp_path: Path) -> None:
    before = _written()
    bash("bash scripts/run_babyai.sh --dry-run", SLIME_PATH=str(tmp_path / "none"), OUTPUT=str(tmp_path / "out"))
    assert not [path for path, time in _written().items() if time != before.get(path)]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["config.yaml", "roles.yaml"]


def test_the_critics_folders_may_have_any_name(tmp_path: Path) -> None:
    out = tmp_path / "it's, a #1: folder"
    bash("bash scripts/run_babyai.sh --dry-run", SLIME_PATH=str(tmp_path / "none"), OUTPUT=str(out))
    (written,) = out.rglob("roles.yaml")
    (role,) = yaml.safe_load(written.read_text())["megatron"]
    assert role["overrides"]["save"] == str(written.parent / "critic"), role


def test_an_output_folder_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = bash("bash scripts/run_babyai.sh --dry-run", OUTPUT=str(tmp_path / "file"))
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write") and "set OUTPUT" in done.stderr


def test_words_with_spaces_quotes_and_braces_come_back_as_they_were_given(command: Command) -> None:
    odd = """{"image": "it's $HOME"}"""
    flags = by_flag(train_flags(command("run_babyai.sh", "--", "--multimodal-keys", odd)))
    assert flags["--multimodal-keys"] == [odd]


def test_metrics_land_in_the_runs_folder(command: Command, tmp_path: Path) -> None:
    environment = job_environment(command("run_babyai.sh"))
    assert environment["TENSORBOARD_DIR"] == str(tmp_path / "out/babyai-Qwen2.5-3B-Instruct/tensorboard")


PREFLIGHT = """
case "$*" in *rollout.preflight*)
  [ "$CUDA_DEVICE_MAX_CONNECTIONS" = 1 ] || { echo "error: tensor parallelism needs it" >&2; exit 1; }
  env > "$HOME/preflight" ;;
esac
"""
"""A `python3` in which preflight writes down its environment, after Megatron has looked at it."""


@pytest.mark.parametrize(("script", "options"), pairs(CLUSTER_SCRIPTS, [("--dry-run",), ()]))
def test_preflight_runs_in_the_environment_that_ray_gives_to_the_job(
    fresh: Fresh, script: str, options: tuple[str, ...]
) -> None:
    """The machine has slime and the model, and a Ray cluster that takes whatever it is given."""
    words = fresh.job(script)
    fresh.install("python3", PREFLIGHT)
    fresh.install("hf", "exit 0")
    fresh.install("curl", 'echo \'{"ray_version": "2.50.0"}\'')
    fresh.install("ray", 'printf "%s\\0" ray "$@" > "$HOME/submitted"')
    (fresh.slime / "train.py").write_text("")
    flags = by_flag(train_flags(words))
    for flag, name in (("--hf-checkpoint", "config.json"), ("--ref-load", "latest_checkpointed_iteration.txt")):
        if flag in flags:
            Path(flags[flag][0]).mkdir(parents=True)
            (Path(flags[flag][0]) / name).write_text("")
    done = fresh.run(script, *options)
    assert done.returncode == 0, done.stderr
    if not options:
        words = (fresh.home / "submitted").read_text().split("\0")
    had = dict(line.split("=", 1) for line in (fresh.home / "preflight").read_text().splitlines())
    given = job_environment(words)
    assert {name: had.get(name) for name in given} == given


def test_the_job_finds_the_games_that_the_user_named(command: Command) -> None:
    """A Ray cluster that was started in another shell does not know the variable."""
    assert (
        job_environment(command("run_alfworld.sh", ALFWORLD_DATA="/data/alfworld"))["ALFWORLD_DATA"] == "/data/alfworld"
    )
    assert "ALFWORLD_DATA" not in job_environment(command("run_alfworld.sh"))


def test_checkpoints_rotate_unless_all_are_wanted(command: Command) -> None:
    def kept(**environment: str) -> object:
        flags = by_flag(train_flags(command("run_babyai.sh", **environment)))
        return yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text()).get("checkpoints_kept")

    assert (kept(), kept(CHECKPOINTS_KEPT="5"), kept(CHECKPOINTS_KEPT="all")) == (2, 5, None)


@pytest.mark.parametrize(
    ("model", "thinks_by_default"),
    [
        *[(name, True) for name in ("Qwen3-4B", "Qwen3-0.6B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-8B-FP8")],
        *[(name, True) for name in ("Qwen3.5-4B", "Qwen3.5-35B-A3B", "Qwen3.5-0.8B")],
        *[(name, False) for name in ("Qwen2.5-3B-Instruct", "Qwen3-4B-Instruct-2507", "Qwen3-30B-A3B-Thinking-2507")],
        *[(name, False) for name in ("Qwen3-Next-80B-A3B-Instruct", "Qwen3-Coder-30B-A3B-Instruct", "GLM-Z1-9B-0414")],
    ],
)
def test_thinking_is_off_for_every_hybrid_and_left_alone_elsewhere(
    command: Command, model: str, thinks_by_default: bool
) -> None:
    flags = by_flag(train_flags(command("run_babyai.sh", "--model", model)))
    config = yaml.safe_load(Path(flags["--custom-config-path"][0]).read_text())
    assert config.get("chat_template_kwargs") == ({"enable_thinking": False} if thinks_by_default else None)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NUM_NODES": "two"}, "NUM_NODES=two must be a whole number"),
        ({"NUM_GPUS": "0"}, "NUM_GPUS=0 must be a whole number"),
        ({"TENSOR_PARALLEL": "3"}, "TENSOR_PARALLEL=3 does not divide the 4 GPUs that train"),
        ({"ENGINE_GPUS": "3"}, "ENGINE_GPUS=3 does not divide the 4 GPUs that serve"),
        (
            {"ROLLOUT_GPUS": "3", "NUM_NODES": "2", "DISAGGREGATED": "yes"},
            "with ROLLOUT_GPUS=3 and NUM_NODES=2, serving starts inside a node and goes on in the next",
        ),
        ({"ENGINE_GPUS": "3", "NUM_NODES": "3"}, "ENGINE_GPUS=3 must divide NUM_GPUS=4 or be a multiple of it"),
        ({"ROLLOUT_GPUS": "4", "DISAGGREGATED": "yes"}, "leaves none of NUM_GPUS=4 for training"),
        ({"ROLLOUT_GPUS": "0", "DISAGGREGATED": "yes"}, "ROLLOUT_GPUS=0 must be a whole number"),
        ({"ROLLOUT_GPUS": "1", "ENGINE_GPUS": "2", "DISAGGREGATED": "yes"}, "does not divide the 1 GPUs that serve"),
    ],
)
def test_gpus_that_do_not_divide_are_refused(tmp_path: Path, environment: dict[str, str], words: str) -> None:
    option = "--disaggregated" if environment.pop("DISAGGREGATED", None) else ""
    done = bash(f"bash scripts/run_babyai.sh --dry-run {option}", OUTPUT=str(tmp_path), **environment)
    assert done.returncode == 2 and words in done.stderr


def test_several_nodes_multiply_what_each_of_them_gives(command: Command) -> None:
    flags = by_flag(train_flags(command("run_babyai.sh", "--disaggregated", NUM_NODES="2", ROLLOUT_GPUS="1")))
    assert (flags["--actor-num-nodes"], flags["--actor-num-gpus-per-node"]) == (["2"], ["3"])
    assert (flags["--rollout-num-gpus"], flags["--num-gpus-per-node"]) == (["2"], ["4"])


@pytest.mark.parametrize(
    ("nodes", "given", "expected"),
    [
        ("1", {}, ("1", "2", "2")),
        ("2", {}, ("1", "4", "4")),
        ("3", {}, ("2", "4", "4")),
        ("5", {"ENGINE_GPUS": "8"}, ("3", "4", "8")),
        ("2", {"ROLLOUT_GPUS": "2"}, ("2", "2", "4")),
        ("4", {"ROLLOUT_GPUS": "3"}, ("4", "1", "12")),
    ],
)
def test_serving_starts_with_a_node_or_ends_in_the_node_where_it_starts(
    command: Command, nodes: str, given: dict[str, str], expected: tuple[str, ...]
) -> None:
    flags = by_flag(train_flags(command("run_babyai.sh", "--disaggregated", NUM_NODES=nodes, **given)))
    names = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus")
    assert tuple(flags[name][0] for name in names) == expected


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


FIND_RAY = """
NUM_GPUS=4
source scripts/lib/slime.sh
ray() { echo "ray $* [RAY_ADDRESS=${RAY_ADDRESS:-}]" >&2; }
env() { shift 2; RAY_ADDRESS= "$@"; }
find_ray
"""


@pytest.mark.parametrize("end", ["", "/"])
def test_a_cluster_that_runs_is_used_with_the_address_exported_as_the_usage_says(job_server: str, end: str) -> None:
    done = bash(FIND_RAY, RAY_ADDRESS=job_server + end)
    assert done.returncode == 0 and "ray start" not in done.stderr


def test_a_head_is_started_on_this_machine_where_none_answers() -> None:
    done = bash(FIND_RAY, RAY_ADDRESS="http://127.0.0.1:1", RAY_WAIT="1")
    assert "ray start --head --num-gpus=4 --dashboard-port=1 --disable-usage-stats [RAY_ADDRESS=]" in done.stderr
    assert done.returncode == 2 and "its job server does not answer" in done.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RAY_ADDRESS": "http://127.0.0.1:1", "NUM_NODES": "2"}, "join the other nodes first"),
        ({"RAY_ADDRESS": "http://192.0.2.1.invalid:8265"}, "start one on that host"),
        ({"RAY_ADDRESS": "auto"}, "give it as http://HOST:8265"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "give it as http://HOST:8265"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_not_replaced_by_another(environment: dict[str, str], words: str) -> None:
    done = bash(FIND_RAY, **environment)
    assert done.returncode == 2 and words in done.stderr and "ray start --head --num" not in done.stderr
