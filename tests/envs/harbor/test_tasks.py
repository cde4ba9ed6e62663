"""Task folders: what is read, and the sentence about each task that cannot be played here."""

from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError
from envs.harbor import ANY, select_tasks
from envs.harbor.settings import HarborSettings
from envs.harbor.task import HarborTask, read_task, why_forgeable
from tests.envs.harbor.task_folders import DOCKERFILE, TEST, make_task


def read(folder: Path, **options: Any) -> HarborTask:
    return read_task(folder, HarborSettings(**options))


REFUSED = [
    (
        "[environment]\ngpus = 1\n",
        "[environment] gpus = 1 in task.toml needs a GPU in the sandbox; exclude the task",
    ),
    ('[environment]\nos = "Windows"\n', "[environment] os = Windows in task.toml is not Linux"),
    (
        "[verifier]\ntimeout_sec = -1\n",
        "task.toml: verifier.timeout_sec must be greater than 0, got -1",
    ),
    ("[agent\n", "task.toml is not valid TOML: "),
    (
        '[agent]\nallowed_hosts = ["pypi.org"]\n',
        "[agent] allowed_hosts = ... in task.toml needs the network",
    ),
    (
        '[verifier]\nenvironment_mode = "separate"\n',
        "[verifier] environment_mode = separate in task.toml gives the",
    ),
    (
        '[verifier]\nuser = "root"\n[agent]\nuser = "a"\n',
        "[verifier] user = root in task.toml differs from the agent",
    ),
    (
        "[verifier]\ntimeout_sec = 7200.0\n",
        "is more than env.verifier_timeout_s (600); raise it, and env_step_timeout_s",
    ),
    (
        "[environment]\nmemory_mb = 16384\n",
        "memory_mb = 16384 in task.toml is more than env.memory_mb (4096); raise it",
    ),
    ('[environment]\nmemory = "2 gigs"\n', "environment.memory"),
    (
        '[[steps]]\nname = "one"\n',
        "steps = ... in task.toml makes it a task of several steps, which are not supported",
    ),
    ("[environment]\ngpuz = 1\n", "[environment] gpuz = 1 in task.toml is not a known key"),
    (
        '[verifier.env]\nKEY = "${API_KEY}"\n',
        "[verifier.env] KEY = ${API_KEY} in task.toml needs the variable API_KEY",
    ),
]


@pytest.mark.parametrize(("toml", "sentence"), REFUSED)
def test_a_key_that_cannot_be_honoured_is_named(tmp_path: Path, toml: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(make_task(tmp_path, toml=toml))
    assert str(raised.value).startswith("answer: ") and sentence in str(raised.value)


BUILT = [
    (
        "FROM ubuntu:24.04\nRUN apt-get update\n",
        "line 2 of environment/Dockerfile (RUN apt-get update) needs an image",
    ),
    ("FROM ubuntu\nWORKDIR /app\nCOPY --from=x a .\n", "(COPY --from=x a .) needs an image build"),
    (
        "FROM ubuntu\nWORKDIR /app\nCOPY a /usr/local/bin/a\n",
        "(COPY a /usr/local/bin/a) needs an image build",
    ),
    ("FROM ubuntu\nWORKDIR /app\nCOPY ../a .\n", "(COPY ../a .) needs an image build"),
    ("FROM ubuntu\nWORKDIR /app/../usr\n", "(WORKDIR /app/../usr) needs an image build"),
    (
        "FROM ubuntu\nWORKDIR /usr/local\n",
        "the working directory /usr/local belongs to the system in the sandbox",
    ),
    ("FROM ubuntu\nCOPY a .\n", "(COPY a .) needs an image build"),
    (
        "FROM ubuntu\nFROM ubuntu\n",
        "line 2 of environment/Dockerfile (FROM ubuntu) needs an image build",
    ),
    ("FROM ubuntu\nENV A=${B%c}\n", "uses a substitution that is not supported"),
]


@pytest.mark.parametrize(("dockerfile", "sentence"), BUILT)
def test_a_line_that_needs_a_build_is_named_with_what_to_do(
    tmp_path: Path, dockerfile: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(make_task(tmp_path, dockerfile=dockerfile))
    assert sentence in str(raised.value)
    assert "; set env.images and run slime-verlog build-images" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"test": "apt-get update -y\n" + TEST},
            "line 1 of tests/test.sh (apt-get update -y) needs the network",
        ),
        (
            {"test": "uvx -w pytest pytest /tests/test_outputs.py\n"},
            "set env.test_command to a command that judges",
        ),
        ({"test": None}, "tests/test.sh cannot be read: No such file or directory"),
        (
            {"dockerfile": None, "toml": '[environment]\ndocker_image = "x/y:1"\n'},
            "[environment] docker_image = x/y:1 in task.toml names an image that must be pulled; "
            "set env.images and ru",
        ),
        ({"files": {"instruction.md": " \n"}}, "instruction.md is empty"),
        (
            {"files": {"environment/docker-compose.yaml": ""}},
            "environment/docker-compose.yaml starts several contain",
        ),
        (
            {"files": {"environment/.dockerignore": ""}, "dockerfile": DOCKERFILE + "COPY . .\n"},
            "the COPY in environment/Dockerfile obeys .dockerignore, which needs an image build; "
            "set env.images and",
        ),
    ],
)
def test_a_folder_that_cannot_be_played_is_named(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(make_task(tmp_path, **change))
    assert sentence in str(raised.value)


def test_keys_of_real_tasks_are_read(tmp_path: Path) -> None:
    toml = """
schema_version = "1.1"
artifacts = []
name = "answer"
tags = ["math"]
author_name = "A"
[task]
name = "someone/answer"
[[task.authors]]
name = "A"
[metadata]
anything = 3
[verifier]
timeout_sec = 120
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "someone/answer:1"
cpus = 1
memory = "2G"
storage_mb = 512
gpus = 0
allow_internet = true
mcp_servers = []
[verifier.env]
MODEL = "${MODEL:-small} and ${SIZE}"
[environment.env]
[solution.env]
A = "b c"
"""
    files = {"environment/docker-compose.yml": ""}  # Harbor reads only docker-compose.yaml
    task = read(make_task(tmp_path, toml=toml, files=files), variables={"SIZE": "7"})
    assert (task.verifier_s, task.agent_s, task.memory_mb, task.tree_mb) == (120, 900.0, 2048, 512)
    assert task.verifier_variables == {"MODEL": "small and 7"} and task.solution_variables == {
        "A": "b c"
    }
    assert task.image.folder == "/app" and task.image.variables["SIZE"] == "7"


def test_tasks_are_found_by_name_pattern_and_folder(tmp_path: Path) -> None:
    for name in ("git-one", "git-two", "other"):
        make_task(tmp_path / "tasks", name)
    make_task(tmp_path / "more", "other", toml="[environment]\ngpus = 1\n")
    settings = {"folders": (str(tmp_path / "tasks"), str(tmp_path / "more"))}

    def names(name: str, **options: Any) -> list[str]:
        return [task.name for task in select_tasks(name, HarborSettings(**settings, **options))]

    assert names("other") == ["other"]
    assert names(ANY, include=("git-*",), exclude=("*two",)) == ["git-one"]
    assert names(ANY) == ["git-one", "git-two", "other"]
    with pytest.raises(ConfigError, match="no task 'git-on'; did you mean git-one"):
        names("git-on")
    with pytest.raises(ConfigError, match="leave none of the 3 tasks"):
        names(ANY, exclude=("*",))
    with pytest.raises(
        ConfigError, match="holds no folder with a task.toml; name its parent folder"
    ):
        select_tasks(ANY, HarborSettings(folders=(str(tmp_path / "more" / "other"),)))


@pytest.mark.parametrize(
    ("test", "options", "why"),
    [
        (
            "cd /tests\npython3 -B -m pytest",
            {},
            "line 2 of tests/test.sh lets Python load the agent's modules",
        ),
        (
            "python3.11 -c 'import solution'",
            {},
            "line 1 of tests/test.sh lets Python load the agent's modules",
        ),
        ("true", {"test_command": "python -m pytest /tests"}, "env.test_command lets Python load"),
        ("python3 -P -m pytest; python -Im x; pytest /tests; python3 /tests/check.py -m", {}, ""),
        (
            "true",
            {"verifier": {"ans*": "same"}},
            "env.verifier says same, so its reward can be forged",
        ),
    ],
)
def test_a_task_whose_reward_can_be_forged_is_listed(
    tmp_path: Path, test: str, options: dict[str, Any], why: str
) -> None:
    folder = make_task(tmp_path, test=test)
    settings = HarborSettings(folders=(str(tmp_path),), **options)
    found = why_forgeable(read_task(folder, settings), settings)
    assert found.startswith(why) and bool(found) == bool(why)
