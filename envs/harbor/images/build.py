"""Builds the image of one task with buildah, and keeps its files and settings for the task's
sandboxes.

Finished trees are never changed. Files that several images have are hard links to one file.
"""

import fcntl
import functools
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from envs.errors import ConfigError
from envs.harbor.dockerfile import PATH, Image, with_base_images
from envs.harbor.images.bases import fetch_base
from envs.harbor.images.buildah import BUILD_USER, FIRST_LINE, WORK, Buildah
from envs.harbor.places import IMAGE_SYSTEM, find_dockerignore
from envs.harbor.settings import HarborSettings, Recipe, has_image, keep_image, key_of
from envs.swe.sandbox.usage import walk
from envs.swe.sandbox.workspace import copy_files, hand_over, remove_tree, run_program

_UNFINISHED = "building-"
"""How the names of folders begin that a build removes at its end."""


def build_image(
    recipe: Recipe, settings: HarborSettings, say: Callable[[str], object] = print
) -> None:
    """Build the image of a task, unless the store has it; `say` is told of each base image that is
    fetched.

    Raises:
        UnsupportedLine: the Dockerfile has a line that cannot be executed.
        ConfigError: a base image cannot be fetched, or a command failed or broke a limit.
    """
    store = settings.image_store()
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if has_image(recipe, settings):
            return
        for left in store.glob(f"{_UNFINISHED}*"):  # by a build that was killed
            remove_tree(left)
        with _unfinished(store) as work:
            buildah = Buildah(store, work, settings)
            try:
                image = _build(recipe, buildah, say)
            except OSError as error:
                raise ConfigError(
                    f"environment/Dockerfile cannot be built: {error.strerror}"
                ) from error
            tree = buildah.out / "tree"
            _finish(tree)
            _share_files(tree, store / "files")
            keep_image(recipe, settings, tree, image)


@contextmanager
def _unfinished(store: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=store))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        remove_tree(folder)


def _build(recipe: Recipe, buildah: Buildah, say: Callable[[str], object]) -> Image:
    """Build the image into `out / "tree"`; return its settings."""
    work = buildah.work
    settings = buildah.settings
    fetch = functools.partial(fetch_base, buildah=buildah, say=say)
    text = with_base_images(recipe.text, settings.build_args, fetch, FIRST_LINE)
    if settings.build_command:
        text += f"RUN {json.dumps(['/bin/sh', '-c', settings.build_command])}\n"
    (work / "Dockerfile").write_text(text, encoding="utf-8")
    context = work / "context"
    if recipe.context.is_dir():
        copy_files(recipe.context, context)
    else:
        context.mkdir()
    hand_over(context, BUILD_USER)
    words = [
        word
        for name, value in settings.build_args.items()
        for word in ("--build-arg", f"{name}={value}")
    ]
    if ignoring := find_dockerignore(context):
        words += ["--ignorefile", f"{WORK}/context/{ignoring.name}"]
    words += ["--iidfile", f"{WORK}/out/id", "--file", f"{WORK}/Dockerfile"]
    buildah.build(*words, f"{WORK}/context", megabytes=settings.build_mb)
    name = (buildah.out / "id").read_text(encoding="utf-8")
    buildah.export(name, "tree")
    return _image(buildah.config(name) or {})


def _image(config: dict[str, Any]) -> Image:
    variables = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    user = (config.get("User") or "root").split(":")[0]
    return Image(config.get("WorkingDir") or "/", {"PATH": PATH, **variables}, user)


def _finish(tree: Path) -> None:
    """Make a tree fit for sandboxes, whose users are others; raises ConfigError if it has no
    bash."""
    if not any(os.path.lexists(tree / path) for path in ("bin/bash", "usr/bin/bash")):
        raise ConfigError(
            "the image has no /bin/bash, which commands are run with; check its base image"
        )
    # Sandboxes show these folders as they are; the others are copied and handed over.
    shown = [path for path in tree.iterdir() if path.name in IMAGE_SYSTEM and not path.is_symlink()]
    tree.chmod(0o755)
    run_program("chmod", "-R", "u+rwX", "--", str(tree))
    if shown:
        run_program("chmod", "-R", "a+rX", "--", *map(str, shown))
    hosts = tree / "etc" / "hosts"  # the place where commands find localhost
    if hosts.parent.is_dir() and not hosts.parent.is_symlink() and not os.path.lexists(hosts):
        hosts.touch()


def _share_files(tree: Path, files: Path) -> None:
    """Replace files that `files` has, with the same mode and time, by hard links; keep the others
    there."""
    files.mkdir(exist_ok=True)
    for entry in walk(tree):
        if entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            with open(entry.path, "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            known = files / key_of(digest, stat.S_IMODE(status.st_mode), status.st_mtime_ns)
            with suppress(OSError):  # a file can have only so many links
                if known.exists():
                    os.link(known, tree / ".link")
                    os.replace(tree / ".link", entry.path)
                else:
                    os.link(entry.path, known)
