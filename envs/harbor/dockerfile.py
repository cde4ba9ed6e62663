"""Reads the Dockerfiles that need no build: a known base image, `COPY` of files, and settings.

`read_image` refuses every other instruction by its line.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from envs.harbor.instructions import Instruction, UnsupportedLine, read_instructions

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_TOOLS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("alpine", "bash", "debian", "ubuntu"), ()),
    **{name: (name,) for name in ("node", "perl", "php", "ruby")},
    "buildpack-deps": ("gcc", "make"),
    "gcc": ("gcc", "g++", "make"),
    "golang": ("go",),
    "python": ("python3",),
    "rust": ("cargo",),
}
"""Programs that come with each official image, beside a shell and the usual commands."""
WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")


@dataclass(frozen=True)
class Copy:
    """One `COPY` or `ADD`: its sources as written, and an absolute target."""

    sources: tuple[str, ...]
    target: str
    into: bool
    """Whether the target is a folder that receives the sources."""
    line: str


@dataclass(frozen=True)
class Image:
    """What a Dockerfile says about the machine that a task starts on."""

    folder: str = "/"
    """Working directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    user: str = "root"
    copies: tuple[Copy, ...] = ()
    folders: tuple[str, ...] = ()
    """Working directories on the way, which are created."""


def read_image(text: str, has_tool: Callable[[str], bool], base_images: Sequence[str] = ()) -> Image:
    """Read a Dockerfile that needs no build.

    Args:
        has_tool: whether this machine has a program of that name.
        base_images: patterns of base images that are accepted besides the official ones.

    Raises:
        UnsupportedLine: a line needs a build, or a program that is not here.
    """
    image, stages = Image(variables={"PATH": PATH}), 0
    for step in read_instructions(text):
        if step.name == "FROM":
            stages += 1
            if stages > 1:
                raise UnsupportedLine(f"{step.line} starts a second build stage")
            name = (step.arguments.split() or [""])[0]
            short = re.sub(r"[:@].*", "", re.sub(r"^(docker\.io/)?(library/)?", "", name))
            given = any(fnmatch.fnmatchcase(name, pattern) for pattern in base_images)
            if not given and short not in _TOOLS:
                known = "which env.base_images can add if this machine has them"
                raise UnsupportedLine(f"{step.line} names an image with unknown programs, {known}")
            lacking = [tool for tool in _TOOLS.get(short, ()) if not given and not has_tool(tool)]
            if lacking:
                raise UnsupportedLine(f"{step.line} brings {', '.join(lacking)}, which this machine does not have")
        elif step.name == "COPY":
            if step.heredocs or dict(step.flags).keys() - {"chown"}:
                raise UnsupportedLine(f"{step.line} needs an image build")
            image = replace(image, copies=(*image.copies, read_copy(step, image.folder, image.variables)))
        elif step.name in ("ENV", "WORKDIR", "USER"):
            image = with_setting(step, image, image.variables)
        elif step.name not in WITHOUT_EFFECT:
            raise UnsupportedLine(f"{step.line} needs an image build")
    if not stages:
        raise UnsupportedLine("environment/Dockerfile has no FROM")
    return image


def read_copy(step: Instruction, folder: str, variables: Mapping[str, str]) -> Copy:
    """Read a COPY or ADD, whose target may be relative to `folder`; raises UnsupportedLine if it cannot."""
    *sources, target = step.words(variables) or [""]
    if not sources:
        raise UnsupportedLine(f"{step.line} needs a source and a target")
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    return Copy(tuple(sources), _absolute(step, target, folder), into, step.line)


def with_setting(step: Instruction, image: Image, variables: Mapping[str, str]) -> Image:
    """Return the image after ENV, WORKDIR or USER; raises UnsupportedLine for what it cannot read."""
    if step.name == "ENV":
        name = "".join(step.rest.split()[:1])
        if "=" in name:
            given = {name: value for name, _, value in (word.partition("=") for word in step.words(variables))}
        else:  # the old form, ENV NAME the whole rest
            given = {name: step.expand(step.rest.removeprefix(name).strip(), variables)}
        return replace(image, variables={**image.variables, **given})
    if not step.arguments:
        raise UnsupportedLine(f"{step.line} has no argument")
    value = " ".join(step.words(variables))
    if step.name == "USER":
        return replace(image, user=value.split(":")[0] or "root")
    folder = _absolute(step, value, image.folder)
    return replace(image, folder=folder, folders=(*image.folders, folder))


def _absolute(step: Instruction, path: str, folder: str) -> str:
    whole = PurePosixPath(folder) / path
    if ".." in whole.parts:
        raise UnsupportedLine(f"{step.line} has a path with ..")
    return str(whole)
