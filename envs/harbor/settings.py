"""The settings of Harbor tasks, and the folder of built images (`env.images`): finds a task's
image, keeps its record.

`tasks/` holds one folder per task, named after the task and the content that its image was built
from, and `files/` one hard link to each file in them. `layers/` is what buildah builds from; only
builds need it.
"""

import functools
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from envs.errors import ConfigError
from envs.harbor.dockerfile import Image
from envs.swe.sandbox.usage import walk
from envs.swe.shell import ShellSettings
from slime_verlog import Field

EXAMPLES = Path(__file__).with_name("examples")
BUILD = "set env.images and run slime-verlog build-images"
"""What to do about a task that needs an image."""


class HarborSettings(ShellSettings):
    """The YAML's `env:` mapping for Harbor tasks."""

    folders: tuple[str, ...] = ()
    """Folders that hold task folders (each with a `task.toml`); without any, the tasks of
    `envs/harbor/examples`."""
    include: tuple[str, ...] = ("*",)
    """Patterns of the task names that the task `*` draws from, such as `git-*`."""
    exclude: tuple[str, ...] = ()
    """Patterns of task names that the task `*` leaves out; they win over `include`."""
    images: str | None = None
    """Folder with images that `slime-verlog build-images` has built from the tasks' Dockerfiles.
    Commands then run in the task's image. Each node needs the folder, or a copy of it. Without it,
    commands run with this machine's programs, and tasks that need an image build are refused."""
    base_sources: Mapping[str, str] = {}
    """Where the base images come from: patterns of names in `FROM`, and for each a source in
    skopeo's form or the folder of an exported image. `{image}` stands for the whole name: `{"*":
    "docker://{image}"}` takes each image from its own registry. The first pattern that fits
    counts."""
    build_args: Mapping[str, str] = {}
    """Values of `ARG` in Dockerfiles, and proxies such as `http_proxy`, as with `docker build
    --build-arg`."""
    build_command: str | None = None
    """Shell command that runs last in each build, for what the tests need: `pip install
    pytest==8.4.1`. For test scripts that install their tools themselves, set `test_command` as
    well."""
    build_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that the build of one image may take. `memory_mb` holds as well."""
    build_mb: int = Field(default=8192, ge=1)
    """Disk space that the build of one image may take in MB: new layers, temporary copies, and the
    finished files."""
    build_network: bool = False
    """Let the RUN lines of Dockerfiles use the network of this machine, as `apt-get install`
    needs."""
    python: str | None = None
    """Interpreter whose folder comes first on PATH without `images`; null for the one that runs the
    environment."""
    writable: tuple[str, ...] = ()
    """Further folders that the agent may change, such as `/var/www`. With `images`, each is copied
    for each episode."""
    variables: Mapping[str, str] = {}
    """Variables of all commands, also for `${NAME}` in `task.toml`; the trainer's own environment
    is never read."""
    test_command: str | None = None
    """Command that judges in place of `bash /tests/test.sh`, for tests that install their tools
    from the network, such as `python3 -m pytest /tests/test_outputs.py`. Exit status 0 pays 1 if it
    writes no reward file."""
    verifier: Mapping[str, Literal["same"]] = {}
    """Patterns of tasks that are judged with the agent's home and variables instead of fresh ones:
    `{"fix-*": same}`. For tests that run what the agent installed for its user, or that write the
    reward twice. Such a reward can be forged, so `check` lists these tasks."""
    reward_key: str = "reward"
    """Key of `reward.json` that is the reward. A file with one number needs no such key."""
    submit_on_limit: bool = True
    """Judge the files when the turns, or the task's time for its agent, are used up, as Harbor
    does."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the commands of one turn may take together."""
    verifier_timeout_s: float = Field(default=600.0, gt=0)
    """Longest `[verifier] timeout_sec` that is accepted; a task that asks for more is refused.
    `env_step_timeout_s` must exceed the sum of this and `command_timeout_s`."""
    memory_mb: int = Field(default=4096, ge=1)
    """Memory of a command's processes, in MB. Tasks that ask for more are refused; those that ask
    for less get less."""
    address_mb: int = Field(default=65536, ge=1)
    """Address space of each process, in MB. Node.js, Go and Java reserve far more than they use."""
    processes: int = Field(default=256, ge=1)
    """Processes and threads that a command may run at once."""
    file_mb: int = Field(default=256, ge=1)
    """Largest file that a command may write, in MB."""
    tree_mb: int = Field(default=1024, ge=1)
    """Size that the files of an episode may reach, in MB; less if the task's `storage_mb` is
    less."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(
            not path.startswith("/") or ".." in path.split("/") or not path.strip("/")
            for path in self.writable
        ):
            raise ConfigError(
                f"env.writable must list absolute folders other than /, got {list(self.writable)}"
            )
        if self.test_command is not None and not self.test_command.strip():
            raise ConfigError(
                "env.test_command is empty; remove it, or give the command that judges"
            )
        return self

    def task_folders(self) -> tuple[Path, ...]:
        """The folders in which tasks are looked up."""
        return tuple(Path(folder).expanduser().absolute() for folder in self.folders) or (EXAMPLES,)

    def interpreter(self) -> Path:
        """The interpreter of this machine that commands find first."""
        return Path(self.python or sys.executable).expanduser().absolute()

    def image_store(self) -> Path:
        """The folder of built images; raises ConfigError if `images` is not set."""
        if self.images is None:
            raise ConfigError(
                "env.images is not set; set it to the folder that receives the built images"
            )
        return Path(self.images).expanduser().absolute()


@dataclass(frozen=True)
class Recipe:
    """What an image is built from: a Dockerfile's text, and the folder that its COPY lines read."""

    task: str
    text: str
    context: Path


def find_image(recipe: Recipe, settings: HarborSettings) -> tuple[Path, Image]:
    """Find the tree and the `Image` of a task; raises ConfigError if it is not built from these
    very files."""
    record = record_of(recipe, settings)
    if not record.is_dir():
        why = f"env.images ({settings.image_store()}) has no image of the task as it is now"
        raise ConfigError(f"{recipe.task}: {why}; run: slime-verlog build-images CONFIG")
    return record / "tree", Image(**json.loads((record / "image.json").read_text(encoding="utf-8")))


def has_image(recipe: Recipe, settings: HarborSettings) -> bool:
    """Whether a task's image is built."""
    return record_of(recipe, settings).is_dir()


def keep_image(recipe: Recipe, settings: HarborSettings, tree: Path, image: Image) -> None:
    """Move the files of a task's image into the store, with its settings beside them."""
    record = record_of(recipe, settings)
    fresh = record.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    told = {"folder": image.folder, "variables": dict(image.variables), "user": image.user}
    (fresh / "image.json").write_text(json.dumps(told), encoding="utf-8")
    tree.rename(fresh / "tree")
    fresh.rename(record)


def record_of(recipe: Recipe, settings: HarborSettings) -> Path:
    """The folder of a task's image; its name changes with all that the image depends on."""
    sources = [*settings.base_sources.items()]  # the first that fits counts
    given = (sources, sorted(settings.build_args.items()), settings.build_command)
    key = key_of(recipe.text, context_digest(recipe.context), given)
    return settings.image_store() / "tasks" / f"{recipe.task}-{key}"


def key_of(*parts: object) -> str:
    """A short key for the content of a step."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=8192)
def context_digest(context: Path) -> str:
    """Return a key for names, modes and contents in a folder, which is read once per process."""
    if not context.is_dir():
        return ""
    found = hashlib.sha256()
    for path in [context, *sorted(Path(entry.path) for entry in walk(context))]:
        mode = path.lstat().st_mode
        about = (str(path.relative_to(context.parent)), stat.S_IFMT(mode), mode & 0o111)
        found.update(repr(about).encode())
        if path.is_symlink():
            found.update(os.readlink(path).encode())
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
