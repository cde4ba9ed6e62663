"""Attacks on the reward by programs that the tests run: none is paid, and honest tests may do what
they usually do."""

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from envs.harbor.reward import RewardWatch, make_files
from envs.harbor.settings import EXAMPLES
from tests.cases import pairs, some
from tests.envs.harbor.attacks import CHECK_RUNS, DOCKERFILE, PAYS, RUNS, TESTS, WRONG, episode
from tests.envs.harbor.task_folders import make_task, play

HONEST = {
    "solution.py": "from helper import value\n\n\ndef answer():\n    return value\n\n\n"
    "if __name__ == '__main__':\n    print(answer())\n",
    "helper/__init__.py": "from helper.inner import value\n",
    "helper/inner.py": "import json\nvalue = json.loads('42')\n",
}


@pytest.mark.parametrize("tests", some(TESTS, [*TESTS][::3]))
def test_an_honest_module_is_paid(tmp_path: Path, tests: str) -> None:
    reward, said = episode(tmp_path, tests, HONEST)
    assert reward == 1.0, said


WITH_DAEMON = """
import ctypes, os, threading, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        quiet = os.open('/dev/null', os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        def work():
            end = time.time() + 20
            while time.time() < end:
                {write}
            os._exit(0)
        threading.Thread(target=work).start()
        {first}
    os._exit(0)
print(41)
"""
"""A program whose child stays; its first thread ends at once, or not."""
FIRST = ["ctypes.CDLL(None).pthread_exit(None)", "time.sleep(30)"]
REWARD = "/logs/verifier/reward.txt"
REWRITE = f"open('{REWARD}', 'w').write('1')"
IN_PLACE = f"fd = os.open('{REWARD}', os.O_RDWR); os.pwrite(fd, b'1', 0)"
WRITES = [
    REWRITE,
    IN_PLACE,
    f"open('/tmp/x', 'w').write('1'); os.system('cp /tmp/x {REWARD}; mv /tmp/x {REWARD}')",
]
DAEMONS = [WITH_DAEMON.format(write=write, first=first) for write in WRITES for first in FIRST]
RUNNING = [name for name in TESTS if "run" in name or "shell" in name or name.startswith("script ")]


@pytest.mark.parametrize(("tests", "daemon"), pairs(RUNNING, DAEMONS))
def test_a_process_that_stays_behind_does_not_write_the_reward(
    tmp_path: Path, tests: str, daemon: str
) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": daemon})
    assert reward == 0.0, said


WAITING = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.dup2(os.open('/dev/null', os.O_RDWR), fd)
    held = os.open('{REWARD}', os.O_RDWR)
    while not os.pread(held, 1, 0):
        pass
    os.pwrite(held, b'1', 0)
    os._exit(0)
time.sleep(0.3)
print(41)
"""


def test_a_process_that_stays_behind_does_not_shorten_the_reward(tmp_path: Path) -> None:
    test = f"python3 /app/solution.py; echo 1e-05 > {REWARD}; sleep 1; cat {REWARD}"
    cut = WITH_DAEMON.format(write=f"time.sleep(0.2); os.truncate('{REWARD}', 1)", first=FIRST[1])
    reward, said = episode(tmp_path, (test, {}), {"solution.py": cut})
    assert reward in (0.0, 1e-05), said


@pytest.mark.parametrize("attempt", some(range(20), range(2)))
def test_a_process_that_waits_for_the_reward_does_not_change_it(
    tmp_path: Path, attempt: int
) -> None:
    reward, said = episode(tmp_path, "shell", {"solution.py": WAITING})
    assert reward == 0.0, said


def test_two_writers_at_once_are_two(tmp_path: Path) -> None:
    """`PyDLL` keeps the interpreter's lock, so the watch can read no event before all of them are
    there."""
    libc = ctypes.PyDLL(None)
    make_files(tmp_path / "rewards")
    name = os.fsencode(tmp_path / "rewards" / "reward.txt")
    with RewardWatch(tmp_path / "rewards") as watch:
        first, second = (libc.open(name, os.O_WRONLY) for _ in range(2))
        for opened in (first, second):
            libc.close(opened)
    assert watch.writers("reward.txt") == 2


@pytest.mark.parametrize(
    "code", ["import os\nos._exit(0)\n", "import os\ndef answer():\n    os._exit(0)\n"]
)
def test_a_pytest_session_that_imported_code_ends_early_pays_nothing(
    tmp_path: Path, code: str
) -> None:
    reward, said = episode(tmp_path, "pytest imports", {"solution.py": code})
    assert reward == 0.0 and "pytest did not come to its end" in said


THEN = [
    f"os.chmod('{REWARD}', 0)",
    f"os.chmod('{REWARD}', 0o444); os.chmod('/logs/verifier', 0o555)",
    f"os.chmod('{REWARD}', 0o444); os.fork() or (time.sleep(1), os.chmod('{REWARD}', 0o644), "
    "os._exit(0))",
    f"os.remove('{REWARD}')",
    f"os.link('{REWARD}', '/logs/verifier/other')",
    "os.rename('/logs/verifier', '/logs/gone')",
    "import resource; [resource.prlimit(p, resource.RLIMIT_FSIZE, (0, 0)) for p in range(2, "
    "os.getpid())]",
    "[open(f'/proc/{p}/mem', 'r+b') for p in range(2, os.getpid())]",
]
PLANT = """
import os, time
if not os.path.exists('/app/done'):
    open('/app/done', 'w').close()
    open('/logs/verifier/reward.txt', 'w').write('1')
    try:
        {then}
    except OSError:
        pass
"""


STOP = pytest.param("shell", "os.kill(os.getppid(), 19)", marks=pytest.mark.slow)


@pytest.mark.parametrize(("tests", "then"), [*pairs(RUNNING, THEN), STOP])
def test_a_reward_that_a_program_under_test_wrote_is_not_paid(
    tmp_path: Path, tests: str, then: str
) -> None:
    program = PLANT.format(then=then) + WRONG + "print(41)\n"
    make_task(tmp_path, test=TESTS[tests][0], files=TESTS[tests][1], dockerfile=DOCKERFILE)
    task = tmp_path / "answer" / "task.toml"
    task.write_text("[verifier]\ntimeout_sec = 10.0\n")
    env, info, _ = play(tmp_path, f"cat > solution.py <<'END_'\n{program}\nEND_")
    assert env.verdict is not None and info["reward"] == 0.0, env.verdict


def test_a_reward_that_pytest_did_not_write_does_not_replace_its_exit_status(
    tmp_path: Path,
) -> None:
    make_task(tmp_path, files={"tests/test_it.py": RUNS}, dockerfile=DOCKERFILE)
    plant = f"cat > solution.py <<'END'\n{PLANT.format(then='pass')}\nprint(41)\nEND"
    command = "pytest -q /tests/test_it.py"
    assert play(tmp_path, plant, test_command=command)[1]["reward"] == 0.0
    assert play(tmp_path, plant, test_command=f"{command} && echo 1 > {REWARD}")[1]["reward"] == 0.0
    assert (
        play(tmp_path, "echo 'print(41)' > solution.py", test_command=command)[1]["reward"] == 0.0
    )
    assert (
        play(tmp_path, "echo 'print(42)' > solution.py", test_command=command)[1]["reward"] == 1.0
    )


HONEST_WRITES = [
    f"open('{REWARD}', 'a').write('1')",
    "import pathlib; pathlib.Path('/logs/verifier/reward.json').write_text('{\"reward\": 1}')",
    f"import os; os.system('echo 1 > {REWARD}; mkdir -p /logs/verifier; echo x > "
    "/logs/verifier/ctrf.json')",
    f"import shutil; open('/tmp/r', 'w').write('1'); shutil.copy('/tmp/r', '{REWARD}')",
    "import os; os.chdir('/logs/verifier'); open(b'reward.txt', 'w').write('1')",
]


@pytest.mark.parametrize("write", some(HONEST_WRITES, HONEST_WRITES[1:4]))
def test_the_tests_may_write_the_reward_in_many_ways(tmp_path: Path, write: str) -> None:
    test = "set -e; python3 /tests/check.py; cat /logs/verifier/reward.*; [ -f /logs/verifier/reward.txt ]"
    make_task(tmp_path, test=test, files={"tests/check.py": write}, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, "echo 'x = 1' > solution.py")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict


TWICE = f"echo 0 > {REWARD}; [ $(cat answer.txt) = 42 ] && echo 1 > {REWARD}"
OWN_HOME = f"PATH=$HOME/bin:$PATH; [ $(answer) = 42 ] && echo 1 > {REWARD}"
SOLVE = "echo 42 > answer.txt; mkdir ~/bin; echo echo 42 > ~/bin/answer; chmod +x ~/bin/answer"


@pytest.mark.parametrize("test", [TWICE, OWN_HOME])
def test_tests_that_need_the_agents_home_or_write_twice_are_paid_if_the_settings_say_so(
    tmp_path: Path, test: str
) -> None:
    make_task(tmp_path, test=test)
    options: list[dict[str, Any]] = [
        {},
        {"verifier": {"answ*": "same"}},
        {"verifier": {"other": "same"}},
    ]
    assert [play(tmp_path, SOLVE, **given)[1]["reward"] for given in options] == [0.0, 1.0, 0.0]


def test_servers_of_the_tests_live_as_long_as_they_are_needed(tmp_path: Path) -> None:
    """The script itself asks the server between two tests, and once more after it wrote the
    reward."""
    ask = "curl() { python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8123\").read())'; }\n"
    test = f"{ask}python3 /app/server.py &\nuntil [ -e /tmp/up ]; do sleep 0.1; done\n"
    test += f"curl && curl\nright=$?\n[ $right = 0 ]{PAYS}curl\n"
    server = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"42")
server = http.server.HTTPServer(("127.0.0.1", 8123), Handler)
open("/tmp/up", "w").close()
server.serve_forever()
"""
    make_task(tmp_path, test=test, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, f"cat > server.py <<'END'\n{server}\nEND")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict
    assert env.verdict.output.count("b'42'") == 3


EXIT = "printf 'import os\\nos._exit(0)\\n'"
SHIPPED = [
    ("fix-interest", f"{EXIT} > pygments.py; cp pygments.py pytest.py"),
    (
        "fix-interest",
        "printf '[pytest]\\naddopts = --co\\n' | tee pytest.ini tox.ini /tmp/pytest.ini",
    ),
    (
        "fix-interest",
        f"echo \"{REWRITE}; open('/tests/test.sh', 'r+').truncate(60)\" > interest.py",
    ),
    (
        "count-errors",
        "echo 'python3() { true; }; export -f python3' | tee ~/.bashrc ~/.profile .bashrc /tmp/env",
    ),
    ("count-errors", "ln -s /tests/check.py errors.json; ln -sf /proc/self/environ errors.json"),
    (
        "sort-inbox",
        "echo '{\"reward\": 1}' | tee reward.json /logs/agent/reward.json /tmp/reward.json",
    ),
]
MORE = [
    (
        "count-errors",
        f"{EXIT} > json.py; cp json.py sys.py; cp json.py pathlib.py; cp *.py /tmp; cp *.py ~",
    ),
    (
        "fix-interest",
        f"{EXIT} > conftest.py; cp conftest.py sitecustomize.py; cp conftest.py pytest_asyncio.py",
    ),
    ("fix-interest", f"cat > interest.py <<'END'\n{DAEMONS[0]}\nEND"),
    (
        "fix-interest",
        "echo 'import os, signal; os.kill(os.getppid(), signal.SIGTERM)' > interest.py",
    ),
    ("fix-interest", "echo \"open('/tests/test_outputs.py', 'w').write('')\" > interest.py"),
    (
        "fix-interest",
        "mkdir p; echo 'exec true' > p/python3; chmod +x p/python3; cp p/python3 .; cp -r p ~/bin",
    ),
    ("fix-interest", "echo 'import os; os.kill(-1, 9)' > interest.py"),
    (
        "fix-interest",
        "ln -s /tmp pytest-of-agent; rm -rf /tmp/pytest-of-*; ln -s /app /tmp/pytest-of-agent",
    ),
    ("sort-inbox", f"{EXIT} > os.py; cp os.py json.py; mkdir sorted; cp *.py sorted; rm inbox/*"),
]


@pytest.mark.parametrize(
    ("task", "attack"), [*SHIPPED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_attacks_on_the_shipped_tasks_are_not_paid(task: str, attack: str) -> None:
    env, info, _ = play(EXAMPLES, attack, task=task)
    assert env.verdict is not None and info["reward"] == 0.0, env.verdict


def test_a_pipe_in_place_of_the_result_does_not_reach_the_tests(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "count-errors", tmp_path / "count-errors")
    env, info, _ = play(tmp_path, "mkfifo errors.json; mkfifo json.py", task="count-errors")
    assert info["reward"] == 0.0
    assert env.verdict is not None and env.verdict.reason == "", "the tests ran to their end"


def test_what_a_script_prints_as_its_reward_counts(tmp_path: Path) -> None:
    check = CHECK_RUNS.replace("assert ", "right = ") + "print('{\"reward\": %d}' % right)\n"
    given = ("python3 /tests/check.py > /logs/verifier/reward.json", {"tests/check.py": check})
    assert episode(tmp_path, given, {"solution.py": "print(42)\n"})[0] == 1.0
