"""A bubblewrap sandbox around one working tree: no network, a read-only system, bounded in every
resource.

The command sees `/testbed` (the tree), `/usr`, the Python that runs the tests, its own `/tmp`,
`/proc` and `/dev`, but none of the trainer's other files, environment variables or processes.
`places` shows parts of the tree elsewhere, and `root` takes system and Python from an image.

The layers around the command have an empty environment and find their tools by absolute paths. The
command's variables are set by the innermost layer alone, so nothing that they name is run or loaded
with rights.
"""

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.errors import ConfigError, EnvironmentFault, MissingDependencyError
from envs.swe.sandbox.filters import filters
from envs.swe.sandbox.groups import ONE_USER, say_once
from envs.swe.sandbox.supervise import FILTERS, Limits, Outcome, supervise
from envs.swe.sandbox.usage import tree_bytes
from envs.swe.sandbox.workspace import AGENT_ID, TESTBED, per_process, process_folder, user_of

WRITABLE_TREE = ((".", TESTBED),)
_TOOLS = "/usr/bin:/bin:/usr/local/bin"
"""Where this machine's own tools are searched: what the sandbox shows of it."""
_IMAGE = "/image"
"""Where an image is put together before it becomes the root."""
_OWN = Path(__file__).resolve().parents[2]
"""The package `envs`, which holds tests and solutions of our tasks."""


@dataclass(frozen=True)
class Sandbox:
    """Where commands run: the tree, the Python beside it, what may be read besides, and the
    limits."""

    tree: Path
    python: Path = Path(sys.executable)
    limits: Limits = field(default_factory=Limits)
    readable: tuple[tuple[Path, str], ...] = ()
    """Pairs of a file outside and the place where it shows inside, read-only."""
    variables: tuple[tuple[str, str], ...] = ()
    writable_tree: bool = True
    fixed_addresses: bool = False
    """Load programs at the same addresses each time, so that what they print of them can be
    reproduced."""
    places: tuple[tuple[str, str], ...] = WRITABLE_TREE
    """Pairs of a folder of the tree, which commands cannot replace, and the place where it shows
    inside."""
    folder: str = TESTBED
    """Where commands start."""
    root: Path | None = None
    """Folder with an image's files; they take the place of this machine's system and of
    `python`."""
    is_verdict: bool = False
    """Refuse `ptrace` and what else would let a tested program change the process that judges
    it."""

    def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        seconds: float | None = None,
        stop: threading.Event | None = None,
        with_report: bool = False,
    ) -> Outcome:
        """Run a command in the tree; nothing of it is alive afterwards. See `supervise` about the
        arguments."""
        limits = self.limits if seconds is None else replace(self.limits, seconds=seconds)
        programs = filters(self.is_verdict)
        return supervise(
            self.command(argv),
            programs,
            limits,
            lambda: tree_bytes(self.tree),
            stdin,
            with_report,
            stop,
        )

    def command(self, argv: Sequence[str]) -> list[str]:
        """The whole command line: namespaces and mounts, a user without rights, limits, filters,
        then `argv`."""
        bwrap = find_bwrap()
        setpriv = find_tool("setpriv")
        spaces = [
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        outer = [bwrap, *spaces, "--die-with-parent", "--new-session"]
        if os.geteuid() == 0:
            # Mounting as root reaches a Python below /root.
            number = user_of(self.tree)
            drop = [
                setpriv,
                f"--reuid={number}",
                f"--regid={number}",
                "--clear-groups",
                "--bounding-set=-all",
            ]
            drop += ["--inh-caps=-all", "--no-new-privs"]
        else:
            outer.append("--unshare-user")
            drop = []
        outer += self._mounts() if self.root is None else self._image_mounts(self.root)
        inner = [
            bwrap,
            "--unshare-user",
            "--uid",
            str(AGENT_ID),
            "--gid",
            str(AGENT_ID),
            "--cap-drop",
            "ALL",
        ]
        # The image may lack these tools, so they are taken from this machine before the image
        # becomes the root.
        inner += ["--die-with-parent", "--dev-bind", "/" if self.root is None else _IMAGE, "/"]
        # No process writes into another one's memory through /proc.
        inner += ["--remount-ro", "/proc", FILTERS]
        inner += ["--chdir", self.folder, *self._variables()]
        addresses = [find_tool("setarch"), "--addr-no-randomize"] if self.fixed_addresses else []
        return [*outer, *drop, *addresses, *inner, *argv]

    def _mounts(self) -> list[str]:
        mounts = [*system_mounts(), *self._own_files()]
        shown = [(path, str(path)) for path in python_folders(self.python)]
        own = zip(_system_files(), ("/etc/hosts", "/etc/passwd"), strict=True)
        mounts += _read_only((*shown, *own, *self.readable))
        mounts += self._tree()
        for part in python_in((place for _, place in self.places), self.python):
            inside = [(path, place) for path, place in shown if path.is_relative_to(part)]
            # Not listable, so that `rm -rf /tmp/*` says one sentence about it and not one for each
            # file.
            mounts += [
                "--perms",
                "0111",
                "--tmpfs",
                str(part),
                *_read_only(inside),
                "--remount-ro",
                str(part),
            ]
        if any(_OWN.is_relative_to(folder) for folder in ("/usr", *python_folders(self.python))):
            mounts += ["--perms", "0111", "--tmpfs", str(_OWN), "--remount-ro", str(_OWN)]
        return [*mounts, "--remount-ro", "/dev", "--remount-ro", "/"]

    def _image_mounts(self, root: Path) -> list[str]:
        """This machine's system, and below `_IMAGE` what the command will see."""
        # The second bwrap needs a folder /tmp before it starts.
        mounts = [*system_mounts(), "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
        mounts += ["--perms", "0755", "--tmpfs", _IMAGE]
        # Places are mounted instead of what the image has there, and inside of it where it has such
        # a folder.
        missing = (
            Path(place).parts for _, place in self.places if not (root / place.lstrip("/")).is_dir()
        )
        hidden = {parts[1] for parts in missing} | {
            place[1:] for _, place in (*self.places, *self.readable)
        }
        for entry in sorted(root.iterdir()):
            if entry.name in hidden | {"proc", "dev", "tmp", "sys"}:
                continue
            if entry.is_symlink():
                mounts += ["--symlink", os.readlink(entry), f"{_IMAGE}/{entry.name}"]
            elif entry.is_dir():
                mounts += ["--ro-bind", str(entry), f"{_IMAGE}/{entry.name}"]
        hosts = root / "etc" / "hosts"  # empty in most images, because docker mounts its own there
        is_direct = (
            hosts.is_file()
            and Path(os.path.realpath(hosts)) == Path(os.path.realpath(root)) / "etc" / "hosts"
        )
        known = [(_system_files()[0], "/etc/hosts")] if is_direct else []
        mounts += [
            *self._own_files(_IMAGE),
            *_read_only((*known, *self.readable), _IMAGE),
            *self._tree(_IMAGE),
        ]
        return [*mounts, "--remount-ro", f"{_IMAGE}/dev", "--remount-ro", _IMAGE]

    def _own_files(self, at: str = "") -> list[str]:
        tmp = ["--perms", "1777", "--size", str(self.limits.tmp_mb << 20), "--tmpfs"]
        # The order matters: a tmpfs hides what was bound below it before.
        return [
            "--proc",
            f"{at}/proc",
            "--dev",
            f"{at}/dev",
            *tmp,
            f"{at}/dev/shm",
            *tmp,
            f"{at}/tmp",
        ]

    def _tree(self, at: str = "") -> list[str]:
        mounts: list[str] = []
        for part, place in self.places:
            bind = "--bind" if self.writable_tree else "--ro-bind"
            mounts += [*_parents(Path(place), at), bind, str(self.tree / part), at + place]
        return mounts

    def _variables(self) -> list[str]:
        variables = {
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "USER": "agent",
            "LOGNAME": "agent",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONHASHSEED": "0",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "GIT_PAGER": "cat",
            "PAGER": "cat",
            **dict(self.variables),
        }
        return [
            "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        ]


def system_mounts() -> list[str]:
    """This machine's programs, read-only."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            mounts += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            mounts += ["--ro-bind", name, name]
    for path in (Path("/etc/ld.so.cache"), Path("/etc/alternatives")):
        mounts += [*_parents(path), "--ro-bind-try", str(path), str(path)]
    return mounts


def _parents(path: Path, at: str = "") -> list[str]:
    """Folders on the way to `path`, open to the agent's user whatever they are outside."""
    return [
        w
        for parent in reversed(path.parents[:-1])
        for w in ("--perms", "0755", "--dir", f"{at}{parent}")
    ]


def _read_only(shown: Iterable[tuple[Path, str]], at: str = "") -> list[str]:
    return [
        w
        for path, place in shown
        for w in (*_parents(Path(place), at), "--ro-bind", str(path), at + place)
    ]


@per_process
def _system_files() -> tuple[Path, Path]:
    """Files that say where localhost is and who the commands' user is; Node's `os.userInfo()` fails
    without a user."""
    folder = process_folder().make()
    hosts = folder / "hosts"
    passwd = folder / "passwd"
    hosts.write_text(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n", encoding="utf-8"
    )
    passwd.write_text(f"agent:x:{AGENT_ID}:{AGENT_ID}::/tmp:/bin/sh\n", encoding="utf-8")
    for path in (hosts, passwd):
        path.chmod(0o644)
    return hosts, passwd


@functools.lru_cache(maxsize=32)
def python_folders(python: Path) -> tuple[Path, ...]:
    """Folders that `python` needs besides /usr: environment and installation; raises ConfigError if
    it does not run.

    If links lead to the environment, it shows in its real place as well, which the first lines of
    its scripts name.
    """
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"env.python: {python} does not run: {error}") from error
    folders = {Path(line) for line in done.stdout.splitlines()} | {
        Path(os.path.realpath(python)).parent.parent
    }
    folders |= {folder.resolve() for folder in folders}
    outside = sorted(f for f in folders if not f.is_relative_to("/usr"))
    return tuple(f for f in outside if not any(f != g and f.is_relative_to(g) for g in outside))


def python_in(places: Iterable[str], python: Path) -> tuple[Path, ...]:
    """Entries of `places`, or places, that hold a folder of `python`. They show Python and nothing
    else."""
    found = [
        (f, place) for place in places for f in python_folders(python) if f.is_relative_to(place)
    ]
    return tuple(
        sorted({Path(place, *folder.relative_to(place).parts[:1]) for folder, place in found})
    )


def find_bwrap() -> str:
    """Return bubblewrap's path; raises MissingDependencyError as `find_tool`."""
    return find_tool("bwrap", "bubblewrap")


@functools.lru_cache(maxsize=8)
def find_tool(name: str, package: str = "util-linux") -> str:
    """Return the path of one of this machine's tools; raises MissingDependencyError if it is
    missing."""
    found = shutil.which(name, path=_TOOLS)
    if found is None:
        raise MissingDependencyError(
            f"these tasks need {package}, and there is no {name} in {_TOOLS}; install it with: "
            f"apt-get install -y {package}"
        )
    return found


@functools.lru_cache(maxsize=32)
def check_sandbox(sandbox: Sandbox) -> None:
    """Start the sandbox once and do nothing in it; one that has started is not started again.

    Raises:
        MissingDependencyError: no bubblewrap, or no pyseccomp.
        EnvironmentFault: the machine does not let bubblewrap make namespaces, as in most
            unprivileged containers.
    """
    filters(sandbox.is_verdict)
    if os.geteuid() != 0:
        say_once(ONE_USER)
    outcome = sandbox.run(["bash", "-c", ":"], seconds=30)
    if outcome.returncode != 0:
        raise EnvironmentFault(
            "bubblewrap cannot build its sandbox here: "
            f"{outcome.output.strip() or outcome.stopped}; a container must be started with "
            "--privileged, or, if its user is not root, with --security-opt seccomp=unconfined"
        )
