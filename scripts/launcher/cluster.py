"""Checks a job before it is submitted, and finds the Ray cluster that it is given to."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from scripts.launcher.job import Job
from scripts.launcher.own_python import ROOT
from scripts.launcher.variables import Variables
from slime_verlog import ConfigError


def preflight(job: Job, train_script: str, stdout: Any = None) -> int:
    """Check the job's flags in the job's environment; returns the exit status."""
    return _python(job, "-m", "rollout.preflight", train_script, *job.words, stdout=stdout)


def end_dry_run(job: Job, train_script: str, hf_checkpoint: str, notes: list[str]) -> int:
    """End a dry run with preflight's verdict, or with the notes where it cannot run; returns the
    exit status."""
    has_model = Path(hf_checkpoint, "config.json").is_file()
    has_slime = _python(job, "-c", "import slime, megatron", stderr=subprocess.DEVNULL) == 0
    if has_model and has_slime:
        return preflight(job, train_script, sys.stderr)
    if not has_slime:
        notes = [
            *notes,
            "python3 cannot import slime and Megatron; run this in slime's image (docs/slime.md)",
        ]
    if not has_model:
        notes = [*notes, f"there is no model in {hf_checkpoint}"]
    print("NOT READY. Most flags, model and environments were not checked:", file=sys.stderr)
    print(*(f"- {note}" for note in notes), sep="\n", file=sys.stderr)
    return 0


def _python(job: Job, *arguments: str, **streams: Any) -> int:
    environment = {**os.environ, **job.environment}
    return subprocess.run(["python3", *arguments], env=environment, cwd=ROOT, **streams).returncode


def ray_answers(address: str) -> bool:
    """Whether a job server answers. `ray status` speaks another protocol and fails for an HTTP
    address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}/api/version", timeout=5) as answer:
            return b"ray_version" in answer.read()
    except OSError:
        return False


def find_ray(given: Variables, wait_s: int = 60) -> None:
    """Find the cluster at RAY_ADDRESS; on one node, start a head there if none runs; raises
    ConfigError without one.

    A head that was started here has `wait_s` seconds to answer.
    """
    parts = re.fullmatch(r"https?://([^/:]+):(\d+)/?", given.ray_address)
    if not parts:
        raise ConfigError(
            f"RAY_ADDRESS={given.ray_address} is not a job server's address; give it as "
            "http://HOST:8265"
        )
    address = given.ray_address.rstrip("/")
    (host, port) = parts.groups()
    if ray_answers(address):
        return
    if given.num_nodes > 1:
        raise ConfigError(
            f"NUM_NODES={given.num_nodes}, but no Ray job server answers at {address}; start a "
            "head and join the other nodes first (docs/slime_cluster.md, Several nodes)"
        )
    if host not in ("127.0.0.1", "localhost"):
        start = f"ray start --head --dashboard-host=0.0.0.0 --dashboard-port={port}"
        raise ConfigError(
            f"no Ray job server answers at {address}; start one on that host with: {start}"
        )
    head = ["ray", "start", "--head", f"--num-gpus={given.num_gpus}", f"--dashboard-port={port}"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = subprocess.run([*head, "--disable-usage-stats"], env=environment)
    for _ in range(wait_s if started.returncode == 0 else 0):
        if ray_answers(address):
            return
        time.sleep(1)
    raise ConfigError(
        f"Ray was started, but its job server does not answer at {address}; it needs pip install "
        "'ray[default]'"
    )
