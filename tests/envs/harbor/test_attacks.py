"""Attacks that were written from the docs, by someone who had not read the judge."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slime_verlog
from envs.errors import ConfigError
from envs.harbor.images.build import build_image
from envs.harbor.settings import HarborSettings
from envs.harbor.task import recipe_of
from tests.cases import some
from tests.envs.harbor.attacks import DOCKERFILE, PAYS
from tests.envs.harbor.task_folders import make_image, make_task, needs_buildah, play
from tests.envs.swe.tiny_repository import needs_sandbox

ASKS = """
if [ "$(timeout 9 python3 /app/solution.py)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
sleep 3
true
"""
"""Tests that go on after they wrote the reward, and end well whatever happened to it."""
CHECKS = f"cd /app; /usr/bin/python3 solution.py > /tmp/out; /usr/bin/python3 /tests/check.py{PAYS}"
CHECK = "import sys\nsys.exit(open('/tmp/out').read() != '42\\n')\n"
DAEMON = """
import fcntl, os, signal, struct, time
R = "/logs/verifier/reward.txt"
def write():
    fd = os.open(R, os.O_RDWR | os.O_TRUNC)
    os.write(fd, b"1")
    return fd
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
"""
WAIT = "    time.sleep(8)\n    os._exit(0)\ntime.sleep(0.5)\nprint(41)\n"
PROGRAMS = {
    "opens the file until the watch's queue is full, and writes": (
        ASKS,
        """
    events, other = 3 * int(open("/proc/sys/fs/inotify/max_queued_events").read()), R.replace("txt", "json")
    if not os.fork() or not os.fork():
        for _ in range(events):
            os.close(os.open(R, os.O_RDONLY)), os.close(os.open(other, os.O_RDONLY))
        os._exit(0)
    for _ in range(100):
        time.sleep(0.03)
        os.close(write())
""",
    ),
    "writes, and takes the right to write by an access list": (
        ASKS,
        """
    entries = b"".join(struct.pack("<HHI", tag, 4, 0xFFFFFFFF) for tag in (1, 4, 32))
    write(), os.setxattr(R, "system.posix_acl_access", struct.pack("<I", 2) + entries)
""",
    ),
    "writes, and holds a lease": (
        ASKS,
        "    signal.signal(29, signal.SIG_IGN), fcntl.fcntl(write(), 1024, 1)\n",
    ),
    "writes, and stops all processes": (
        ASKS,
        "    write()\n    while True: [os.kill(p, 19) for p in range(2, 99) if p != os.getpid() "
        "and os.path.exists(f'/proc/{p}')]\n",
    ),
    "plants modules in the tests' home": (
        CHECKS,
        """
    os._exit(0)
import site
home = site.getusersitepackages()
os.makedirs(home, exist_ok=True)
for name in ("usercustomize.py", "sitecustomize.py"):
    open(f"{home}/{name}", "w").write("import os, sys; 'check.py' in str(sys.orig_argv) and os._exit(0)")
open(f"{home}/x.pth", "w").write("import usercustomize")
if True:
""",
    ),
}


@pytest.mark.parametrize("name", some(PROGRAMS, [*PROGRAMS][1::3]))
def test_a_program_under_test_is_not_paid_and_does_not_stall_the_judge(
    tmp_path: Path, name: str
) -> None:
    test, attack = PROGRAMS[name]
    toml = "[verifier]\ntimeout_sec = 12.0\n"
    make_task(
        tmp_path, test=test, files={"tests/check.py": CHECK}, dockerfile=DOCKERFILE, toml=toml
    )
    began = time.monotonic()
    env, info, _ = play(tmp_path, f"cat > solution.py <<'END'\n{DAEMON}{attack}{WAIT}\nEND")
    assert info["reward"] == 0.0 and time.monotonic() - began < 60, env.verdict


LINKS = """
/usr/../tests/x /usr/share/../../tests/x system/../tests/x lib/../../tests/x top/tests/x deep/er/tests/x ../tests/x
/logs/verifier/../../tests/x /dev/fd/../cwd/tests/x /proc/thread-self/root/tests/x /etc/alternatives/../../tests/x
"""


def test_chains_of_links_through_the_system_do_not_reach_the_tests(tmp_path: Path) -> None:
    test = f"! cmp -s /tests/x /app/o* && for f in /app/o*; do cmp /tests/x $f && exit 1; done; true{PAYS}"
    make_task(tmp_path, test=test, files={"tests/x": "secret"}, dockerfile=DOCKERFILE)
    links = "ln -s /usr system; ln -s /lib lib; ln -s /usr/.. top; mkdir -p deep/er; ln -s ../../../tests deep/er/tests"
    env, info, _ = play(
        tmp_path,
        links,
        f"for target in {' '.join(LINKS.split())}; do ln -s $target o$((n++)); done",
    )
    assert info["reward"] == 1.0, env.verdict


LINES = [
    "RUN --mount=type=bind,source=/,target=/host cat /host{secret} > /x",
    "RUN --mount=type=cache,source={folder},target=/host cat /host/secret > /x",
    "RUN --security=insecure cat /proc/1/root{secret} > /x",
    "RUN for p in /proc/[0-9]*; do cat $p/root{secret} $p/cwd{secret} $p/environ; done > /x; true",
    "COPY --from=dir:{folder} secret /x",
    "COPY --from=tiny {secret} /x",
    "ADD file://{secret} /x",
    "WORKDIR {folder}\nRUN cat secret > /x; true",
]


@pytest.mark.parametrize("line", some(LINES, LINES[::4]))
def test_a_line_of_a_dockerfile_reads_no_file_of_this_machine(tmp_path: Path, line: str) -> None:
    needs_buildah()
    base, secret = make_image(tmp_path / "base", "bash", "cat"), tmp_path / "outside" / "secret"
    (base / "bin" / "sh").symlink_to("bash")
    secret.parent.mkdir()
    secret.write_text("private text")
    task = make_task(
        tmp_path, dockerfile=f"FROM tiny\n{line.format(folder=secret.parent, secret=secret)}\n"
    )
    settings = HarborSettings(images=str(tmp_path / "images"), base_sources={"tiny": str(base)})
    try:
        build_image(recipe_of(task), settings, lambda text: None)
    except ConfigError as error:
        assert "private text" not in str(error)
    found = subprocess.run(
        ["grep", "-rl", "private text", tmp_path / "images"], capture_output=True, check=False
    )
    assert found.stdout == b""


INSTALLED = """
from envs.harbor.settings import EXAMPLES
from envs.loading import build_env_from
env = build_env_from("envs.harbor", {"task": "fix-interest", "seed": 0}, {})
env.reset()
print(EXAMPLES, (EXAMPLES / "fix-interest" / "solution").is_dir())
print(env.step(f"ACTION: run ls -R {EXAMPLES} {EXAMPLES}/../../swe")[0]["obs_str"])
"""


def test_the_package_in_the_interpreters_folders_does_not_show_its_tests(tmp_path: Path) -> None:
    """As `pip install slime-verlog` puts it there, and not as an editable installation."""
    needs_sandbox()
    tmp_path.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    repository = Path(slime_verlog.__file__).parent
    shutil.copytree(
        repository / "envs", packages / "envs", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(repository / "slime_verlog.py", packages)
    paths = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    variables = {**os.environ, "PYTHONPATH": paths}
    argv = [tmp_path / "venv" / "bin" / "python", "-c", INSTALLED]
    done = subprocess.run(
        argv, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f"{packages}/envs/harbor/examples True\n"), done.stderr
    shown = done.stdout.partition("\n")[2]
    assert "run ls -R" in shown and "solve.sh" not in shown and "small_tasks.yaml" not in shown
