"""Builds one image: executes a Dockerfile's stages step by step, and keeps the tree after each RUN."""

import fcntl
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.errors import ConfigError
from envs.harbor.dockerfile import Image, absolute, is_folder, with_setting
from envs.harbor.images.bases import Tree, fetch_base
from envs.harbor.images.layers import apply_changes, copy_with_links, inside, make_folder, put
from envs.harbor.images.sandbox import run_in_image
from envs.harbor.images.stages import IGNORED, Stage, read_arguments, read_dockerfile, read_shell, run_command
from envs.harbor.instructions import Instruction, UnsupportedLine, fill_in
from envs.harbor.places import copy_sources, home_of
from envs.harbor.settings import HarborSettings
from envs.harbor.store import Recipe, digest_of, keep_image, key_of
from envs.swe.sandbox.supervise import Limits
from envs.swe.sandbox.workspace import copy_files, hand_over, remove_tree, run_program

_PROXIES = ("ftp_proxy", "http_proxy", "https_proxy", "no_proxy", "all_proxy")
"""Build arguments that every RUN gets undeclared, as with docker."""

Change = Callable[[Path, Path], None]
"""Changes a tree (first argument) with the help of an empty folder on the same disk."""


@dataclass
class _Progress:
    """Where a stage has got to. `pending` are changes that wait for the next RUN, with their keys."""

    tree: Tree
    image: Image
    shell: tuple[str, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[str, Change]] = field(default_factory=list)

    @property
    def variables(self) -> Mapping[str, str]:
        return {**self.arguments, **self.image.variables}


def build_image(recipe: Recipe, settings: HarborSettings, say: Callable[[str], object] = print) -> None:
    """Build the image of a task, unless the store has it, and write its record.

    Args:
        say: is told of each RUN that is executed.

    Raises:
        UnsupportedLine: the Dockerfile has a line that cannot be executed.
        ConfigError: a base image cannot be fetched, or a command failed or broke a limit.
    """
    store = settings.image_store()
    store.mkdir(parents=True, exist_ok=True)
    with _alone(store):
        builder = _Builder(recipe, settings, say)
        tree = builder.last()
        keep_image(recipe, settings, tree.key, tree.image)


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Wait for other processes that build, and remove what a killed one has left."""
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in store.glob("building-*"):
            remove_tree(left)
        yield


class _Builder:
    """One build of one Dockerfile."""

    def __init__(self, recipe: Recipe, settings: HarborSettings, say: Callable[[str], object]) -> None:
        self.recipe, self.settings, self.say = recipe, settings, say
        self.store, self.stop_at = settings.image_store(), time.monotonic() + settings.build_timeout_s
        self.dockerfile = read_dockerfile(recipe.text, settings.build_args)
        self.done: dict[int, Tree] = {}

    def last(self) -> Tree:
        """The image: the last stage, and `build_command` on top of it."""
        stage = self.dockerfile.stages[-1]
        if self.settings.build_command:
            stage = replace(stage, steps=(*stage.steps, Instruction(0, "RUN", self.settings.build_command)))
        return self._stage(stage)

    def _stage(self, stage: Stage) -> Tree:
        """A stage after its last step. Stages that nothing needs are not built."""
        if stage.number not in self.done:
            base = self._base(stage.base, stage.number)
            now = _Progress(base, base.image, base.shell)
            for step in stage.steps:
                self._execute(step, now, stage.number)
            layer = self._layer(now, [])
            self.done[stage.number] = Tree(layer, layer.name, now.image, now.shell)
        return self.done[stage.number]

    def _base(self, name: str, before: int) -> Tree:
        stage = self.dockerfile.stage(name, before)
        return self._stage(stage) if stage is not None else fetch_base(name, self.settings, self.store)

    def _execute(self, step: Instruction, now: _Progress, stage: int) -> None:
        if step.name == "ARG":
            given = self.settings.build_args
            now.arguments |= read_arguments(step, now.variables, self.dockerfile.arguments, given)
        elif step.name == "SHELL":
            now.shell = read_shell(step)
        elif step.name in ("COPY", "ADD"):
            now.pending.append(self._copy(step, now, stage))
        elif step.name == "RUN":
            command = run_command(step, now.shell)
            layer = self._layer(now, command, step)
            now.tree, now.pending = Tree(layer, layer.name, now.image), []
        elif step.name not in IGNORED:
            now.image = with_setting(step, now.image, now.variables)
            if step.name == "WORKDIR":
                folder = now.image.folder
                now.pending.append((folder, lambda tree, _: make_folder(inside(tree, folder))))

    def _layer(self, now: _Progress, command: list[str], step: Instruction | None = None) -> Path:
        """The tree after the pending changes and a command."""
        if step is None and not now.pending and now.tree.folder.parent == self.store / "layers":
            return now.tree.folder
        proxies = {k: v for k, v in self.settings.build_args.items() if k.lower() in _PROXIES}
        home = home_of(now.image.user, Path("/"))
        variables = {"HOME": home, **proxies, **now.variables} if command else {}
        changes = [key for key, _ in now.pending]
        # Proxies change how files are fetched, not which.
        told = {name: value for name, value in variables.items() if name not in proxies}
        key = key_of(now.tree.key, changes, command, now.image.folder if command else "", sorted(told.items()))
        layer = self.store / "layers" / key
        if layer.is_dir():
            return layer
        layer.parent.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="building-", dir=self.store))
        work.chmod(0o711)
        try:
            tree = work / "tree"
            copy_with_links(now.tree.folder, tree)
            for _, change in now.pending:
                change(tree, work)
            if step is not None:
                self._run(step, tree, work, command, now.image.folder, variables)
            tree.rename(layer)
        finally:
            remove_tree(work)
        return layer

    def _run(
        self,
        step: Instruction,
        tree: Path,
        work: Path,
        command: list[str],
        folder: str,
        variables: Mapping[str, str],
    ) -> None:
        settings, began = self.settings, time.monotonic()
        limits = Limits(
            seconds=max(self.stop_at - began, 0.0),
            memory_mb=settings.memory_mb,
            processes=settings.build_processes,
            file_mb=settings.build_mb,
            tree_mb=settings.build_mb,
            output_mb=1024,
        )
        make_folder(inside(tree, folder))
        run = work / "run"
        run.mkdir(mode=0o711)
        outcome = run_in_image(tree, run, command, folder, variables, limits)
        why = f"was stopped by its {outcome.stopped} limit" if outcome.stopped else ""
        why = why or (f"ended with status {outcome.returncode}" if outcome.returncode else "")
        if why:
            printed = " ".join(outcome.output.split())[-500:] or "nothing"
            raise ConfigError(f"{step.line} {why}; it printed: {printed}")
        apply_changes(run / "upper", tree)
        self.say(f"{self.recipe.task}: {step.line} took {time.monotonic() - began:.0f} s")

    def _copy(self, step: Instruction, now: _Progress, stage: int) -> tuple[str, Change]:
        """A COPY or ADD as a pending change."""
        flags, paths = step.flags()[0], step.words(now.variables)
        if len(paths) < 2:
            raise UnsupportedLine(f"{step.line} needs a source and a target")
        texts = {doc.mark: doc.text if doc.is_quoted else fill_in(doc.text, now.variables) for doc in step.heredocs}
        named = [path for path in paths[:-1] if not path.startswith("<<")]
        target = absolute(step, paths[-1], now.image.folder)
        other = self._base(flags["from"], stage) if "from" in flags else None
        sources = [found for path in named for found in self._sources(step, path, other)]
        copy = _Copy(step, sources, texts, target, is_folder(paths), flags.get("chmod", ""))
        content = (other.key, named) if other is not None else digest_of(sources)
        key = key_of(step.name, content, sorted(texts.items()), target, copy.into, copy.mode)
        return key, copy.apply

    def _sources(self, step: Instruction, pattern: str, other: Tree | None) -> list[Path]:
        context = self.recipe.context
        if other is not None:
            path = inside(other.folder, pattern)
            found = copy_sources(other.folder, pattern) if not os.path.lexists(path) else [path]
        elif (context / ".dockerignore").exists():
            raise UnsupportedLine("environment/.dockerignore is not supported")
        else:
            found = copy_sources(context, pattern)
        if not found:
            raise UnsupportedLine(f"{step.line} names no file of {'the image' if other else 'the folder environment'}")
        return found


@dataclass(frozen=True)
class _Copy:
    """Files and texts that a COPY or ADD puts into a tree."""

    step: Instruction
    sources: list[Path]
    texts: Mapping[str, str]
    target: str
    into: bool
    mode: str

    def apply(self, tree: Path, work: Path) -> None:
        aside = work / "copied"
        aside.mkdir()
        items = [self._take(source, aside / str(n)) for n, source in enumerate(self.sources)]
        for mark, text in self.texts.items():
            items.append((mark, aside / f"text-{mark}"))
            items[-1][1].write_text(text, encoding="utf-8")
        if self.mode:
            run_program("chmod", "-R", self.mode, *(str(item) for _, item in items))
        hand_over(aside)
        target = inside(tree, self.target)
        into = self.into or len(items) > 1 or target.is_dir()
        for name, item in items:
            if item.is_dir() and not item.is_symlink():
                make_folder(target)
                apply_changes(item, target)
            else:
                place = target / name if into else target
                make_folder(place.parent)
                put(item, place)
        remove_tree(aside)

    def _take(self, source: Path, item: Path) -> tuple[str, Path]:
        """Copy a source aside. ADD unpacks archives."""
        if self.step.name == "ADD" and source.is_file() and tarfile.is_tarfile(source):
            item.mkdir()
            with tarfile.open(source) as archive:
                archive.extractall(item, filter="tar")
        else:
            copy_files(source, item)
        return source.name, item
