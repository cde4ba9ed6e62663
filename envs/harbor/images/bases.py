"""Fetches the images that `FROM` names, with skopeo and umoci: from a registry, an OCI layout or an archive.

A file tree that is finished is never changed. The next one is a copy of its folders with hard links to its files, in
which a build step replaces changed files, so a file takes its space once.
"""

import fnmatch
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from envs.errors import ConfigError, MissingDependencyError
from envs.harbor.dockerfile import PATH, Image, UnsupportedLine
from envs.harbor.places import follow
from envs.harbor.settings import HarborSettings, key_of
from envs.swe.sandbox.sandbox import Sandbox
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import copy_files, hand_over, remove_tree, run_program

_OPAQUE = "user.overlay.opaque"
BUILD_USER = 60999
"""Owner of an image's files if the trainer runs as root."""


def give_to_builder(path: Path) -> None:
    """Hand a file or folder to the owner of images."""
    if os.geteuid() == 0:
        os.chown(path, BUILD_USER, BUILD_USER)


def inside(tree: Path, path: str) -> Path:
    """Find a path of an image, following links as the image's programs do; raises UnsupportedLine for a circle."""
    found = follow(PurePosixPath("/", path), lambda inner: tree / str(inner).lstrip("/"), lambda _: True)
    if found is None:
        raise UnsupportedLine(f"{path} leads through too many links")
    return tree / str(found).lstrip("/")


def make_folder(folder: Path) -> None:
    """Make a folder of a tree, and those on its way; raises UnsupportedLine if there is a file in its place."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o755)
        give_to_builder(path)
    if not folder.is_dir():
        raise UnsupportedLine(f"{folder} is a file, and a folder is needed there")


def put(item: Path, target: Path) -> None:
    """Move a file or link into a tree, in place of what is there."""
    _remove(target)
    os.rename(item, target)


def apply_changes(changes: Path, tree: Path) -> None:
    """Move the upper layer of an overlay, or copied files, into a tree. Files that the layer deletes are removed."""
    with os.scandir(changes) as entries:
        for entry in entries:
            target, status = tree / entry.name, entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False):
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # how an overlay writes down a deletion
                    _remove(target)
                else:
                    put(Path(entry.path), target)
                continue
            # The folder of an upper layer that is opaque replaces the one below it.
            opaque = _OPAQUE in os.listxattr(entry.path) and os.getxattr(entry.path, _OPAQUE) == b"y"
            if opaque or target.is_symlink() or not target.is_dir():
                _remove(target)
                target.mkdir()
            os.chmod(entry.path, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)  # Go's module cache is read-only
            apply_changes(Path(entry.path), target)
            give_to_builder(target)
            target.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


UNFINISHED = "building-"
"""How the names of folders begin that a build moves into place, or removes, at its end."""


@dataclass(frozen=True)
class Tree:
    """The files of an image, a key for them, and its settings."""

    folder: Path
    key: str
    image: Image
    shell: tuple[str, ...] = ("/bin/sh", "-c")


@contextmanager
def unfinished(store: Path) -> Iterator[Path]:
    """Make an empty folder in the store; it is removed at the end unless it was moved into place."""
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=store))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        remove_tree(folder)


def full_name(name: str) -> str:
    """An image's name with its registry and tag, as docker completes it. Beside a digest, a tag means nothing."""
    name = re.sub(r":[^/:@]+@", "@", name)
    first, slash, _ = name.partition("/")
    if not slash or not re.search(r"[.:]|^localhost$", first):
        name = f"docker.io/{name}" if slash else f"docker.io/library/{name}"
    return name if re.search(r":[^/]+$", name) else f"{name}:latest"


def fetch_base(name: str, settings: HarborSettings, store: Path) -> Tree:
    """Return the unpacked image `name`, from the store or its source; raises ConfigError if it has none."""
    if name == "scratch":
        (store / "bases" / name).mkdir(parents=True, exist_ok=True)
        return Tree(store / "bases" / name, name, Image(variables={"PATH": PATH}))
    full = full_name(name)
    sources = [
        source.replace("{image}", full)
        for pattern, source in settings.base_sources.items()
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(full, pattern)
    ]
    if not sources:
        raise ConfigError(
            f"env.base_sources does not say where the image {name} comes from; add a pattern for it, such as "
            f'"{name}": "docker://{{image}}" for its registry, or "oci:FOLDER:TAG" for a local OCI layout'
        )
    source = sources[0]
    key = key_of(source, _stamp(source))
    at = store / "bases" / key
    if not at.is_dir():
        at.parent.mkdir(exist_ok=True)
        with unfinished(store) as made:
            found = {"source": source, "digest": key, "config": {}, **_unpack(source, made)}
            (made / "config.json").write_text(json.dumps(found), encoding="utf-8")
            made.rename(at)
    found = json.loads((at / "config.json").read_text(encoding="utf-8"))
    config = found["config"]
    image = Image(
        folder=config.get("WorkingDir") or "/",
        variables={"PATH": PATH, **dict(entry.split("=", 1) for entry in config.get("Env") or ())},
        user=(config.get("User") or "root").split(":")[0],
    )
    return Tree(at / "tree", found["digest"], image, tuple(config.get("Shell") or Tree.shell))


def _unpack(source: str, made: Path) -> dict[str, Any]:
    """Unpack an image into `made / "tree"`; return its digest and settings, if the source has them."""
    layout, tree = made / "layout", made / "tree"
    found = {}
    if Path(source).is_dir():
        copy_files(Path(source), tree)
    else:
        copy = ["--command-timeout", "1h", "copy", "--quiet", "--insecure-policy"]
        _fetch(source, "skopeo", *copy, source, f"oci:{layout}:base")
        manifest = _blob(layout, json.loads((layout / "index.json").read_text(encoding="utf-8"))["manifests"][0])
        _unpack_layers(source, layout, tree)
        found = {"digest": manifest["config"]["digest"], "config": _blob(layout, manifest["config"]).get("config", {})}
        remove_tree(layout)
    run_program("chmod", "-R", "u+rwX", str(tree))
    hosts = tree / "etc" / "hosts"  # the place where commands find localhost; docker makes it as well
    if hosts.parent.is_dir() and not hosts.parent.is_symlink() and not os.path.lexists(hosts):
        hosts.touch()
    hand_over(tree, BUILD_USER)
    return found


def _unpack_layers(source: str, layout: Path, tree: Path) -> None:
    """Unpack the layers of an image in a sandbox, which shows nothing else."""
    _require("umoci")
    holder = layout.with_name("unpacked")
    holder.mkdir()
    hand_over(holder)
    limits = Limits(3600.0, memory_mb=4096, address_mb=1 << 20, file_mb=1 << 20, tree_mb=1 << 20)
    box = Sandbox(holder, limits=limits, readable=((layout, "/layout"),))
    outcome = box.run(["umoci", "raw", "unpack", "--rootless", "--image", "/layout:base", "/testbed/root"])
    if outcome.returncode:
        said = " ".join(outcome.output.split())[-300:] or outcome.stopped
        raise ConfigError(f"umoci cannot unpack {source}: {said}; check env.base_sources")
    (holder / "root").rename(tree)
    remove_tree(holder)


def _blob(layout: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    return json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_text(encoding="utf-8"))


def _require(program: str) -> None:
    if shutil.which(program) is None:
        missing = f"images are built with {program}, which is not on PATH"
        raise MissingDependencyError(f"{missing}; install it with: apt-get install -y {program}")


def _fetch(source: str, program: str, *arguments: str) -> None:
    _require(program)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ConfigError(f"{program} cannot fetch {source}: {lines[-1]}; check env.base_sources")


def _stamp(source: str) -> object:
    """What changes when a local source changes. An image of a registry is fetched once."""
    transport, _, rest = source.partition(":")
    if transport == "docker":
        return None
    for place in (source, rest, rest.rpartition(":")[0]):
        index = Path(place, "index.json")  # of an OCI layout
        file = index if index.is_file() else Path(place)
        if place and file.exists():
            return file.stat().st_mtime_ns, file.stat().st_size
    if transport in ("oci", "oci-archive", "docker-archive") or "/" in transport:
        kind = "file" if transport.endswith("-archive") else "folder"
        place = source if "/" in transport else rest.rpartition(":")[0] or rest
        raise ConfigError(f"env.base_sources: {source}: the {kind} {place} does not exist")
    forms = "docker://NAME, oci:FOLDER:TAG, oci-archive:FILE, docker-archive:FILE, or the folder of an exported image"
    raise ConfigError(f"env.base_sources: {source} names no image; write {forms}")
