"""Makes the tasks of `small_tasks.yaml` from releases that pip fetches, pinned by checksum; each
has one bug."""

import difflib
import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.errors import ConfigError, EnvironmentFault, did_you_mean
from envs.swe.sandbox.workspace import run_program
from envs.swe.verdict.evaluate import TestSettings, run_tests
from envs.swe.verdict.instances import Instance, read_instance
from envs.swe.verdict.reports import NotCounted
from envs.swe.verdict.trees import build_tree, building, commit_all
from slime_verlog import read_yaml_mapping


@dataclass(frozen=True)
class Package:
    """A source release, known by its checksum."""

    name: str
    version: str
    sha256: str

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"


@dataclass(frozen=True)
class SmallTask:
    """One bug; `small_tasks.yaml` describes the fields."""

    package: Package
    path: str
    right: str
    wrong: str
    statement: str
    turns_green: Sequence[str]
    hidden_test: Sequence[str] | None = None
    left_out: Sequence[str] = ()


_YAML = read_yaml_mapping(str(Path(__file__).with_suffix(".yaml")), "small tasks")
_PACKAGES = {name: Package(name, **release) for name, release in _YAML["packages"].items()}
SMALL_TASKS: Mapping[str, SmallTask] = {
    name: SmallTask(**{**row, "package": _PACKAGES[row["package"]]})
    for name, row in _YAML["tasks"].items()
}


def small_instance(name: str, cache: Path, settings: TestSettings) -> tuple[Instance, Path]:
    """Return a small task and its repository, made once; raises ConfigError for an unknown task."""
    task = SMALL_TASKS.get(name)
    if task is None:
        hint = did_you_mean(name, SMALL_TASKS, f"there are {', '.join(SMALL_TASKS)}", n=1)
        raise ConfigError(
            f"unknown SWE task {name!r}; {hint} (for tasks of your own set env.instances)"
        )
    folder = cache / "small" / f"{name}-{_digest(repr(task), settings.python)}"
    with building(folder) as scratch:
        if scratch is not None:
            _make_task(name, task, cache, scratch, settings)
    row = json.loads((folder / "instance.json").read_text(encoding="utf-8"))
    return read_instance(row, name), folder / "repository"


def _digest(*parts: object) -> str:
    """Which tests are green depends on the Python, so what is made with one is not used with
    another."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:10]


def _make_task(
    name: str, task: SmallTask, cache: Path, scratch: Path, settings: TestSettings
) -> None:
    released = released_tree(task.package, cache)
    green = green_tests(task.package, released, cache, settings)
    repository = scratch / "repository"
    scratch.mkdir()
    build_tree(repository, released)
    right = (repository / task.path).read_text(encoding="utf-8")
    if right.count(task.right) != 1:
        raise ConfigError(
            f"{name}: {task.right!r} occurs {right.count(task.right)} times in {task.path}, not "
            "once"
        )
    wrong = right.replace(task.right, task.wrong)
    (repository / task.path).write_text(wrong, encoding="utf-8")
    row = {
        "instance_id": name,
        "repo": f"pypi/{task.package.label}",
        "base_commit": commit_all(repository),
        "problem_statement": task.statement,
        "patch": unified_diff(task.path, wrong, right),
        "test_patch": unified_diff(task.hidden_test[0], None, task.hidden_test[1])
        if task.hidden_test
        else "",
        "FAIL_TO_PASS": task.turns_green,
        "PASS_TO_PASS": sorted(set(green) - {*task.turns_green, *task.left_out}),
    }
    (scratch / "instance.json").write_text(json.dumps(row, indent=1), encoding="utf-8")


def released_tree(package: Package, cache: Path) -> Path:
    """The package's files as released, unpacked."""
    target = cache / "released" / package.label
    with building(target) as scratch:
        if scratch is not None:
            archive = _fetch(package, cache / "archives")
            scratch.mkdir()
            unpack = (
                "tar",
                "-xzf",
                str(archive),
                "-C",
                str(scratch),
                "--strip-components=1",
                "--no-same-owner",
            )
            run_program(*unpack)
    return target


def _fetch(package: Package, folder: Path) -> Path:
    """The source archive, from `folder` or through pip; raises EnvironmentFault if it is not the
    pinned one."""
    archive = folder / f"{package.label}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = f"{package.name}=={package.version}"
    if not archive.exists():
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            package.name,
        ]
        done = subprocess.run(
            [*argv, "-d", str(folder), wanted], capture_output=True, text=True, check=False
        )
        if not archive.exists():
            reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise EnvironmentFault(
                f"cannot fetch the source of {wanted}: {reason}; put {archive.name} into {folder}"
            )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != package.sha256:
        raise EnvironmentFault(
            f"{archive} is not the release {wanted} (sha256 {found}); remove it and try again"
        )
    return archive


def green_tests(package: Package, released: Path, cache: Path, settings: TestSettings) -> list[str]:
    """Tests of the release that pass with this Python, found by one run; raises EnvironmentFault if
    they do not run."""
    target = cache / "released" / f"{package.label}-{_digest(settings.python)}.json"
    with building(target) as scratch:
        if scratch is not None:
            try:
                run = run_tests(functools.partial(build_tree, pristine=released), (), settings)
            except NotCounted as error:
                raise EnvironmentFault(
                    f"the tests of {package.label} do not run: {error}"
                ) from error
            green = sorted(test for test, outcome in run.outcomes.items() if outcome == "passed")
            scratch.write_text(json.dumps(green), encoding="utf-8")
    return json.loads(target.read_text(encoding="utf-8"))


def unified_diff(path: str, before: str | None, after: str) -> str:
    """A patch that `git apply` takes; `before` is None for a new file."""
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}",
    )
    mode = "" if before is not None else "new file mode 100644\n"
    return f"diff --git a/{path} b/{path}\n{mode}{''.join(lines)}"
