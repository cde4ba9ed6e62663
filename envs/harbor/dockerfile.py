"""Reads the Dockerfiles that need no build: a known base image, `COPY` of files, and settings.

`read_image` refuses every other instruction by its line. For an image that was built and exported, `read_exported`
takes only what the export does not hold: working directory, variables and user.
"""

import fnmatch
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

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
_WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")


class UnsupportedLine(Exception):
    """A line that needs an image build; the text names it."""


@dataclass(frozen=True)
class Copy:
    """One `COPY`: sources relative to the `environment` folder, and an absolute target."""

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
    for number, name, rest in _instructions(text):
        shown = rest if len(rest) <= 60 else f"{rest[:57]}..."
        line = f"line {number} of environment/Dockerfile ({name} {shown})"
        if name == "FROM":
            stages += 1
            if stages > 1:
                raise UnsupportedLine(f"{line} starts a second build stage")
            _check_base(line, rest, has_tool, base_images)
        elif name == "COPY":
            image = replace(image, copies=(*image.copies, _copy(line, rest, image)))
        elif name in ("ENV", "WORKDIR", "USER"):
            image = _set(line, name, rest, image)
        elif name not in _WITHOUT_EFFECT:
            raise UnsupportedLine(f"{line} needs an image build")
    if not stages:
        raise UnsupportedLine("environment/Dockerfile has no FROM")
    return image


def read_exported(text: str) -> Image:
    """The settings of a built image's last stage, as far as they can be read."""
    image = Image(variables={"PATH": PATH})
    for number, name, rest in _instructions(text):
        if name == "FROM":
            image = Image(variables={"PATH": PATH})
        elif name in ("ENV", "WORKDIR", "USER"):
            try:
                image = _set(f"line {number}", name, rest, image)
            except UnsupportedLine:
                continue
    return image


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line number, name in capitals, arguments), with continued lines joined, comments and heredocs' lines dropped."""
    number, pending, heredoc = 0, "", ""
    for count, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if heredoc:
            heredoc = "" if line == heredoc else heredoc
            continue
        if not line or line.startswith("#"):
            continue
        number = number if pending else count
        pending += line.removesuffix("\\") + " " * line.endswith("\\")
        if not line.endswith("\\"):
            name, _, rest = pending.partition(" ")
            yield number, name.upper(), rest.strip()
            begun = re.search(r"<<-?['\"]?(\w+)", rest)
            heredoc, pending = begun[1] if begun else "", ""


def _check_base(line: str, rest: str, has_tool: Callable[[str], bool], base_images: Sequence[str]) -> None:
    words = [word for word in rest.split() if not word.startswith("--")]
    name = words[0] if words else ""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in base_images):
        return
    short = re.sub(r"[:@].*", "", re.sub(r"^(docker\.io/)?(library/)?", "", name))
    if short not in _TOOLS:
        known = "which env.base_images can add if this machine has them"
        raise UnsupportedLine(f"{line} names an image with unknown programs, {known}")
    lacking = [tool for tool in _TOOLS[short] if not has_tool(tool)]
    if lacking:
        raise UnsupportedLine(f"{line} brings {', '.join(lacking)}, which this machine does not have")


def _copy(line: str, rest: str, image: Image) -> Copy:
    words = _words(line, rest)
    flags = [word for word in words if word.startswith("--")]
    if any(not flag.startswith("--chown=") for flag in flags):
        raise UnsupportedLine(f"{line} needs an image build")
    paths = [_expand(line, word, image.variables) for word in words if not word.startswith("--")]
    if len(paths) < 2 or any(path.startswith("<<") for path in paths):
        raise UnsupportedLine(f"{line} needs an image build")
    *sources, target = paths
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    return Copy(tuple(sources), _absolute(line, target, image.folder), into, line)


def _set(line: str, name: str, rest: str, image: Image) -> Image:
    """The image after ENV, WORKDIR or USER."""
    if name == "ENV":
        return replace(image, variables=_with_variables(line, rest, image.variables))
    value = _expand(line, " ".join(_words(line, rest)), image.variables)
    if name == "USER":
        return replace(image, user=value.split(":")[0] or "root")
    folder = _absolute(line, value, image.folder)
    return replace(image, folder=folder, folders=(*image.folders, folder))


def _with_variables(line: str, rest: str, before: Mapping[str, str]) -> Mapping[str, str]:
    words = _words(line, rest)
    if words and "=" not in words[0]:  # the old form, ENV NAME the whole rest
        words = [f"{words[0]}={rest.partition(' ')[2].strip()}"]
    found = dict(before)
    for word in words:
        name, _, value = word.partition("=")
        found[name] = _expand(line, value, before)
    return found


def _expand(line: str, text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`; unknown names are empty, as in docker."""
    if re.search(r"\$\{\w+[^\w}]", text):
        raise UnsupportedLine(f"{line} uses a substitution that is not supported")
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], ""), text)


def _absolute(line: str, path: str, folder: str) -> str:
    whole = PurePosixPath(folder) / path
    if ".." in whole.parts:
        raise UnsupportedLine(f"{line} has a path with ..")
    return str(whole)


def _words(line: str, rest: str) -> list[str]:
    """The arguments, as words or as a JSON list."""
    try:
        listed = re.fullmatch(r"((?:--\S+\s+)*)(\[.*\])", rest)
        return [*listed[1].split(), *map(str, json.loads(listed[2]))] if listed else shlex.split(rest)
    except ValueError as error:
        raise UnsupportedLine(f"{line} cannot be read: {error}") from error
