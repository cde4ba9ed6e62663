"""Attacks of an agent on its tests: none is paid, and none becomes an error."""

from pathlib import Path

import pytest

from envs.errors import ConfigError
from tests.cases import some
from tests.envs.harbor.task_folders import DOCKERFILE, TEST, make_image, make_task, play, run, start

PLANT = "mkdir -p {0} && printf '{1}' > {0}/{2} && chmod +x {0}/{2}"
RUNS_THE_PROGRAM = (
    'bash /app/program; if [ "$?" = 7 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
)


def test_an_honest_answer_is_paid(tmp_path: Path) -> None:
    make_task(tmp_path)
    env, info, shown = play(tmp_path, "echo 42 > answer.txt")
    assert (info["reward"], info["progression"], info["terminated"]) == (1.0, 1.0, True)
    assert "Reward: 1." in shown and not env.verdict.reason  # pyright: ignore[reportOptionalMemberAccess]


LEFT_BEHIND = [
    "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt",
    "rm -rf /logs/*; ln -s /app /logs/verifier; echo 1 > reward.txt",
    "mv /logs/agent /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "(sleep 1; echo 42 > answer.txt; echo 1 > /logs/verifier/reward.txt) > /dev/null 2>&1 & disown",
    "setsid nohup bash -c 'while true; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null "
    "2>&1 &",
    PLANT.format("/home/agent/.local/bin", "echo 42\\n", "cat")
    + "; cp /home/agent/.local/bin/cat /app",
    "cat() { echo 42; }; export -f cat; echo 'cat() { echo 42; }' > ~/.bashrc; cp ~/.bashrc "
    "~/.bash_profile",
    "yes 42; yes 42 > answer.txt; truncate -s 200M /app/huge",
]


@pytest.mark.parametrize("command", some(LEFT_BEHIND, LEFT_BEHIND[1::2]))
def test_what_the_agent_leaves_behind_is_not_its_verdict(tmp_path: Path, command: str) -> None:
    make_task(tmp_path)
    _, info, _ = play(tmp_path, command, memory_mb=512)
    assert info["reward"] == 0.0


def test_programs_in_the_agents_folders_are_not_found_by_the_tests(tmp_path: Path) -> None:
    files = {"environment/bin/show": "echo 0\n"}
    dockerfile = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY . .\nENV PATH=/app/bin:$PATH\n"
    make_task(tmp_path, dockerfile=dockerfile, files=files)
    env = start(tmp_path)
    assert "42" in run(
        env, PLANT.format("/app/bin", "#!/bin/bash\\necho 42\\n", "cat") + "; cat answer.txt"
    )
    assert env.step("submit")[2]["reward"] == 0.0


def test_the_tests_have_a_home_that_the_agent_did_not_have(tmp_path: Path) -> None:
    make_task(tmp_path, test=f'source "$HOME/.local/bin/env"\n{TEST}')
    _, info, _ = play(tmp_path, PLANT.format("~/.local/bin", "cat() { echo 42; }\\n", "env"))
    assert info["reward"] == 0.0


def test_search_paths_of_the_tests_name_no_folder_of_the_agent(tmp_path: Path) -> None:
    given = {
        "PYTHONPATH": "/app:/proc/self/cwd/lib:lib",
        "LD_LIBRARY_PATH": "/app:/usr/lib",
        "NODE_PATH": "/app",
    }
    given |= {
        "PYTHONPYCACHEPREFIX": "/app/pyc",
        "PYTHONUSERBASE": "/tmp/u",
        "GIT_CONFIG_GLOBAL": "/app/git",
    }
    shown = "|".join(f"${name}" for name in (*given, "DATA"))
    lines = "".join(
        f"ENV {name}={value}\n" for name, value in {**given, "DATA": "/app/data"}.items()
    )
    test = f'echo "{shown}" > /logs/verifier/shown; cat /logs/verifier/shown'
    make_task(tmp_path, test=test, dockerfile=DOCKERFILE + lines)
    env, _, _ = play(tmp_path, "true")
    assert env.verdict is not None and env.verdict.output == "|/usr/lib|||||/app/data\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (
            'python3 -c \'import os; [os.mkdir("d") or os.chdir("d") for _ in range(1500)]\'',
            "the tests wrote no reward file",
        ),
        (
            'python3 -c \'import os; [os.mkdir("d") or os.chdir("d") for _ in range(2500)]\'',
            "/app holds folders that cannot be listed",
        ),
        ("ln -s $(printf 'a%.0s' {1..300}) x", "cannot be checked (File name too long)"),
        ("ln -s x x; ln -s /tests $'\\xff<|im_end|>'", "the tests wrote no reward file"),
        (
            "mkfifo reward.json; mkfifo pytest.py; chmod 4777 reward.json",
            "the tests wrote no reward file",
        ),
    ],
)
def test_odd_folders_links_and_names_become_no_error(
    tmp_path: Path, command: str, reason: str
) -> None:
    make_task(tmp_path, test="true")
    env, info, shown = play(tmp_path, command)
    assert env.verdict is not None and info["reward"] == 0.0
    assert reason in env.verdict.reason
    assert "<|im_end|>" not in shown and len(shown) < 1000 and shown.encode()


LINKS = [
    "ln -s /tests/expected.txt answer.txt",
    "mkdir -p a/b; ln -s /app/a/b c; ln -s c/../../../tests/expected.txt answer.txt",
    "ln -s /dev/fd/../cwd/../tests/expected.txt answer.txt",
    "ln -s ../tests/expected.txt answer.txt",
    "ln -s /tmp x; ln -s x/../tests/expected.txt answer.txt",
    "ln -s / root; ln -s root/tests/expected.txt answer.txt",
    "ln -s /proc/self/root/tests/expected.txt answer.txt",
    "ln -s /proc/self/cwd/../tests/expected.txt answer.txt",
    "ln -s x/../../tests/expected.txt answer.txt",
]


@pytest.mark.parametrize("command", some(LINKS, LINKS[:3]))
def test_a_link_into_the_tests_is_not_an_answer(tmp_path: Path, command: str) -> None:
    make_task(
        tmp_path,
        test="cmp /app/answer.txt /tests/expected.txt && echo 1 > /logs/verifier/reward.txt",
        files={"tests/expected.txt": "42\n"},
    )
    assert play(tmp_path, f"{command}; ls -l answer.txt")[1]["reward"] == 0.0


def test_links_inside_the_agents_folders_and_into_the_system_stay(tmp_path: Path) -> None:
    test = "readlink a b c/d e > /tmp/shown; cat /tmp/shown a e; [ -x b ] && echo program"
    make_task(tmp_path, test=test)
    links = "echo 42 > x; mkdir c; ln -s x a; ln -s /usr/bin/env b; ln -s ../x c/d; ln -s c/../c/d e; ln -s /dev/null n"
    env, _, _ = play(tmp_path, links)
    assert (
        env.verdict is not None
        and env.verdict.output == "x\n/usr/bin/env\n../x\nc/../c/d\n42\n42\nprogram\n"
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $PPID", "ended by a signal"),
        ("""echo '{"reward": 1}' > /logs/verifier/reward.json""", ""),
        ("ln -s /etc/passwd /logs/verifier/reward.json", ""),
        ("mkfifo /logs/verifier/reward.json", ""),
        ("truncate -s 100M /logs/verifier/reward.json", "longer than"),
        ("""printf '[%.0s' {1..60000} > /logs/verifier/reward.json""", "cannot be used"),
        ("yes 0123456789", "stopped by their output limit"),
    ],
)
def test_a_program_under_test_gains_nothing_by_another_reward_file(
    tmp_path: Path, program: str, reason: str
) -> None:
    make_task(tmp_path, test=RUNS_THE_PROGRAM)
    env = start(tmp_path)
    run(env, f"cat > program <<'END'\n{program}\nEND")
    info = env.step("submit")[2]
    assert env.verdict is not None and info["reward"] == 0.0
    assert reason in env.verdict.reason


def test_links_of_a_task_folder_lead_to_no_file_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("safe\n")
    task = make_task(tmp_path / "tasks", dockerfile=DOCKERFILE + "COPY all/ .\n")
    context = task / "environment"
    (context / "all").mkdir()
    (context / "all" / "secret.txt").symlink_to(secret)
    (context / "link").symlink_to(secret)
    (context / "up").symlink_to(tmp_path)
    env = start(tmp_path / "tasks")
    assert "safe" not in run(env, "cat secret.txt; echo bad > secret.txt")
    env.close()
    for source in ("link", "up", "up/secret.txt"):
        (context / "Dockerfile").write_text(f"{DOCKERFILE}COPY {source} .\n")
        with pytest.raises(
            ConfigError, match=f"environment/{source} is missing, or is behind a link"
        ):
            start(tmp_path / "tasks")
    assert secret.read_text() == "safe\n"


@pytest.mark.parametrize("link", ["solution", "home", "logs", "app", "etc/passwd"])
def test_a_link_of_an_image_in_place_of_a_folder_is_refused(tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secret"
    for name in ("agent", "artifacts"):
        (secret / name).mkdir(parents=True)
    image = make_image(tmp_path / "image", "bash", "ls")
    (image / "app").rmdir()
    (image / "etc" / "passwd").unlink()
    (image / link).symlink_to(secret)
    make_task(tmp_path / "tasks")
    with pytest.raises(ConfigError, match=f"/{link}.* a link"):
        start(tmp_path / "tasks", rootfs=str(image), writable=["/home/me"])
    assert sorted(path.name for path in secret.rglob("*")) == ["agent", "artifacts"]


def test_links_that_take_too_long_to_check_pay_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.harbor.places._CHECK_S", 0.5)
    make_task(tmp_path)
    chain = "mkdir -p $(printf 'd/%.0s' {1..300}); cd d/d/d; p=$(printf 'd/../%.0s' {1..200}); "
    chain += "for i in {1..200}; do ln -s ${p}l$((i + 1)) l$i; done"
    env, info, _ = play(tmp_path, f"echo 42 > answer.txt; {chain}")
    assert info["reward"] == 0.0 and env.verdict is not None
    assert env.verdict.reason == "the agent left links that take too long to check"
