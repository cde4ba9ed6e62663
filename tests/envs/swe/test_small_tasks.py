"""Small tasks made of released packages: how they are made, and that the real ones can be
solved."""

import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from envs.errors import ConfigError, EnvironmentFault
from envs.loading import build_env_from
from envs.swe import SWEEnv, SWESettings, small_tasks
from envs.swe.small_tasks import SMALL_TASKS, Package, SmallTask, small_instance
from envs.swe.verdict.trees import default_cache
from tests.envs.swe.honest_repairs import variants
from tests.envs.swe.swe_cheats import CHEATS
from tests.envs.swe.tiny_repository import call, needs_sandbox, ordinary_run

SOURCE = {
    "mini-1.0/mini.py": "def double(x):\n    return 2 * x\n",
    "mini-1.0/test_mini.py": "from mini import double\n\n\ndef test_one():\n    assert double(30) == 60\n\n\n"
    "def test_none():\n    assert double(0) == 0\n\n\ndef test_odd():\n    assert double(1) == 3\n",
}


def _archive(folder: Path) -> str:
    """Write mini-1.0.tar.gz and return its checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mini-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in SOURCE.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_runs: None) -> Path:
    """A cache that holds a package of our own, and a task `mini` made of it."""
    needs_sandbox()
    package = Package("mini", "1.0", _archive(tmp_path / "archives"))
    hidden = "from mini import double\n\n\ndef test_four():\n    assert double(4) == 8\n"
    task = SmallTask(
        package,
        "mini.py",
        "2 * x",
        "x * x",
        "double squares.",
        ("test_mini.py::test_one", "test_more.py::test_four"),
        ("test_more.py", hidden),
    )
    monkeypatch.setattr(small_tasks, "SMALL_TASKS", {"mini": task})
    monkeypatch.setattr(subprocess, "run", _no_pip(subprocess.run))
    return tmp_path


def _no_pip(run):
    def guarded(argv, *args, **kwargs):
        assert "pip" not in argv, "nothing may be fetched here"
        return run(argv, *args, **kwargs)

    return guarded


@pytest.mark.slow
def test_a_task_is_made_from_the_archive_and_its_solution_takes_the_bug_out(mini: Path) -> None:
    judge = SWESettings(cache_dir=str(mini)).judge("")
    instance, repository = small_instance("mini", mini, judge)
    assert (repository / "mini.py").read_text() == "def double(x):\n    return x * x\n"
    assert not (repository / "test_more.py").exists()
    assert instance.pass_to_pass == ("test_mini.py::test_none",), (
        "what is red as released is not required"
    )
    assert instance.fail_to_pass == ("test_mini.py::test_one", "test_more.py::test_four")
    again, _ = small_instance("mini", mini, judge)
    assert again == instance
    env = build_env_from("envs.swe", {"task": "mini", "seed": 0}, {"cache_dir": str(mini)})
    env.reset()
    assert env.step("submit")[2]["reward"] == 0.0
    env.reset()
    env.step(call("edit", path="mini.py", old="x * x", new="x + x"))
    assert env.step("submit")[2]["reward"] == 1.0


def test_another_archive_of_the_same_name_is_refused(mini: Path) -> None:
    (mini / "archives" / "mini-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(EnvironmentFault, match=r"is not the release mini==1\.0"):
        small_instance("mini", mini, SWESettings().judge(""))


def test_a_bug_that_does_not_fit_the_release_is_refused(
    mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = small_tasks.SMALL_TASKS["mini"].package
    broken = SmallTask(package, "mini.py", "x", "y", "", ("test_mini.py::test_one",))
    monkeypatch.setattr(small_tasks, "SMALL_TASKS", {"mini": broken})
    with pytest.raises(ConfigError, match=r"mini: 'x' occurs 2 times in mini\.py"):
        small_instance("mini", mini, SWESettings().judge(""))


def test_an_archive_that_cannot_be_fetched_names_the_place_to_put_it(
    tmp_path: Path, monkeypatch
) -> None:
    needs_sandbox()
    package = Package("mini", "1.0", "0" * 64)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        EnvironmentFault, match=f"No matching distribution; put mini-1.0.tar.gz into {tmp_path}"
    ):
        small_tasks.released_tree(package, tmp_path)


def _real_env(name: str) -> SWEEnv:
    needs_sandbox()
    try:
        return build_env_from("envs.swe", {"task": name, "seed": 0}, {})
    except EnvironmentFault as fault:
        pytest.skip(f"{fault}; a package index within reach enables this test")


def _play(name: str, *answers: str) -> SWEEnv:
    env = _real_env(name)
    env.reset()
    for answer in (*answers, "submit"):
        _, done, info = env.step(answer)
    assert done
    assert info["reward"] == float(env.verdict.solved)
    return env


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_TASKS)
def test_every_real_task_pays_its_solution_and_nothing_else(name: str) -> None:
    """Exactly the tests that the task names are red."""
    instance = _real_env(name).instance
    assert _play(
        name, call("run", command=f"git apply <<'END'\n{instance.patch}END")
    ).verdict.solved
    idle = _play(name)
    assert not idle.verdict.solved and idle.verdict.progression == 0.0
    assert set(instance.required) - ordinary_run(idle, {}) == set(instance.fail_to_pass)
    assert SMALL_TASKS[name].wrong not in instance.problem_statement


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_TASKS)
def test_a_cheat_on_a_real_task_is_not_paid(name: str) -> None:
    code = CHEATS["tests emptied once their module is imported"][0]
    cheated = _play(
        name, call("run", command=f"cat >> {SMALL_TASKS[name].path} <<'END'\n{code}\nEND")
    )
    assert not cheated.verdict.solved and "not at hand" in cheated.verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_TASKS)
def test_honest_solutions_of_a_real_task_are_paid(name: str) -> None:
    path = SMALL_TASKS[name].path
    solutions = list(variants(name, (_real_env(name).repository / path).read_text()))
    assert len(solutions) >= 3
    for text in solutions:
        env = _play(name, call("create", path=path, text=text))
        assert env.verdict.solved, (env.verdict.reason, text)


def test_the_interpreter_of_the_tests_is_the_running_one_unless_told() -> None:
    settings = SWESettings(python="/a/python", pythons={"x/y": "/b/python"})
    assert [str(settings.python_for(repo)) for repo in ("x/y", "z")] == ["/b/python", "/a/python"]
    assert str(SWESettings().python_for("z")) == sys.executable
    assert default_cache().name == "swe"
