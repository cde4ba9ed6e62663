"""The folder of built images (`env.images`): finds the image of a task, and keeps its record.

`bases/` holds unpacked base images, `layers/` the trees after build steps, and `tasks/` one record per task, named
after the task and the content that its image was built from.
"""

import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.dockerfile import Image
from envs.harbor.settings import HarborSettings
from envs.swe.sandbox.usage import walk


@dataclass(frozen=True)
class Recipe:
    """What an image is built from: a Dockerfile's text, and the folder that its COPY lines read."""

    task: str
    text: str
    context: Path


def find_image(recipe: Recipe, settings: HarborSettings) -> tuple[Path, Image]:
    """Find tree and settings of a task's image; raises ConfigError if it is not built from these very files."""
    file, store = record_of(recipe, settings), settings.image_store()
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not told or not (store / told["tree"]).is_dir():
        why = f"env.images ({store}) has no image of the task as it is now"
        raise ConfigError(f"{recipe.task}: {why}; run: slime-verlog build-images CONFIG")
    return store / told["tree"], Image(told["folder"], told["variables"], told["user"])


def keep_image(recipe: Recipe, settings: HarborSettings, tree: Path, image: Image) -> None:
    """Write the record of a task's image, whose files lie in the folder `tree` of the store."""
    file, place = record_of(recipe, settings), str(tree.relative_to(settings.image_store()))
    file.parent.mkdir(exist_ok=True)
    told = {"tree": place, "folder": image.folder, "variables": dict(image.variables), "user": image.user}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(told), encoding="utf-8")
    fresh.replace(file)


def record_of(recipe: Recipe, settings: HarborSettings) -> Path:
    """The file with a task's record; its name changes with all that the image depends on."""
    sources = [*settings.base_sources.items()]  # the first that fits counts
    given = (sources, sorted(settings.build_args.items()), settings.build_command)
    key = key_of(recipe.text, context_digest(recipe.context), given)
    return settings.image_store() / "tasks" / f"{recipe.task}-{key}.json"


def key_of(*parts: object) -> str:
    """A short key for the content of a step."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def digest_of(paths: Iterable[Path]) -> str:
    """A key for the names, modes and contents of files and folders."""
    found = hashlib.sha256()
    for top in paths:
        inside = sorted(Path(entry.path) for entry in walk(top)) if top.is_dir() and not top.is_symlink() else []
        for path in [top, *inside]:
            status = path.lstat()
            about = (str(path.relative_to(top.parent)), stat.S_IFMT(status.st_mode), status.st_mode & 0o111)
            found.update(repr(about).encode())
            if path.is_symlink():
                found.update(os.readlink(path).encode())
            elif stat.S_ISREG(status.st_mode):
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


@functools.lru_cache(maxsize=8192)
def context_digest(context: Path) -> str:
    """Return a key for the content of a task's folder `environment`; it is read once per process."""
    return digest_of([context]) if context.is_dir() else ""
