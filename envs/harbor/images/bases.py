"""Fetches the images that `FROM` names into buildah's layers: from registries, OCI layouts,
archives and folders."""

import fnmatch
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.images.buildah import BUILD_USER, WORK, Buildah
from envs.harbor.settings import HarborSettings, context_digest, key_of
from envs.swe.sandbox.workspace import copy_files, hand_over

_LOCAL = re.compile(r"(?:oci|oci-archive|docker-archive):([^:]+)(?::.*)?")


def full_name(name: str) -> str:
    """An image's name with its registry and tag, as docker completes it. Beside a digest, a tag
    means nothing."""
    name = re.sub(r":[^/:@]+@", "@", name)
    first, slash, _ = name.partition("/")
    if not slash or not re.search(r"[.:]|^localhost$", first):
        name = f"docker.io/{name}" if slash else f"docker.io/library/{name}"
    return name if re.search(r":[^/]+$", name) else f"{name}:latest"


def fetch_base(name: str, buildah: Buildah, say: Callable[[str], object]) -> str:
    """Return the name that the layers have for an image, which is fetched if they lack it; raises
    ConfigError."""
    source = find_source(name, buildah.settings)
    known = f"localhost/base:{key_of(source, stamp(source))}"
    if buildah.config(known) is None:
        say(f"fetching {name} from {source}")
        if Path(source).is_dir():
            _import_folder(Path(source), known, buildah)
        else:
            layout = buildah.work / "layout"
            copy = ["--command-timeout", "1h", "copy", "--quiet", "--insecure-policy"]
            _fetch(source, *copy, source, f"oci:{layout}:base")
            hand_over(layout, BUILD_USER)
            buildah.import_layout(f"{WORK}/layout:base", known)
            shutil.rmtree(layout)
    return known


def find_source(name: str, settings: HarborSettings) -> str:
    """Where an image comes from; raises ConfigError if `base_sources` does not say."""
    full = full_name(name)
    for pattern, source in settings.base_sources.items():
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(full, pattern):
            return source.replace("{image}", full)
    raise ConfigError(
        f"env.base_sources does not say where the image {name} comes from; add a pattern for it, "
        "such as "
        f'"{name}": "docker://{{image}}" for its registry, or "oci:FOLDER:TAG" for a local OCI layout'
    )


def _import_folder(source: Path, name: str, buildah: Buildah) -> None:
    """Make an image of an exported one's files."""
    copy_files(source, buildah.work / "base")
    hand_over(buildah.work / "base", BUILD_USER)
    (buildah.work / "Base").write_text("FROM scratch\nCOPY . /\n", encoding="utf-8")
    places = ("--file", f"{WORK}/Base", "--ignorefile", "/dev/null", "--tag", name, f"{WORK}/base")
    buildah.build(*places)


def _fetch(source: str, *arguments: str) -> None:
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ConfigError(f"skopeo cannot fetch {source}: {lines[-1]}; check env.base_sources")


def stamp(source: str) -> object:
    """What changes when a local source changes; raises ConfigError if it is missing. A registry is
    asked once."""
    if source.startswith("docker:"):
        return None
    found = _LOCAL.fullmatch(source)
    place = Path(found[1] if found else source)
    if not place.exists():
        forms = "docker://NAME, oci:FOLDER:TAG, oci-archive:FILE, docker-archive:FILE, or an exported image's folder"
        raise ConfigError(f"env.base_sources: {source}: {place} does not exist; write {forms}")
    if found is None:
        return context_digest(place)
    index = place / "index.json"  # of an OCI layout
    status = (index if index.is_file() else place).stat()
    return status.st_mtime_ns, status.st_size
