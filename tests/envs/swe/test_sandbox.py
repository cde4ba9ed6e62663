"""The sandbox, attacked for real: what a command can reach, and how much it can use."""

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.errors import ConfigError, MissingDependencyError
from envs.swe.sandbox.sandbox import Sandbox, find_bwrap, find_tool, python_folders
from envs.swe.sandbox.supervise import Limits, Outcome
from envs.swe.sandbox.workspace import hand_over
from tests.envs.swe.tiny_repository import needs_sandbox
from tests.envs.users import as_a_user, open_way

LIMITS = Limits(
    seconds=20, memory_mb=400, processes=40, file_mb=4, tree_mb=16, tmp_mb=8, output_mb=2
)


def shell(tree: Path, script: str, limits: Limits = LIMITS, **options: Any) -> Outcome:
    return Sandbox(tree, limits=limits, **options).run(["bash", "-c", script])


def python(tree: Path, code: str) -> Outcome:
    return Sandbox(tree, limits=LIMITS).run(["python", "-c", code])


def test_a_command_runs_in_the_tree_and_tells_its_exit_status(tree: Path) -> None:
    outcome = shell(tree, "pwd; echo new > file; exit 7")
    assert (outcome.output, outcome.returncode, outcome.stopped) == ("/testbed\n", 7, "")
    assert (tree / "file").read_text() == "new\n"


def test_programs_find_the_name_and_home_of_their_user(tree: Path) -> None:
    outcome = python(
        tree, "import pwd, os; print(pwd.getpwuid(os.getuid())[0::5], len(pwd.getpwall()))"
    )
    assert outcome.output == "('agent', '/tmp') 1\n", "and no user of the machine"


def test_there_is_no_network(tree: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53), ("example.com", 80)):
    try:
        socket.create_connection(address, 2)
        print("reached", address)
    except OSError:
        pass
print([name for _, name in socket.if_nameindex()])
"""
        outcome = python(tree, code)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.output == "['lo']\n"


def test_localhost_is_the_sandbox_itself(tree: Path) -> None:
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(("localhost", server.getsockname()[1]), 2)
print("reached")
"""
    assert python(tree, code).output == "reached\n"


def test_nothing_outside_of_the_tree_can_be_written(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.write_text("safe")
    places = f"/x /usr/x /etc/x /dev/x /proc/x /root/x /home/x /var/x {sys.prefix}/x {outside} ../x /sys/x"
    outcome = shell(
        tree, f"for f in {places}; do (echo bad > $f) 2>/dev/null && echo wrote $f; done; true"
    )
    assert outcome.output == ""
    assert outside.read_text() == "safe"
    assert not [name for name in os.listdir("/") if name == "x"]


def test_files_of_the_machine_are_not_there(tree: Path) -> None:
    names = {"/etc/shadow", "/home", "/var", "/sys", "/run", "/mnt", "/srv", "/opt", "/boot"}
    names -= {str(way) for folder in python_folders(Path(sys.executable)) for way in folder.parents}
    readme = Path(__file__).parents[3] / "README.md"
    assert shell(tree, f"ls -d {' '.join(names)} {tree.parent} {readme} 2>/dev/null").output == ""


def test_our_environment_variables_and_processes_are_not_there(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    outcome = shell(tree, "env; cat /proc/*/environ | tr '\\0' '\\n'; ls /proc | grep -c '^[0-9]'")
    assert "hunter2" not in outcome.output
    assert int(outcome.output.split()[-1]) < 10


def test_links_out_of_the_tree_lead_nowhere(tree: Path) -> None:
    secret = tree.parent / "secret"
    secret.write_text("hunter2")
    (tree / "link").symlink_to(secret)
    assert "hunter2" not in shell(tree, "cat link").output
    shell(tree, "echo bad > link; ln -s / root; echo bad > root/etc/hostname")
    assert secret.read_text() == "hunter2"


@pytest.mark.parametrize("variable", ["PATH", "LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_variables_of_the_task_reach_the_command_alone(tree: Path, variable: str) -> None:
    """Programs and libraries that the agent plants must not run in the layers that build the
    sandbox."""
    plant = "#!/bin/bash\n{ cat /proc/self/uid_map; grep CapEff /proc/self/status; } >> /testbed/proof\n"
    for tool in ("bwrap", "setpriv", "prlimit", "setarch", "sh"):
        (tree / tool).write_text(f'{plant}exec /usr/bin/{tool} "$@"\n')
        (tree / tool).chmod(0o755)
    (tree / "libc.so.6").write_text("no library")
    hand_over(tree)
    value = {
        "PATH": "/testbed:/usr/bin",
        "LD_PRELOAD": "/testbed/libc.so.6",
        "LD_LIBRARY_PATH": "/testbed",
    }[variable]
    box = Sandbox(tree, limits=LIMITS, variables=((variable, value),), fixed_addresses=True)
    outcome = box.run(["/bin/bash", "-c", f"echo ${variable}"])
    assert not (tree / "proof").exists()
    # The dynamic linker of the command itself obeys the variables, and complains about the planted
    # library.
    assert value in outcome.output or "libc.so.6" in outcome.output


def test_each_sandbox_has_a_user_of_its_own(tree: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root, all sandboxes run as the trainer's user")
    other = tmp_path / "other"
    other.mkdir()
    hand_over(other)
    assert tree.stat().st_uid != other.stat().st_uid
    hand_over(other)
    (tree / "mine").write_text("")
    hand_over(tree)
    assert (tree / "mine").stat().st_uid == tree.stat().st_uid
    outcome = shell(other, "stat -c %u .; touch new; id -u; kill -9 -1; echo alive")
    assert outcome.output.startswith("60999\n60999\n")
    assert (other / "new").stat().st_uid == other.stat().st_uid


def test_no_rights_can_be_gained(tree: Path) -> None:
    outcome = shell(
        tree,
        "grep -E 'Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status; unshare -Ur id; mount -t tmpfs "
        "x /tmp",
    )
    words = outcome.output.split()
    assert words[1::2][:4] == ["0" * 16] * 3 + ["1"]
    assert "uid=0" not in outcome.output and outcome.returncode != 0


def test_a_fork_bomb_is_held_and_gone_afterwards(tree: Path) -> None:
    outcome = shell(tree, ":(){ :|:& };:; sleep 1; echo still here")
    assert "Resource temporarily unavailable" in outcome.output


def test_nothing_is_alive_once_a_command_has_returned(tree: Path) -> None:
    marker = "sleep 86399"
    script = f"for i in 1 2 3 4; do setsid {marker} >/dev/null 2>&1 </dev/null & done; (nohup {marker} &) 2>/dev/null"
    for _ in range(10):
        assert shell(tree, script).returncode == 0
        assert not _running(marker)


def _running(command: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if words == command:
            found.append(path.parent.name)
    return found


def test_an_endless_loop_is_stopped_with_everything_it_started(tree: Path) -> None:
    script = "sleep 86398 & exec >/dev/null 2>&1; trap '' TERM INT HUP; while :; do :; done"
    outcome = shell(tree, script, limits=Limits(seconds=1))
    assert outcome.stopped == "time"
    assert not _running("sleep 86398")


def test_one_process_cannot_take_more_memory_than_allowed(tree: Path) -> None:
    outcome = python(tree, "bytearray(600 << 20)")
    assert "MemoryError" in outcome.output and not outcome.stopped


def test_disk_is_bounded_file_by_file_in_sum_and_in_tmp(tree: Path) -> None:
    outcome = shell(tree, "head -c 9000000 /dev/zero > big; stat -c %s big; rm big")
    assert "4194304" in outcome.output
    filling = "for i in $(seq 20); do head -c 3000000 /dev/zero > {}/f$i; done; sleep 2; echo end"
    assert shell(tree, filling.format(".")).stopped == "disk"
    shutil.rmtree(tree)
    tree.mkdir()
    hand_over(tree)
    for folder in ("/tmp", "/dev/shm"):
        outcome = shell(tree, filling.format(folder))
        assert "No space left" in outcome.output and outcome.output.endswith("end\n"), folder


def test_empty_files_count_against_the_disk_limit(tree: Path) -> None:
    assert shell(tree, "mkdir {a..z}; touch {a..z}/{1..200}; sleep 2").stopped == "disk"


def test_nothing_can_be_hidden_from_the_disk_limit_by_depth(tree: Path) -> None:
    code = "import os, time\nfor _ in range(2200):\n    os.mkdir('d')\n    os.chdir('d')\ntime.sleep(10)"
    assert python(tree, code).stopped == "disk"
    assert shell(tree, "echo hello").stopped == "disk"


def test_a_tree_that_is_too_big_already_may_be_made_smaller(tree: Path) -> None:
    (tree / "big").write_bytes(b"x" * (20 << 20))
    hand_over(tree)
    assert shell(tree, "ls; sleep 0.3").stopped == ""
    assert shell(tree, "head -c 1000000 /dev/zero > more; sleep 1").stopped == "disk"
    assert shell(tree, "rm big; sleep 0.3").stopped == ""


def test_endless_output_is_stopped_and_only_its_ends_are_kept(tree: Path) -> None:
    outcome = shell(tree, "echo first; yes")
    assert outcome.stopped == "output"
    assert len(outcome.output) < 3 * LIMITS.keep_bytes
    outcome = shell(tree, "seq 100000")
    assert outcome.output.startswith("1\n2\n") and outcome.output.endswith("99999\n100000\n")
    assert "bytes left out" in outcome.output


def test_a_read_only_tree_stays_as_it_is(tree: Path) -> None:
    outcome = shell(tree, "touch file; mkdir folder; ls -A", writable_tree=False)
    assert "Read-only" in outcome.output and not list(tree.iterdir())


def test_stdin_is_given_once_and_large_inputs_do_not_block(tree: Path) -> None:
    data = b"x" * 1_000_000
    box = Sandbox(tree, limits=LIMITS)
    assert box.run(["wc", "-c"], stdin=data).output.strip() == "1000000"
    assert box.run(["true"], stdin=data).returncode == 0
    assert (
        box.run(["bash", "-c", "read fd; cat >&$fd"], b"hello", with_report=True).report == b"hello"
    )


def test_a_process_sets_its_own_resource_limits_and_not_those_of_others(tree: Path) -> None:
    code = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
child = os.fork() or signal.pause()
try:
    resource.prlimit(child, resource.RLIMIT_NOFILE, (50, 50))
except PermissionError:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
os.kill(child, 9)
"""
    assert python(tree, code).output == "100\n"


def test_a_missing_bubblewrap_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    find_tool.cache_clear()
    with pytest.raises(MissingDependencyError, match="apt-get install -y bubblewrap"):
        find_bwrap()
    find_tool.cache_clear()


def test_a_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.python.*does not run"):
        python_folders(tmp_path / "python")


def test_the_same_holds_where_we_are_not_root(tmp_path: Path) -> None:
    """The sandbox has two ways to be built; the suite usually runs as one kind of user only."""
    needs_sandbox()
    open_way(tmp_path)

    def work() -> None:
        Path("tree").mkdir()
        box = Sandbox(tmp_path / "tree", Path("/usr/bin/python3"), LIMITS)
        rights = box.run(["bash", "-c", "id -u; touch /x /usr/x mine; unshare -Ur id; ulimit -n"])
        bomb = box.run(["bash", "-c", ":(){ :|:& };:; sleep 1; echo still here"])
        Path("said").write_text(f"{rights.output}\n{bomb.output}")

    as_a_user(tmp_path, work)
    said = (tmp_path / "said").read_text()
    assert (
        said.startswith("60999\n")
        and said.count("Read-only") == 2
        and "uid=0" not in said
        and "\n1024\n" in said
    )
    assert "temporarily unavailable" in said and (tmp_path / "tree" / "mine").exists()
