"""Episodes of Harbor tasks: time limits, rewards, commands that people type, and images."""

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError
from envs.harbor import ANY, HarborSettings, check_references
from tests.envs.harbor.task_folders import SUBMIT, make_image, make_task, play, run, start
from tests.envs.swe.tiny_repository import needs_sandbox
from tests.fixtures.command import slime_verlog

ROOT = Path(__file__).parents[3]
PASS = "echo 1 > /logs/verifier/reward.txt"


def json_test(text: str, plain: str = "") -> str:
    return f"echo '{text}' > /logs/verifier/reward.json" + (
        f"; echo {plain} > /logs/verifier/reward.txt" * bool(plain)
    )


@pytest.mark.parametrize(
    ("test", "options", "reward", "reason"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", {}, 0.25, ""),
        (
            "echo 0.25 > /logs/verifier/reward.txt; exit 1",
            {},
            0.0,
            "exit status 1, so the reward 0.25 may not be",
        ),
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", {"verifier": {"*": "same"}}, 0.25, ""),
        (json_test('{"reward": 0.5, "style": 1}'), {}, 0.5, ""),
        (json_test('{"a": 0, "b": 3}'), {"reward_key": "b"}, 3.0, ""),
        (json_test('{"reward": 1}', "0"), {}, 0.0, ""),
        (
            json_test('{"a": 0, "b": 3}'),
            {},
            0.0,
            "reward.json has no number 'reward' (its numbers: a, b)",
        ),
        ("echo lots > /logs/verifier/reward.txt", {}, 0.0, "the reward file cannot be used"),
        ("true", {}, 0.0, "the tests wrote no reward file (exit status 0)"),
        ("exit 1", {"test_command": "[ -d /tests ]"}, 1.0, ""),
        (PASS, {"test_command": "bash /tests/test.sh; exit 3"}, 0.0, "exit status 3"),
    ],
)
def test_the_reward_is_the_number_of_the_reward_file(
    tmp_path: Path, test: str, options: dict[str, Any], reward: float, reason: str
) -> None:
    make_task(tmp_path, test=test)
    env, info, _ = play(tmp_path, **options)
    assert env.verdict is not None
    assert info["reward"] == reward and info["progression"] == min(reward, 1.0)
    assert reason in env.verdict.reason and info["metrics"]["without_reward"] == bool(reason)


def test_the_folder_of_tests_may_be_a_link_inside_the_task(tmp_path: Path) -> None:
    task = make_task(tmp_path, test=PASS)
    (task / "tests").rename(task / "checks")
    (task / "tests").symlink_to("checks")
    assert play(tmp_path)[1]["reward"] == 1.0


def test_reward_files_of_the_image_do_not_count(tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", "bash", "ls")
    (image / "logs" / "verifier").mkdir(parents=True)
    (image / "logs" / "verifier" / "reward.txt").write_text("1\n")
    make_task(tmp_path, test="true")
    assert play(tmp_path, rootfs=str(image))[1]["reward"] == 0.0


def test_the_time_limits_of_the_task_end_commands_episode_and_tests(tmp_path: Path) -> None:
    make_task(
        tmp_path,
        toml="[agent]\ntimeout_sec = 1.0\n[verifier]\ntimeout_sec = 1.0\n",
        test=f"{PASS}; sleep 60",
    )
    env = start(tmp_path)
    call = '<tool_call>{"name": "run", "arguments": {"command": "sleep 60"}}</tool_call>'
    observation, done, info = env.step(call * 2)
    assert done and info["truncated"] and not info["terminated"]
    assert "stopped: it ran past its time limit" in observation["obs_str"]
    assert "the time for this turn is used up" in observation["obs_str"]
    assert (
        env.verdict is not None
        and env.verdict.reason == "the tests were stopped by their time limit"
    )


def test_an_image_takes_the_place_of_this_machine(tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", "bash", "cat", "ls", "mkdir")
    (image / "app" / "in.txt").write_text("from the image\n")
    (image / "opt" / "tool").mkdir(parents=True)
    dockerfile = "FROM acme/anything\nRUN <<END\napt-get install x\nEND\n"
    toml = (
        '[environment]\ndocker_image = "acme/answer:1"\nworkdir = "/app/new"\nenv = {A = "set"}\n'
    )
    make_task(tmp_path / "tasks", dockerfile=dockerfile, toml=toml)
    with pytest.raises(
        ConfigError, match=r"env.images .* has no image of the task as it is now; run: slime-verlog"
    ):
        start(tmp_path / "tasks", images=str(tmp_path))
    env = start(tmp_path / "tasks", rootfs=str(image), writable=["/opt/tool"])
    shown = run(
        env,
        "cat ../in.txt; echo $A; pwd; type python3; ls /usr/bin; echo new > /opt/tool/x; echo > "
        "/etc/x",
    )
    assert "from the image\nset\n/app/new\n" in shown and "bash\ncat\nls\nmkdir\n" in shown
    assert "python3: not found" in shown and "/etc/x: Read-only file system" in shown
    run(env, "echo 42 > ../answer.txt; echo changed > ../in.txt; cat /opt/tool/x")
    assert env.step(SUBMIT)[2]["reward"] == 1.0
    assert (image / "app" / "in.txt").read_text() == "from the image\n"
    assert not (image / "opt" / "tool" / "x").exists()


def test_the_check_runs_the_reference_solution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_sandbox()
    make_task(tmp_path, "fine", solution="echo 42 > answer.txt")
    make_task(tmp_path, "paid", test=PASS)
    make_task(tmp_path, "unpaid", solution="echo 41 > /app/answer.txt\necho done")
    folders = f'env.folders=["{tmp_path}"]'
    options = "check envs.harbor --task * --max-turns 1 --no-prompt --set"
    assert slime_verlog(*options.split(), folders) == 1
    shown = capsys.readouterr().out
    assert "fine: the reference solution is paid 1 and the untouched files 0" in shown
    assert "paid: the untouched files are paid 1" in shown
    assert "unpaid: the reference solution is not paid: the tests pay 0; it printed: done" in shown


def test_the_reference_solution_of_every_example_is_paid() -> None:
    needs_sandbox()
    found = list(check_references(ANY, HarborSettings()))
    assert [one.task for one in found] == ["count-errors", "fix-interest", "sort-inbox"]
    assert not [one for one in found if one.problem or one.note]


def test_the_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    needs_sandbox()
    task = {"task": "count-errors", "seed": 0}
    code = f"import os, signal; from envs.loading import build_env_from as b; e = b('envs.harbor', {task}, {{}}); "
    code += "e.reset(); print(len(os.listdir(os.environ['TMPDIR'])), flush=True); "

    def run(ending: str) -> str:
        variables = {**os.environ, "TMPDIR": str(tmp_path)}
        argv = [sys.executable, "-c", code + ending]
        return subprocess.run(
            argv, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        ).stdout

    assert run("os.kill(os.getpid(), signal.SIGKILL)") == "1\n" and os.listdir(tmp_path)
    assert run("") == "1\n"
    assert not os.listdir(tmp_path)


@pytest.fixture(scope="module")
def python_in_tmp() -> Iterator[Path]:
    """An interpreter below /tmp, where every agent may write: people clone there, and install into
    `.venv`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        venv.create(f"{folder}/clone/.venv", symlinks=True)
        yield Path(folder, "clone/.venv/bin/python")


def test_an_interpreter_in_a_folder_of_the_agent_runs_and_cannot_be_changed(
    tmp_path: Path, python_in_tmp: Path
) -> None:
    test = f"[ $(which python3) = {python_in_tmp}3 ] && python3 -c 'print(1)' > /logs/verifier/reward.txt"
    make_task(tmp_path, test=test)
    env = start(tmp_path, python=str(python_in_tmp))
    prefix = python_in_tmp.parents[1]
    top = prefix.parents[1]
    assert str(prefix) in run(
        env, "which python3; touch /tmp/mine; python3 -c 'import sys; print(sys.prefix)'"
    )
    for attempt in (
        f"echo 1 > {python_in_tmp}",
        f"mv {top} /tmp/x",
        f"rm -rf {prefix}",
        f"mkdir {top}/own",
    ):
        assert "(exit status 7)" in run(env, f"{attempt} || exit 7")
    assert "Permission denied" in run(env, f"ls {top}")
    run(
        env,
        f"mkdir -p {top}/clone/.venv/bin; echo exit 7 > {top}/clone/.venv/bin/python3; chmod -R "
        f"777 {top}",
    )
    assert env.step(SUBMIT)[2]["reward"] == 1.0


def test_a_task_with_files_where_the_interpreter_is_installed_is_refused(
    tmp_path: Path, python_in_tmp: Path
) -> None:
    top = python_in_tmp.parents[3]
    make_task(tmp_path, dockerfile=f"FROM ubuntu:24.04\nWORKDIR {top}/work\n")
    with pytest.raises(
        ConfigError,
        match=rf"needs the folder {top}, where {python_in_tmp} is installed; set env.python",
    ):
        start(tmp_path, python=str(python_in_tmp))
