"""`slime-verlog train` stopped by Ctrl-C or a kill: one sentence, nothing lost, and an exact
`--resume`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

from safetensors.torch import load_file

from embedded.warmstart.demonstrations import DEMONSTRATION_SEEDS

ROOT = Path(__file__).parents[2]
HELD_OUT = 1_000_000_000
STOPPER = f'''
"""The island, which sends a signal to its terminal's processes at the moment that moment.txt names, once."""
import json, os, threading
from pathlib import Path

from rollout.data_source import EpisodeSource
from tests.fixtures.island import Island as Base, IslandSettings
from envs.base import describe_task, read_env_settings

MOMENT, LATEST = Path("moment.txt"), Path("out/checkpoints/latest.json")
LOCK, calls = threading.Lock(), []


def reached(moment):
    with LOCK:
        wanted, number, updates = MOMENT.read_text().split() if MOMENT.exists() else ("", 0, 0)
        saved = json.loads(LATEST.read_text())["rollout_id"] + 1 if LATEST.exists() else 0
        if wanted != moment or saved != int(updates):
            return
        calls.append(moment)
        if len(calls) == {{"rollout": 3, "evaluation": 3, "imitation": 20}}.get(moment, 1):
            MOMENT.unlink()
            os.killpg(0, int(number))


class Island(Base):
    def play(self, action):
        reached("imitation" if self.seed >= {DEMONSTRATION_SEEDS.start} else
                "evaluation" if self.seed >= {HELD_OUT} else "rollout")
        return super().play(action)


class Source(EpisodeSource):
    def __init__(self, args):
        super().__init__(args)
        if args.sglang_router_port is None and Path(args.hf_checkpoint).exists():
            reached("engine")


def build_env(sample, args):
    return Island(describe_task(sample)[1], read_env_settings(IslandSettings, args))


def on_actor_data(args, rollout_id, data):
    reached("training")
'''
FLAGS = {
    "rollout_batch_size": 32,
    "global_batch_size": 16,
    "eval_interval": 2,
    "num_critic_only_steps": 1,
}
MOMENTS = (
    ("imitation", signal.SIGINT, 0),
    ("imitation", signal.SIGKILL, 0),
    ("engine", signal.SIGINT, 0),
    ("evaluation", signal.SIGINT, 0),
    ("rollout", signal.SIGINT, 1),
    ("training", signal.SIGINT, 1),
    ("evaluation", signal.SIGKILL, 2),
    ("evaluation", signal.SIGINT, 2),
    ("rollout", signal.SIGKILL, 3),
    ("training", signal.SIGKILL, 3),
    ("rollout", signal.SIGINT, 4),
)
"""What happens, the signal then, and the updates before."""
HOOKS = {
    "data_source_path": "stopper.Source",
    "rollout_data_postprocess_path": "stopper.on_actor_data",
}


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The command as a shell starts it: in a process group of its own, with Ctrl-C's usual
    effect."""
    flags = [
        word
        for name, value in {**FLAGS, **HOOKS}.items()
        for word in ("--set-flag", f"{name}={value}")
    ]
    words = ["-m", "inspection", "train", "island.yaml", "--updates", "5", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    return subprocess.Popen(
        [sys.executable, *words, *flags, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def prepare(folder: Path) -> Path:
    keys: dict[str, Any] = {
        "rollout_interaction_env_path": "stopper",
        "tasks": ["island"],
        "eval": {"episodes": 6},
        "n_env": 4,
        "turn_quota": "per_env",  # which slot plays which turn must not depend on who is faster
        "env_backend": "inline",
    }
    folder.mkdir()
    (folder / "island.yaml").write_text(yaml.safe_dump(keys))
    (folder / "stopper.py").write_text(STOPPER)
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    """The run's numbers, without times and what depends on them.

    Which requests share a batch of the engine depends on time, and so does the last bit of its
    log-probs.
    """
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    timed = (
        "perf/",
        "rollout/engine/",
        "seconds",
        "_s",
        "busy",
        "concurrency",
        "depth",
        "logprob_abs_diff",
    )
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not any(part in key for part in timed)
        }
        for line in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    folder = prepare(tmp_path_factory.mktemp("run") / "whole")
    process = start(folder)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return folder


@pytest.mark.slow
def test_a_run_that_is_stopped_at_every_moment_ends_as_one_that_never_was(
    whole: Path, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "stopped")
    out = tmp_path / "stopped" / "out"
    for number, (moment, how, updates) in enumerate(MOMENTS):
        (folder / "moment.txt").write_text(f"{moment} {int(how)} {updates}")
        process = start(folder, *(["--resume"] if number else []))
        _, errors = process.communicate()
        context = f"{moment}, {how.name}: {errors[-3000:]}"
        if how is signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL, context
            continue
        assert process.returncode == 130, context
        last = errors.replace("\r", "\n").strip().splitlines()[-1]
        assert last.startswith(f"interrupted after {updates} updates; "), context
        assert "the same command with --resume continues the run in out/" in last
        assert not any(
            word in errors for word in ("Traceback", "Unclosed", "abandoned", "warning", "Warning")
        ), context
        summary = json.loads((out / "summary.json").read_text())
        assert (
            summary["interrupted"] is True
            and summary["fault"] is None
            and summary["updates"] == updates
        )
        assert not list(out.glob(".*"))
        if updates:
            trained = load_file(out / f"checkpoints/trainer_{updates - 1}/actor.safetensors")
            kept = load_file(out / "policy_after/model.safetensors")
            weight = "embedding.word_embeddings.weight"
            assert (kept["model.embed_tokens.weight"] == trained[weight]).all()
    process = start(folder)
    assert "holds an unfinished run, and nothing was changed: --resume" in process.communicate()[1]
    process = start(folder, "--resume")
    assert process.wait() == 0
    assert rows(folder) == rows(whole)
    for name in ("policy_after/model.safetensors", "policy_best/model.safetensors"):
        one, other = (load_file(run / "out" / name) for run in (folder, whole))
        assert all((one[key] == other[key]).all() for key in other)
    same = [(run / "out" / "episodes.jsonl").read_text() for run in (folder, whole)]
    assert same[0] == same[1]
    ends = [json.loads((run / "out" / "summary.json").read_text()) for run in (folder, whole)]
    assert not ends[0]["interrupted"]
    for end in ends:
        for key in ("wall_time_s", "started", "command"):
            del end[key]
    assert ends[0] == ends[1]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (whole / "out").iterdir()
    )
