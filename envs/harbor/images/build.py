"""Builds one image: executes a Dockerfile's stages step by step, and keeps the tree after each RUN.

A command runs as the only user of its image, root, in a sandbox that changes nothing else. From outside to inside: a
sandbox with this machine's programs; in it a user namespace, in which our user without rights is root and mounts an
overlay over the finished tree; in that, the command with the overlay as its root. Files have one owner, so changes of
owners and users succeed without effect (see `seccomp_filter`).
"""

import fcntl
import os
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from envs.errors import ConfigError
from envs.harbor import dockerfile
from envs.harbor.dockerfile import IGNORED, Copy, Instruction, UnsupportedLine, fill_in
from envs.harbor.images.bases import (
    BUILD_USER,
    UNFINISHED,
    Tree,
    apply_changes,
    fetch_base,
    give_to_builder,
    inside,
    make_folder,
    put,
    unfinished,
)
from envs.harbor.images.ignored import seen_context
from envs.harbor.places import IMAGE_SYSTEM, copy_sources, find_dockerignore, home_of, no_source
from envs.harbor.settings import HarborSettings, Recipe, digest_of, keep_image, key_of
from envs.swe.sandbox.sandbox import Sandbox, find_bwrap, find_tool, system_mounts
from envs.swe.sandbox.supervise import BUILD_FILTERS, Limits, Outcome, supervise
from envs.swe.sandbox.workspace import copy_files, hand_over, remove_tree, run_program

_APT = "/dev/apt.conf"
_RIGHTS = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP")
_NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf")


def run_in_image(
    tree: Path, work: Path, argv: Sequence[str], folder: str, variables: Mapping[str, str], limits: Limits
) -> Outcome:
    """Run a command on an overlay over `tree`, with its changes in `work / "upper"`; `work` must be empty."""
    for name in ("upper", "work", "merged"):
        (work / name).mkdir()
        give_to_builder(work / name)
    # apt would switch to another user for downloads, and check that it did.
    (work / "apt.conf").write_text('APT::Sandbox::User "root";\n', encoding="utf-8")
    as_root = [find_bwrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--dev-bind", "/", "/"]
    options = "lowerdir=/build/tree,upperdir=/build/work/upper,workdir=/build/work/work,userxattr"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, "/build/work/merged"]
    given = {"APT_CONFIG": _APT, **variables}
    mounted = ["sh", "-c", f'{shlex.join(mount)} && exec "$@"', "sh", *_image_layer(tree, folder, given)]
    limited = [find_tool("prlimit"), f"--nproc={limits.processes}", f"--fsize={limits.file_mb << 20}", "--core=0", "--"]
    return supervise([*_machine_layer(tree, work), *as_root, *limited, *mounted, *argv], limits, work / "upper")


def _machine_layer(tree: Path, work: Path) -> list[str]:
    """The outermost sandbox: this machine's programs, the network, and the folders of the build."""
    as_root = os.geteuid() == 0
    drop = [find_tool("setpriv"), f"--reuid={BUILD_USER}", f"--regid={BUILD_USER}", "--clear-groups"]
    drop += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    as_agent, own_user = (drop, ()) if as_root else ((), ("--unshare-user",))
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    layer = [find_bwrap(), *spaces, "--die-with-parent", "--new-session"]
    layer += [*own_user, *system_mounts(), "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    layer += ["--ro-bind", str(work / "apt.conf"), _APT]
    for name in _NETWORK_FILES:
        layer += ["--ro-bind-try", name, name]
    layer += ["--dir", "/build", "--ro-bind", str(tree), "/build/tree", "--bind", str(work), "/build/work"]
    layer += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin"]
    return [*layer, *as_agent]


def _image_layer(tree: Path, folder: str, variables: Mapping[str, str]) -> list[str]:
    """The innermost sandbox, which shows the image."""
    layer = [find_bwrap(), "--die-with-parent", "--bind", "/build/work/merged", "/"]
    layer += ["--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc"]
    for name in _NETWORK_FILES:
        # A link would lead out of the image while bubblewrap looks for the place.
        if inside(tree, name) == tree / name.lstrip("/"):
            layer += ["--ro-bind-try", name, name]
    layer += ["--cap-drop", "ALL", *(word for right in _RIGHTS for word in ("--cap-add", right))]
    layer.append(BUILD_FILTERS)
    layer += ["--chdir", folder, "--clearenv"]
    return [*layer, *(word for item in variables.items() for word in ("--setenv", *item))]


_PROXIES = ("ftp_proxy", "http_proxy", "https_proxy", "no_proxy", "all_proxy")
"""Build arguments that every RUN gets undeclared, as with docker."""

Change = Callable[[Path, Path], None]
"""Changes a tree (first argument) with the help of a folder on the same disk."""


@dataclass
class _Progress:
    """Where a stage has got to. `pending` are changes that wait for the next RUN, with their keys."""

    tree: Tree
    arguments: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[str, Change]] = field(default_factory=list)


def build_image(recipe: Recipe, settings: HarborSettings, say: Callable[[str], object] = print) -> None:
    """Build the image of a task, unless the store has it, and write its record; `say` is told of each RUN.

    Raises:
        UnsupportedLine: the Dockerfile has a line that cannot be executed.
        ConfigError: a base image cannot be fetched, or a command failed or broke a limit.
    """
    store = settings.image_store()
    store.mkdir(parents=True, exist_ok=True)
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in store.glob(f"{UNFINISHED}*"):  # by a build that was killed
            remove_tree(left)
        try:
            with unfinished(store) as work:
                tree = _Builder(recipe, seen_context(recipe.context, work), settings, say).build()
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"environment/Dockerfile cannot be built: {reason}") from error
        # Sandboxes have other users, and show these folders as they are; the others are copied and handed over.
        shown = [path for path in tree.folder.iterdir() if path.name in IMAGE_SYSTEM and not path.is_symlink()]
        if shown:
            run_program("chmod", "-R", "a+rX", "--", *map(str, shown))
        keep_image(recipe, settings, tree.folder, tree.image)


class _Builder:
    """One build of one Dockerfile. `context` is what COPY sees of the recipe's."""

    def __init__(self, recipe: Recipe, context: Path, settings: HarborSettings, say: Callable[[str], object]) -> None:
        self.recipe, self.context, self.settings, self.say = recipe, context, settings, say
        self.store, self.stop_at = settings.image_store(), time.monotonic() + settings.build_timeout_s
        self.stages, self.arguments = dockerfile.read_dockerfile(recipe.text, settings.build_args)
        self.done: dict[int, Tree] = {}

    def build(self) -> Tree:
        """The image: the last stage, and `build_command` on top of it."""
        if self.settings.build_command:
            self.stages[-1].steps.append(Instruction(0, "RUN", self.settings.build_command))
        tree = self._stage(len(self.stages) - 1)
        if not any(inside(tree.folder, path).exists() for path in ("bin/bash", "usr/bin/bash")):
            raise ConfigError("the image has no /bin/bash, which commands are run with; check its base image")
        return tree

    def _stage(self, number: int) -> Tree:
        """A stage after its last step. Stages that nothing needs are not built."""
        if number not in self.done:
            now = _Progress(self._base(self.stages[number].base, number))
            for step in self.stages[number].steps:
                self._execute(step, now, number)
            self._keep(now)
            self.done[number] = now.tree
        return self.done[number]

    def _base(self, name: str, before: int) -> Tree:
        """What a stage means by this name: an earlier stage, or an image."""
        number = self._number(name, before)
        return fetch_base(name, self.settings, self.store) if number is None else self._stage(number)

    def _number(self, name: str, before: int) -> int | None:
        """The earlier stage of this name or number."""
        return next((n for n in reversed(range(before)) if name.lower() in (self.stages[n].name, str(n))), None)

    def _execute(self, step: Instruction, now: _Progress, number: int) -> None:
        image = now.tree.image
        variables = {**now.arguments, **image.variables}
        if step.name == "ARG":
            now.arguments |= dockerfile.read_arguments(step, variables, self.arguments, self.settings.build_args)
        elif step.name == "SHELL":
            now.tree = replace(now.tree, shell=tuple(step.words({})))
        elif step.name in ("COPY", "ADD"):
            now.pending.append(self._copy(step, image.folder, variables, number))
        elif step.name == "RUN":
            now.pending.append(self._run(step, now.tree, variables))
            self._keep(now)
        elif step.name not in IGNORED:
            image = dockerfile.with_setting(step, image, variables)
            now.tree = replace(now.tree, image=image)
            if step.name == "WORKDIR":
                now.pending.append((image.folder, lambda tree, _: make_folder(inside(tree, image.folder))))

    def _keep(self, now: _Progress) -> None:
        """Execute the pending changes on a copy of the tree, unless the store has the result."""
        if not now.pending:
            return
        key = key_of(now.tree.key, [key for key, _ in now.pending])
        layer = self.store / "layers" / key
        if not layer.is_dir():
            layer.parent.mkdir(exist_ok=True)
            with unfinished(self.store) as work:
                run_program("cp", "-a", "-l", "-T", "--", str(now.tree.folder), str(work / "tree"))  # with hard links
                for _, change in now.pending:
                    change(work / "tree", work)
                (work / "tree").rename(layer)
        now.tree, now.pending = replace(now.tree, folder=layer, key=key), []

    def _run(self, step: Instruction, base: Tree, variables: Mapping[str, str]) -> tuple[str, Change]:
        """A RUN as a change."""
        settings, folder, command = self.settings, base.image.folder, dockerfile.run_command(step, base.shell)
        proxies = {k: v for k, v in settings.build_args.items() if k.lower() in _PROXIES}
        given = {"HOME": home_of(base.image.user, Path("/")), **proxies, **variables}

        def change(tree: Path, work: Path) -> None:
            began, run = time.monotonic(), work / "run"
            run.mkdir(mode=0o711)
            make_folder(inside(tree, folder))
            shell = base.shell[0]
            if step.listed() is None and shell.startswith("/") and not inside(tree, shell).exists():
                raise UnsupportedLine(f"{step.line} cannot run: the base image has no {shell}")
            limits = Limits(
                seconds=max(self.stop_at - began, 0.0),
                memory_mb=settings.memory_mb,
                processes=1024,  # and threads, at once
                file_mb=settings.build_mb,
                tree_mb=settings.build_mb,
                output_mb=1024,
            )
            outcome = run_in_image(tree, run, command, folder, given, limits)
            if outcome.stopped or outcome.returncode:
                ended = f"was stopped by its {outcome.stopped} limit" if outcome.stopped else ""
                printed = " ".join(outcome.output.split())[-500:] or "nothing"
                why = ended or f"ended with status {outcome.returncode}"
                raise ConfigError(f"{step.line} {why}; it printed: {printed}")
            apply_changes(run / "upper", tree)
            self.say(f"{self.recipe.task}: {step.line} took {time.monotonic() - began:.0f} s")

        # Proxies change how files are fetched, not which.
        told = sorted((name, value) for name, value in given.items() if name not in proxies)
        return key_of(command, folder, told), change

    def _copy(self, step: Instruction, folder: str, variables: Mapping[str, str], number: int) -> tuple[str, Change]:
        """A COPY or ADD as a change."""
        flags, copy = dict(step.flags), dockerfile.read_copy(step, folder, variables)
        texts = [(doc.mark, doc.text if doc.is_quoted else fill_in(doc.text, variables)) for doc in step.heredocs]
        named = [path for path in copy.sources if not path.startswith("<<")]
        source = flags.get("from")
        try:
            other = None if source is None else self._base(source, number)
            files = [found for path in named for found in self._sources(step, path, other)]
        except (ConfigError, UnsupportedLine) as error:
            if source is None or self._number(source, number) is not None:
                raise
            raise type(error)(f"no earlier stage is called {source!r}, so it was read as an image: {error}") from error
        content = other.key if other is not None else digest_of(path for _, path in files)
        mode = flags.get("chmod", "")
        if mode and not re.fullmatch("[0-7]{3,4}", mode):
            raise UnsupportedLine(f"{step.line} has a mode that is not a number such as 755")
        key = key_of(step.name, content, named, texts, copy.target, copy.into, mode)
        return key, partial(_copy_into, step, copy, [*files, *texts], mode, self.settings.build_mb)

    def _sources(self, step: Instruction, pattern: str, other: Tree | None) -> list[tuple[str, Path]]:
        """Find the files that a source of COPY names, links followed, and never one outside of folder or image."""
        root = self.context if other is None else other.folder
        paths = [pattern]
        if not inside(root, pattern).exists():
            paths = [str(path.relative_to(root)) for path in copy_sources(root, pattern)]
        found = [(PurePosixPath(path).name, file) for path in paths if (file := inside(root, path)).exists()]
        if not found and other is None:
            raise no_source(step.line, [pattern], find_dockerignore(self.recipe.context))
        if not found:
            raise UnsupportedLine(f"{step.line} names no file of the image")
        return found


def _copy_into(
    step: Instruction,
    copy: Copy,
    contents: Sequence[tuple[str, Path | str]],
    mode: str,
    build_mb: int,
    tree: Path,
    work: Path,
) -> None:
    """Put files and texts into a tree, by way of copies with their modes. ADD unpacks archives."""
    aside = work / "copied"
    aside.mkdir()
    items = [(name, aside / str(number)) for number, (name, _) in enumerate(contents)]
    for (_, content), (_, item) in zip(contents, items, strict=True):
        if isinstance(content, str):
            item.write_text(content, encoding="utf-8")
        elif step.name == "ADD" and content.is_file() and tarfile.is_tarfile(content):
            _unpack(step, content, item, build_mb)
        else:
            copy_files(content, item)
    if mode:
        run_program("chmod", "-R", mode, *(str(item) for _, item in items))
    hand_over(aside, BUILD_USER)
    place = inside(tree, copy.target)
    into = copy.into or len(items) > 1 or place.is_dir()
    for name, item in items:
        if item.is_dir() and not item.is_symlink():
            make_folder(place)
            apply_changes(item, place)
        else:
            file = place / name if into else place
            make_folder(file.parent)
            put(item, file)
    remove_tree(aside)


def _unpack(step: Instruction, archive: Path, folder: Path, build_mb: int) -> None:
    """Unpack an archive of the task in a sandbox, which shows nothing else; raises UnsupportedLine if that fails."""
    folder.mkdir()
    hand_over(folder)
    limits = Limits(seconds=600, memory_mb=1024, file_mb=build_mb, tree_mb=build_mb)
    argv = ["tar", "--extract", "--file", "/archive", "--no-same-owner"]
    outcome = Sandbox(folder, limits=limits, readable=((archive, "/archive"),)).run(argv)
    if outcome.stopped or outcome.returncode:
        said = " ".join(outcome.output.split())[-200:]
        why = (
            f"it broke its limit of {outcome.stopped} (env.build_mb)" if outcome.stopped else said or "it is too large"
        )
        raise UnsupportedLine(f"{step.line} has an archive that cannot be unpacked: {why}")
