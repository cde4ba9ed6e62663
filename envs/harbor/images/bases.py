"""Fetches the images that `FROM` names, with skopeo and umoci: from a registry, an OCI layout or an archive."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import ConfigError, MissingDependencyError
from envs.harbor.dockerfile import PATH, Image
from envs.harbor.settings import HarborSettings
from envs.harbor.store import key_of
from envs.swe.sandbox.workspace import copy_files, hand_over, remove_tree, run_program

_SECONDS = 3600.0


@dataclass(frozen=True)
class Tree:
    """The files of an image, a key for them, and its settings."""

    folder: Path
    key: str
    image: Image
    shell: tuple[str, ...] = ("/bin/sh", "-c")


def source_of(name: str, settings: HarborSettings) -> str:
    """Where an image comes from, in skopeo's words.

    Raises:
        ConfigError: `base_sources` does not cover it.
    """
    full = full_name(name)
    for pattern, source in settings.base_sources.items():
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(full, pattern):
            return source.replace("{image}", full)
    raise ConfigError(
        f"env.base_sources does not say where the image {name} comes from; add a pattern for it, such as "
        f'"{name}": "docker://{{image}}" for its registry, or "oci:FOLDER:TAG" for a local OCI layout'
    )


def full_name(name: str) -> str:
    """An image's name with its registry and tag, as docker completes it."""
    first, slash, _ = name.partition("/")
    if not slash or not re.search(r"[.:]|^localhost$", first):
        name = f"docker.io/{name}" if slash else f"docker.io/library/{name}"
    return name if re.search(r":[^/]+$", name) else f"{name}:latest"


def fetch_base(name: str, settings: HarborSettings, store: Path) -> Tree:
    """The unpacked image `name`, from the store or from its source.

    Raises:
        ConfigError: its source is unknown, or cannot be read.
        MissingDependencyError: skopeo or umoci is not installed.
    """
    if name == "scratch":
        return _scratch(store)
    source = source_of(name, settings)
    at = store / "bases" / key_of(source, _stamp(source))
    if not (at / "config.json").is_file():
        at.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="building-", dir=store))
        made.chmod(0o755)
        try:
            _unpack(source, made)
            remove_tree(at)
            made.rename(at)
        finally:
            remove_tree(made)
    told = json.loads((at / "config.json").read_text(encoding="utf-8"))
    return _tree(at / "tree", told["digest"], told["config"])


def _scratch(store: Path) -> Tree:
    folder = store / "bases" / "scratch"
    folder.mkdir(parents=True, exist_ok=True)
    return Tree(folder, "scratch", Image(variables={"PATH": PATH}))


def _tree(folder: Path, digest: str, config: dict[str, Any]) -> Tree:
    variables = {"PATH": PATH, **dict(entry.split("=", 1) for entry in config.get("Env") or ())}
    user = (config.get("User") or "root").split(":")[0]
    image = Image(folder=config.get("WorkingDir") or "/", variables=variables, user=user)
    return Tree(folder, digest, image, tuple(config.get("Shell") or ("/bin/sh", "-c")))


def _unpack(source: str, made: Path) -> None:
    """Unpack an image into `made / "tree"`, and write down its settings."""
    layout, tree = made / "layout", made / "tree"
    if Path(source).is_dir():
        copy_files(Path(source), tree)
        told = {"source": source, "digest": key_of(source, _stamp(source)), "config": {}}
    else:
        _tool("skopeo", "copy", "--quiet", "--insecure-policy", source, f"oci:{layout}:base", subject=source)
        manifest = _blob(layout, json.loads((layout / "index.json").read_text(encoding="utf-8"))["manifests"][0])
        config = _blob(layout, manifest["config"]).get("config") or {}
        rootless = [] if os.geteuid() == 0 else ["--rootless"]
        _tool("umoci", "raw", "unpack", *rootless, "--image", f"{layout}:base", str(tree), subject=source)
        remove_tree(layout)
        told = {"source": source, "digest": manifest["config"]["digest"], "config": config}
    run_program("chmod", "-R", "u+rwX", str(tree))
    hand_over(tree)
    (made / "config.json").write_text(json.dumps(told), encoding="utf-8")


def _blob(layout: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    return json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_text(encoding="utf-8"))


def _tool(program: str, *arguments: str, subject: str) -> None:
    if shutil.which(program) is None:
        raise MissingDependencyError(
            f"images are built with {program}, which is not on PATH; install it with: apt-get install -y {program}"
        )
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        why = f"{program} took more than {_SECONDS:g} s for {subject}; copy the image to a local OCI layout"
        raise ConfigError(why) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ConfigError(f"{program} cannot fetch {subject}: {lines[-1]}; check env.base_sources")


def _stamp(source: str) -> object:
    """What changes when a local source changes. An image of a registry is fetched once."""
    transport, _, rest = source.partition(":")
    if transport == "docker":
        return None
    if Path(source).is_dir():
        return Path(source).stat().st_mtime_ns
    for path in (Path(rest), Path(rest.rpartition(":")[0])):
        file = path / "index.json" if path.is_dir() else path
        if rest and file.is_file():
            status = file.stat()
            return status.st_mtime_ns, status.st_size
    forms = "docker://NAME, oci:FOLDER:TAG, oci-archive:FILE, docker-archive:FILE, or the folder of an exported image"
    raise ConfigError(f"env.base_sources: {source} names no image; write {forms}")
