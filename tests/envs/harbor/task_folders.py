"""Task folders in Harbor's format for tests, and a small image that is made from this machine's
programs."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envs.harbor import HarborEnv, HarborSettings
from envs.harbor.dockerfile import PATH, Image
from envs.harbor.settings import has_image, keep_image
from envs.harbor.task import recipe_of
from envs.loading import build_env_from
from tests.envs.swe.tiny_repository import needs_sandbox

DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\n"
TEST = """\
if [ "$(cat /app/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
"""A test script that pays for a file with the text 42."""
SUBMIT = "submit"


def make_task(
    folder: Path,
    name: str = "answer",
    *,
    toml: str = "",
    dockerfile: str | None = DOCKERFILE,
    test: str | None = TEST,
    solution: str | None = None,
    files: dict[str, str] | None = None,
) -> Path:
    """Write a task folder below `folder`; `files` are relative to it."""
    task = folder / name
    written = {
        "task.toml": toml,
        "instruction.md": "Write 42 into /app/answer.txt.\n",
        **(files or {}),
    }
    written |= {"environment/Dockerfile": dockerfile} if dockerfile is not None else {}
    written |= {"tests/test.sh": test} if test is not None else {}
    written |= {"solution/solve.sh": solution} if solution is not None else {}
    for path, text in written.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)
    return task


def play(
    folder: Path, *commands: str, task: str = "answer", **options: Any
) -> tuple[HarborEnv, dict[str, Any], str]:
    """Run the commands, one per turn, and submit: the environment, the last info, and the last
    observation."""
    env = start(folder, task, **options)
    for command in commands:
        run(env, command)
    observation, done, info = env.step(SUBMIT)
    assert done
    return env, dict(info), observation["obs_str"]


def start(
    folder: Path, task: str = "answer", rootfs: str | None = None, **options: Any
) -> HarborEnv:
    """The environment, reset; `rootfs` is the task's image, as if it had been built."""
    needs_sandbox()
    if rootfs is not None:
        options["images"] = str(Path(rootfs).parent)
        settings = HarborSettings(images=options["images"])
        recipe = recipe_of(folder / task)
        if not has_image(recipe, settings):
            copied = shutil.copytree(rootfs, f"{rootfs}-copy", symlinks=True)
            keep_image(recipe, settings, Path(copied), Image("/app", {"PATH": PATH}))
    env = build_env_from(
        "envs.harbor", {"task": task, "seed": 0}, {"folders": [str(folder)], **options}
    )
    env.reset()
    return env


def run(env: HarborEnv, command: str) -> str:
    """Run one command; return what is shown."""
    call = {"name": "run", "arguments": {"command": command}}
    observation, _, info = env.step(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert info["valid_action"]
    return observation["obs_str"]


def make_image(root: Path, *programs: str) -> Path:
    """A folder as an image has it, with some of this machine's programs and the libraries they
    need."""
    (root / "usr" / "bin").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for program in programs:
        path = shutil.which(program, path="/usr/bin:/bin")
        assert path is not None
        shutil.copy(path, root / "usr" / "bin" / program)
        linked = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", linked):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    for folder in ("etc", "root", "app"):
        (root / folder).mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    for path in (root, *root.parents[:3]):
        if path.stat().st_mode & 0o055 != 0o055 and path.stat().st_uid == os.geteuid():
            path.chmod(0o755)
    return root


def needs_buildah() -> None:
    """Skip the test where images cannot be built."""
    needs_sandbox()
    for tool in ("buildah", "skopeo"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed; apt-get install -y {tool}")


def write_config(folder: Path, **env: Any) -> str:
    """Write a YAML that plays the tasks in `folder / "tasks"`, and return its path."""
    config = folder / "tasks.yaml"
    given = {"folders": [str(folder / "tasks")], **env}
    config.write_text(
        json.dumps({"rollout_interaction_env_path": "envs.harbor", "env": given, "tasks": ["*"]})
    )
    return str(config)


def build_env(sample: Any, args: Any) -> HarborEnv:
    """An example task, for the contract that all environments share. Skips where the sandbox cannot
    run."""
    needs_sandbox()
    return build_env_from("envs.harbor", sample.metadata, args)
