"""Attacks on the reward: programs of the agent neither write it nor stay behind to do so later."""

import shutil
from pathlib import Path

import pytest

from envs.harbor.settings import EXAMPLES
from tests.cases import pairs, some
from tests.envs.harbor.attacks import CHECK_RUNS, DOCKERFILE, PAYS, RUNS, TESTS, WRONG, episode
from tests.envs.harbor.task_folders import make_task, play

WITH_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        quiet = os.open('/dev/null', os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        end = time.time() + 20
        while time.time() < end:
            {write}
    os._exit(0)
print(41)
"""
REWRITE = "open('/logs/verifier/reward.txt', 'w').write('1')"
REPLACE = "open('/tmp/x', 'w').write('1'); os.system('cp /tmp/x /logs/verifier/y; mv /logs/verifier/y {}')"


RUNNING = [name for name in TESTS if "run" in name or "shell" in name or name.startswith("script ")]
WRITES = [REWRITE, REPLACE.format("/logs/verifier/reward.txt"), REPLACE.format("/logs/verifier/reward.json")]


@pytest.mark.parametrize(("tests", "write"), pairs(RUNNING, WRITES))
@pytest.mark.parametrize("attempt", some(range(2), [0]))
def test_a_process_that_stays_behind_does_not_write_the_reward(
    tmp_path: Path, tests: str, write: str, attempt: int
) -> None:
    reward, said = episode(tmp_path, tests, {"solution.py": WITH_DAEMON.format(write=write)})
    assert reward == 0.0, said


@pytest.mark.parametrize(
    "script",
    [
        'OUT=/logs/verifier/reward.txt\n{check}\necho $pays > "$OUT"',
        "{check}\ncd /logs/verifier\necho $pays > reward.txt",
        "{check}\n( echo $pays ) > /logs/verifier/reward.txt",
        "f() {{ echo $pays >> $1; }}\n{check}\nf /logs/verifier/reward.txt",
        "out() {{ echo $pays > /logs/verifier/reward.txt; }}\n{check}\nout",
    ],
    ids=["variable", "folder", "subshell", "appending function", "function"],
)
def test_the_script_may_name_the_reward_file_in_other_ways(tmp_path: Path, script: str) -> None:
    check = "python3 /tests/test_it.py && pays=1 || pays=0"
    tests = (script.format(check=check), {"tests/test_it.py": CHECK_RUNS})
    write = REWRITE.replace("'w'", "'r+'")  # the daemon writes over what is there
    write = f"os.path.exists('/logs/verifier/reward.txt') and {write}"
    reward, said = episode(tmp_path, tests, {"solution.py": WITH_DAEMON.format(write=write)})
    assert reward == 0.0, said


@pytest.mark.parametrize(
    ("prints", "planted"),
    [
        ("sys.stdout.write('0'); sys.stdout.flush()", "1"),
        ("sys.stdout.write('0')", "01"),
        ("assert right", "1"),
        ("subprocess.run(['printf', '0'])", "0.9"),
    ],
    ids=["at once", "shorter", "nothing", "by a program"],
)
def test_what_a_script_prints_as_its_reward_is_restored(tmp_path: Path, prints: str, planted: str) -> None:
    # The file is never empty for a moment, so the daemon's text is there whenever the daemon is ended.
    program = WITH_DAEMON.format(write=REWRITE.replace("'w'", "'r+'").replace("'1'", repr(planted)))
    # The script waits until the daemon has written over what it printed.
    check = CHECK_RUNS.replace("assert ", "right = ") + f"import sys, time\ntry:\n    {prints}\n"
    check += "finally:\n    time.sleep(0.3)\n"
    given = (TESTS["script prints"][0], {"tests/check.py": check})
    reward, said = episode(tmp_path, given, {"solution.py": program})
    assert reward == 0.0, said


PLANT = """
import os
if not os.path.exists('/app/done'):
    open('/app/done', 'w').close()
    open('/logs/verifier/reward.txt', 'w').write('1')
    {then}
"""
ONLY_SUCCESS = {
    "pytest, then success": ("python3 -m pytest -q /tests/test_it.py && echo 1 > /logs/verifier/reward.txt", RUNS),
    "script, then success": ("python3 /tests/test_it.py && echo 1 > /logs/verifier/reward.txt", CHECK_RUNS),
    "script, then both": (f"python3 /tests/test_it.py; r=$?{PAYS.replace('$?', '$r')}", CHECK_RUNS),
}
PLANTED = {**TESTS, **{name: (test, {"tests/test_it.py": text}) for name, (test, text) in ONLY_SUCCESS.items()}}


# In this order, a file that is only read-only meets the shell by default: no judging Python would remove it there.
LOCKS = [
    "os.chmod('/logs/verifier/reward.txt', 0); os.chmod('/logs/verifier', 0o555)",
    "os.chmod('/logs/verifier/reward.txt', 0o444)",
    "os.chmod('/logs/verifier', 0)",
]


@pytest.mark.parametrize(("tests", "then"), pairs(PLANTED, LOCKS))
def test_a_reward_that_a_program_under_test_wrote_is_not_paid(
    tmp_path: Path, tests: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TESTS, tests, PLANTED[tests])
    reward, said = episode(tmp_path, tests, {"solution.py": PLANT.format(then=then) + WRONG + "print(41)\n"})
    assert reward == 0.0, said


def test_a_reward_that_pytest_did_not_write_does_not_replace_its_exit_status(tmp_path: Path) -> None:
    make_task(tmp_path, files={"tests/test_it.py": RUNS}, dockerfile=DOCKERFILE)
    command = "python3 -m pytest -q /tests/test_it.py"
    plant = f"cat > solution.py <<'END'\n{PLANT.format(then='pass')}\nprint(41)\nEND"
    assert play(tmp_path, plant, test_command=command)[1]["reward"] == 0.0
    assert play(tmp_path, "echo 'print(42)' > solution.py", test_command=command)[1]["reward"] == 1.0


@pytest.mark.parametrize(
    "write",
    [
        "open('/logs/verifier/reward.txt', 'w').write('1')",
        "import pathlib; pathlib.Path('/logs/verifier/reward.json').write_text('{\"reward\": 1}')",
        "import subprocess; subprocess.run('echo 1 > /logs/verifier/reward.txt', shell=True)",
        "import os; os.system('echo 1 > /logs/verifier/reward.txt')",
        "import os; open('/tmp/r', 'w').write('1'); os.system('mv /tmp/r /logs/verifier/reward.txt')",
        "import shutil; open('/tmp/r', 'w').write('1'); shutil.copy('/tmp/r', '/logs/verifier/reward.txt')",
        "import os; os.chdir('/logs/verifier'); open(b'reward.txt', 'w').write('1')",
        "import os; os.chdir('/logs/verifier'); open('r', 'w').write('1'); os.replace('r', 'reward.txt')",
    ],
)
def test_the_tests_may_write_the_reward_in_many_ways(tmp_path: Path, write: str) -> None:
    files = {"tests/check.py": f"import sys\nsys.path.insert(0, '/app')\nimport solution\n{write}\n"}
    make_task(tmp_path, test="python3 /tests/check.py; cat /logs/verifier/reward.*", files=files, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, "echo 'x = 1' > solution.py")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict


def test_servers_of_the_tests_live_as_long_as_they_are_needed(tmp_path: Path) -> None:
    test = "python3 /app/server.py &\nuntil [ -e /tmp/up ]; do sleep 0.1; done\n"
    test += f"python3 -m pytest -q /tests/test_it.py | tee /logs/verifier/out.txt; [ ${{PIPESTATUS[0]}} = 0 ]{PAYS}"
    asks = "import urllib.request\n\n\ndef test_it():\n"
    asks += "    assert urllib.request.urlopen('http://127.0.0.1:8123').read() == b'42'\n"
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
    make_task(tmp_path, test=test, files={"tests/test_it.py": asks}, dockerfile=DOCKERFILE)
    env, info, _ = play(tmp_path, f"cat > server.py <<'END'\n{server}\nEND")
    assert env.verdict is not None and info["reward"] == 1.0, env.verdict


EXIT = "printf 'import os\\nos._exit(0)\\n'"
DAEMON = WITH_DAEMON.format(write=REWRITE)
LIMITED = f"""
import os, resource
{REWRITE}
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        if b'test.sh' in open(f'/proc/{{{{pid}}}}/cmdline', 'rb').read():
            resource.prlimit(int(pid), resource.RLIMIT_{{limit}}, (0, 0))
    except OSError:
        pass
"""
LIMITED_BY = [f"cat > interest.py <<'END'\n{LIMITED.format(limit=limit)}\nEND" for limit in ("NPROC", "AS", "NOFILE")]
SHIPPED = [
    ("fix-interest", f"{EXIT} > pygments.py"),
    ("fix-interest", "printf '[pytest]\\naddopts = --co\\n' | tee pytest.ini tox.ini /tmp/pytest.ini"),
    ("fix-interest", f"cat > interest.py <<'END'\n{DAEMON}\nEND"),
    ("fix-interest", f"echo \"{REWRITE}; open('/tests/test.sh', 'r+').truncate(60)\" > interest.py"),
    ("fix-interest", LIMITED_BY[0]),
    ("count-errors", f"{EXIT} > json.py; cp json.py sys.py; cp json.py pathlib.py; cp *.py /tmp; cp *.py ~"),
    ("count-errors", "echo 'python3() { true; }; export -f python3' | tee ~/.bashrc ~/.profile .bashrc /tmp/env"),
    ("count-errors", "ln -s /tests/check.py errors.json; ln -sf /proc/self/environ errors.json"),
    ("sort-inbox", "echo '{\"reward\": 1}' | tee reward.json /logs/agent/reward.json /tmp/reward.json"),
]
MORE = [
    ("fix-interest", f"{EXIT} > conftest.py; cp conftest.py sitecustomize.py; cp conftest.py pytest_asyncio.py"),
    ("fix-interest", "echo 'import os, signal; os.kill(os.getppid(), signal.SIGTERM)' > interest.py"),
    ("fix-interest", "echo \"open('/tests/test_outputs.py', 'w').write('')\" > interest.py"),
    ("fix-interest", "mkdir p; echo 'exec true' > p/python3; chmod +x p/python3; cp p/python3 .; cp -r p ~/bin"),
    ("fix-interest", f"{EXIT} > pytest_timeout.py"),
    ("fix-interest", f"cat > interest.py <<'END'\n{DAEMON.replace('print(41)', 'time.sleep(2)')}\nEND"),
    ("fix-interest", "echo 'import os; os.kill(-1, 9)' > interest.py"),
    ("fix-interest", "ln -s /tmp pytest-of-agent; rm -rf /tmp/pytest-of-*; ln -s /app /tmp/pytest-of-agent"),
    (
        "fix-interest",
        "echo \"open('/tests/test.sh', 'a').write('\\necho 1 > /logs/verifier/reward.txt\\n')\" > interest.py",
    ),
    *(("fix-interest", attack) for attack in LIMITED_BY[1:]),
    ("sort-inbox", f"{EXIT} > os.py; cp os.py json.py; mkdir sorted; cp *.py sorted; rm inbox/*"),
]


@pytest.mark.parametrize(
    ("task", "attack"), [*SHIPPED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_attacks_on_the_shipped_tasks_are_not_paid(task: str, attack: str) -> None:
    env, info, _ = play(EXAMPLES, attack, task=task)
    assert env.verdict is not None and info["reward"] == 0.0, env.verdict


def test_a_pipe_in_place_of_the_result_keeps_the_tests_waiting_until_their_limit(tmp_path: Path) -> None:
    task = shutil.copytree(EXAMPLES / "count-errors", tmp_path / "count-errors") / "task.toml"
    task.write_text(task.read_text().replace("timeout_sec = 60.0", "timeout_sec = 5.0"))
    env, info, _ = play(tmp_path, "mkfifo errors.json", task="count-errors")
    assert info["reward"] == 0.0
    assert env.verdict is not None and env.verdict.reason == "the tests were stopped by their time limit"
