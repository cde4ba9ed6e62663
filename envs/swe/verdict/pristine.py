"""Pristine trees: the files of one commit, without the history that would show the agent the solution.

Each is made once, kept in the cache folder and only copied. An unfinished one has a different name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from envs.errors import ConfigError, MissingDependencyError
from envs.swe.sandbox.folders import remove_tree

_IDENTITY = {
    "GIT_AUTHOR_NAME": "slime-verlog",
    "GIT_AUTHOR_EMAIL": "none@example.invalid",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "slime-verlog",
    "GIT_COMMITTER_EMAIL": "none@example.invalid",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
}


def default_cache() -> Path:
    """Where pristine trees and fetched packages are kept unless `cache_dir` says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slime-verlog" / "swe"


def git(*arguments: str, cwd: Path, extra: dict[str, str] | None = None, stdin: str | None = None) -> str:
    """Run git on a tree that no agent has touched; hooks and the user's settings stay out.

    Raises:
        ConfigError: git refuses; the text holds its message.
        MissingDependencyError: git is not installed.
    """
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
        done = subprocess.run(argv, cwd=cwd, env=env, input=stdin, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError as error:
        raise MissingDependencyError("SWE tasks need git; install it with: apt-get install -y git") from error
    if done.returncode != 0:
        raise ConfigError(f"git {arguments[0]} in {cwd}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def commit_all(tree: Path) -> str:
    """Make the tree a repository of one commit, whose id depends on the files alone; return the id."""
    git("init", "-q", "-b", "main", "--template=", ".", cwd=tree)
    git("add", "-A", "-f", ".", cwd=tree)
    git("commit", "-q", "--allow-empty", "-m", "The repository as it was found", cwd=tree, extra=_IDENTITY)
    return git("rev-parse", "HEAD", cwd=tree).strip()


def pristine_tree(repository: Path, commit: str, cache: Path) -> Path:
    """The files of `commit` as a repository of one commit, from the cache or from the clone at `repository`.

    Raises:
        ConfigError: `repository` is no git repository, or does not hold the commit.
    """
    if not repository.is_dir():
        raise ConfigError(f"env.repos: {repository} is not a folder; clone the repository there first")
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
    """Hold the lock of `target`; yield a scratch path that becomes it, or None if it is there already."""
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
