"""Finds the Ray cluster that a job is given to, or starts one on this machine."""

import os
import re
import subprocess
import time
import urllib.request

from scripts.launcher.variables import Variables
from slime_verlog import ConfigError


def ray_answers(address: str) -> bool:
    """Whether a job server answers. `ray status` speaks another protocol and fails for an HTTP address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address}/api/version", timeout=5) as answer:
            return b"ray_version" in answer.read()
    except OSError:
        return False


def find_ray(given: Variables) -> None:
    """Find the cluster at RAY_ADDRESS; on one node, start a head there if none runs; raises ConfigError without one."""
    parts = re.fullmatch(r"https?://([^/:]+):(\d+)/?", given.ray_address)
    if not parts:
        raise ConfigError(f"RAY_ADDRESS={given.ray_address} is not a job server's address; give it as http://HOST:8265")
    address, (host, port) = given.ray_address.rstrip("/"), parts.groups()
    if ray_answers(address):
        return
    if given.num_nodes > 1:
        raise ConfigError(
            f"NUM_NODES={given.num_nodes}, but no Ray job server answers at {address}; start a head and join the other "
            "nodes first (docs/slime.md, Several nodes)"
        )
    if host not in ("127.0.0.1", "localhost"):
        start = f"ray start --head --dashboard-host=0.0.0.0 --dashboard-port={port}"
        raise ConfigError(f"no Ray job server answers at {address}; start one on that host with: {start}")
    head = ["ray", "start", "--head", f"--num-gpus={given.num_gpus}", f"--dashboard-port={port}"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = subprocess.run([*head, "--disable-usage-stats"], env=environment)
    for _ in range(given.ray_wait if started.returncode == 0 else 0):
        if ray_answers(address):
            return
        time.sleep(1)
    raise ConfigError(
        f"Ray was started, but its job server does not answer at {address}; it needs pip install 'ray[default]'"
    )
