"""Builds the trees that tests run in: a commit's files, the tests' patch, and of the agent's
changes what counts.

Invariant: the agent's tree is read as plain bytes, without links, pipes, devices, caches and git
data.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.errors import ConfigError, MissingDependencyError
from envs.swe.sandbox.usage import walk
from envs.swe.sandbox.workspace import copy_tree, process_folder, read_plain, remove_tree
from envs.swe.verdict.instances import Instance
from envs.swe.verdict.reports import NotCounted

MAX_FILES = 2000
MAX_BYTES = 32 << 20
Build = Callable[[Path], None]

_CONFIGURATION = re.compile(
    r"conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py|\.coveragerc"
)
_NEVER_FOLDERS = frozenset((".git", "__pycache__", ".pytest_cache", ".hypothesis"))
_NEVER_ENDINGS = (".pyc", ".pyo", ".pth", ".egg-link")
_TEST_NAME = re.compile(r"test_.*\.py|.*_tests?\.py|tests?\.py")
_IDENTITY = {
    "NAME": "slime-verlog",
    "EMAIL": "none@example.invalid",
    "DATE": "2000-01-01T00:00:00+0000",
}


@dataclass(frozen=True)
class Change:
    """New content of one file; None where it was deleted."""

    content: bytes | None
    executable: bool = False


def default_cache() -> Path:
    """Where pristine trees and fetched packages are kept unless `cache_dir` says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "slime-verlog", "swe")


def git(
    *arguments: str, cwd: Path, extra: dict[str, str] | None = None, stdin: str | None = None
) -> str:
    """Run git without hooks and the user's settings; raises ConfigError, with git's message, if it
    refuses."""
    env = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(cwd.parent),
        "LC_ALL": "C",
        **(extra or {}),
    }
    argv = ["git", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, input=stdin, capture_output=True, encoding="utf-8", check=False
        )
    except FileNotFoundError as error:
        raise MissingDependencyError(
            "SWE tasks need git; install it with: apt-get install -y git"
        ) from error
    if done.returncode != 0:
        raise ConfigError(f"git {arguments[0]} in {cwd}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def commit_all(tree: Path) -> str:
    """Make the tree a repository of one commit, whose id depends on the files alone; return the
    id."""
    git("init", "-q", "-b", "main", "--template=", ".", cwd=tree)
    git("add", "-A", "-f", ".", cwd=tree)
    identity = {
        f"GIT_{who}_{key}": value
        for who in ("AUTHOR", "COMMITTER")
        for key, value in _IDENTITY.items()
    }
    git(
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "The repository as it was found",
        cwd=tree,
        extra=identity,
    )
    return git("rev-parse", "HEAD", cwd=tree).strip()


def pristine_tree(repository: Path, commit: str, cache: Path) -> Path:
    """Return a commit's files as a repository of one commit, from the cache or the clone; raises as
    `git`."""
    if not repository.is_dir():
        raise ConfigError(
            f"env.repos: {repository} is not a folder; clone the repository there first"
        )
    key = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", repository.name)
    target = cache / "trees" / f"{name}-{key}-{re.sub('[^A-Za-z0-9]', '_', commit)[:40]}"
    with building(target) as scratch:
        if scratch is not None:
            # checkout-index writes the files alone: no work tree, no hooks, no export-ignore.
            index = {"GIT_INDEX_FILE": f"{scratch}.index"}
            git("read-tree", f"{commit}^{{commit}}", cwd=repository, extra=index)
            scratch.mkdir()
            git("checkout-index", "-a", f"--prefix={scratch}/", cwd=repository, extra=index)
            os.unlink(index["GIT_INDEX_FILE"])
            commit_all(scratch)
    return target


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Hold the lock of `target`; yield a scratch path that becomes it, or None if it is there
    already."""
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        scratch = target.with_name(target.name + ".tmp")
        remove_tree(scratch)
        yield scratch
        os.rename(scratch, target)


def build_tree(
    target: Path, pristine: Path, test_patch: str = "", changes: Mapping[str, Change] = {}
) -> None:
    """Make a tree with the pristine files, the tests' patch and changes, without git's data; raises
    as `git`."""
    copy_tree(pristine, target)
    remove_tree(target / ".git")
    if test_patch.strip():
        text = test_patch if test_patch.endswith("\n") else test_patch + "\n"
        git("apply", "--whitespace=nowarn", "-", cwd=target, stdin=text)
    apply_changes(target, changes)


def collect_changes(tree: Path, pristine: Path) -> Mapping[str, Change]:
    """Files that differ between the agent's tree and the pristine one, by relative path.

    A file of the same size and time as the pristine one counts as unchanged. Raises NotCounted past
    `MAX_FILES` files or `MAX_BYTES` bytes.
    """
    changes: dict[str, Change] = {}
    before = dict(_plain_files(pristine))
    after = dict(_plain_files(tree))
    room = MAX_BYTES
    for path, status in after.items():
        old = before.get(path)
        if old and (old.st_size, old.st_mtime_ns, old.st_mode) == (
            status.st_size,
            status.st_mtime_ns,
            status.st_mode,
        ):
            continue
        room -= status.st_size
        if room < 0 or len(changes) >= MAX_FILES:
            raise NotCounted(f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB were changed")
        change = _read_change(tree / path, status)
        if old is None or change.content is None or change != _read_change(pristine / path, old):
            changes[path] = change
    return changes | {path: Change(None) for path in before.keys() - after.keys()}


def _read_change(path: Path, status: os.stat_result) -> Change:
    try:
        content = read_plain(path, status.st_size)
    except OSError:
        content = None
    return Change(content, content is not None and bool(status.st_mode & stat.S_IXUSR))


def _plain_files(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below `tree` that could belong to a patch; links are not followed."""
    for seen, entry in enumerate(walk(tree, _NEVER_FOLDERS)):
        if seen >= 100 * MAX_FILES:
            raise NotCounted(f"the repository holds more than {100 * MAX_FILES} files")
        if entry.is_file(follow_symlinks=False) and not entry.name.endswith(_NEVER_ENDINGS):
            yield entry.path.removeprefix(f"{tree}/"), entry.stat(follow_symlinks=False)


@functools.lru_cache(maxsize=256)
def patched_files(patch: str) -> frozenset[str]:
    """Paths that a unified diff touches."""
    names = re.findall(r"^(?:\+\+\+ b|--- a)/(.*)$", patch, flags=re.MULTILINE)
    return frozenset(name.split("\t")[0].strip() for name in names)


def is_readable(test: str, instance: Instance, pristine: Path) -> bool:
    """Whether the agent can read a test: its file is in the tree and the tests' patch does not
    touch it."""
    path = test.split("::", 1)[0]
    return path not in patched_files(instance.test_patch) and (pristine / path).exists()


def is_protected(path: str, instance: Instance) -> bool:
    """Whether a file is judged as we have it: what configures tests, and tests that the reference
    leaves alone."""
    pure = PurePosixPath(path)
    ours = _test_files(instance)
    # A folder in the place of such a file would remove it as well.
    if any(_CONFIGURATION.fullmatch(p.name) or str(p) in ours for p in (pure, *pure.parents)):
        return True
    if path in patched_files(instance.patch):
        return False
    in_tests = any(part in ("test", "tests") for part in pure.parts)
    return in_tests or _TEST_NAME.fullmatch(pure.name) is not None


@functools.lru_cache(maxsize=16)
def _test_files(instance: Instance) -> frozenset[str]:
    return patched_files(instance.test_patch) | {
        test.split("::", 1)[0] for test in instance.required
    }


def apply_changes(tree: Path, changes: Mapping[str, Change]) -> None:
    """Put changes into a tree of ours. Links in the way are removed, never followed."""
    for path, change in sorted(changes.items()):
        target = tree
        for part in PurePosixPath(path).parts[:-1]:
            target = target / part
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            if change.content is not None:
                target.mkdir(exist_ok=True)
        target = tree / path
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.is_dir() and change.content is not None:
            remove_tree(target)
        if change.content is not None:
            target.write_bytes(change.content)
            target.chmod(0o755 if change.executable else 0o644)


def counted_changes(tree: Path, pristine: Path, instance: Instance) -> Mapping[str, Change]:
    """The changes of the agent that are judged; raises as `collect_changes`."""
    changes = collect_changes(tree, pristine)
    return {path: change for path, change in changes.items() if not is_protected(path, instance)}


def build_reference(tree: Path, pristine: Path, instance: Instance) -> None:
    """Make the tree that the reference solution leaves; raises ConfigError if its patch does not
    apply."""
    if not instance.patch.strip():
        raise ConfigError(
            f"{instance.instance_id}: it has no reference patch, so its tests cannot be validated"
        )
    remove_tree(tree)
    try:
        build_tree(tree, pristine, instance.patch)
    except ConfigError as error:
        raise ConfigError(
            f"{instance.instance_id}: the reference patch does not apply: {error}"
        ) from error


@contextlib.contextmanager
def scratch_tree() -> Iterator[Path]:
    """A place for a tree, which is removed afterwards."""
    folder = process_folder().make()
    try:
        yield folder / "tree"
    finally:
        remove_tree(folder)
