"""Reads Dockerfiles: what needs no build (`read_image`), or the text that buildah gets (`with_base_images`).

The reader is ours because `dockerfile-parse`, the library on PyPI, does not know heredocs, which are refused here:
buildah 1.28 would execute their lines as instructions.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

_HEREDOC = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)\d*<<-?\s*(['"]?)(?P<mark>[A-Za-z_]\w*)\1""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}$]*))?\}|(\{))")
_KEPT_DOLLAR = re.compile(r"\\\$|'[^']*\$[^']*'")
"""A `$` that is not the beginning of a variable."""
_FLAGS = re.compile(r"^(--[\w-]+(=\S*)?\s*)+")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS: Mapping[str, str] = {
    **dict.fromkeys(("alpine", "bash", "debian", "ubuntu"), "bash"),
    **{name: name for name in ("node", "perl", "php", "ruby")},
    **dict.fromkeys(("buildpack-deps", "gcc"), "g++"),
    "golang": "go",
    "python": "python3",
    "rust": "cargo",
}
"""The program for which each official image is used."""
WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions that change nothing for a command that is given."""


class UnsupportedLine(Exception):
    """A line that cannot be executed here; the text names it."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its line number, its name in capitals, and its arguments as written."""

    number: int
    name: str
    rest: str

    @property
    def line(self) -> str:
        """How errors call it."""
        shown = " ".join(self.rest.split())
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return f"line {self.number} of environment/Dockerfile ({f'{self.name} {shown}'.strip()})"

    @property
    def flags(self) -> list[tuple[str, str]]:
        """The leading flags `--name=value`; a name may come several times."""
        return re.findall(r"--([\w-]+)(?:=(\S*))?", self.rest.removesuffix(self.arguments))

    @property
    def arguments(self) -> str:
        """What follows the flags."""
        return _FLAGS.sub("", self.rest)

    def listed(self) -> list[str] | None:
        """The arguments if they are a JSON list, as in `CMD ["ls"]`."""
        try:
            found = json.loads(self.arguments) if self.arguments.startswith("[") else None
        except ValueError:
            return None
        return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else None

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Return the arguments, unquoted and with variables filled in; raises UnsupportedLine if it cannot."""
        listed = self.listed()
        if listed is None:
            if _KEPT_DOLLAR.search(self.arguments):
                raise UnsupportedLine(f"{self.line} has a quoted $, which is not supported")
            try:
                listed = shlex.split(self.arguments)
            except ValueError as error:
                raise UnsupportedLine(f"{self.line} has a quote without its end") from error
        return [self.expand(word, variables) for word in listed]

    def expand(self, text: str, variables: Mapping[str, str]) -> str:
        """Fill in variables; unknown ones become empty, as in docker. Raises as `words`."""

        def value(found: re.Match[str]) -> str:
            plain, name, mode, word, odd = found.groups()
            if odd:
                raise UnsupportedLine(f"{self.line} uses a substitution that is not supported")
            given = variables.get(plain or name, "")
            if mode == "+":
                return word if given else ""
            return given or word or ""

        return _VARIABLE.sub(value, text)


def read_instructions(text: str) -> Iterator[Instruction]:
    """Split a Dockerfile into instructions; raises UnsupportedLine for a heredoc."""
    number, pending = 0, ""
    for count, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        if not line or line.lstrip().startswith("#"):
            continue
        number = number if pending else count
        pending += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield _instruction(number, pending.strip())
            pending = ""
    if pending.strip():
        yield _instruction(number, pending.strip())


def _instruction(number: int, text: str) -> Instruction:
    name, *rest = text.split(None, 1)
    step = Instruction(number, name.upper(), "".join(rest))
    if any(found["mark"] for found in _HEREDOC.finditer(step.rest)):
        raise UnsupportedLine(f"{step.line} has a heredoc; put its lines into a file of the folder environment")
    return step


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


def read_image(text: str, has_tool: Callable[[str], bool]) -> Image:
    """Read a Dockerfile that needs no build and only programs of this machine; else raises UnsupportedLine."""
    image, stages = Image(variables={"PATH": PATH}), 0
    for step in read_instructions(text):
        if step.name == "FROM":
            stages += 1
            if stages > 1:
                raise UnsupportedLine(f"{step.line} starts a second build stage")
            name = (step.arguments.split() or [""])[0]
            short = re.sub(r"[:@].*", "", re.sub(r"^(docker\.io/)?(library/)?", "", name))
            if short not in _TOOLS:
                raise UnsupportedLine(f"{step.line} names an image with unknown programs")
            if not has_tool(_TOOLS[short]):
                raise UnsupportedLine(f"{step.line} brings {_TOOLS[short]}, which this machine does not have")
        elif step.name == "COPY":
            if dict(step.flags).keys() - {"chown"}:
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
            given = {name: " ".join(step.words(variables)[1:])}
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


def with_base_images(text: str, build_args: Mapping[str, str], base_of: Callable[[str], str], first: str) -> str:
    """Return the Dockerfile, one instruction per line, with `base_of(name)` in place of each image that it names.

    `first` is a line that each stage begins with. Raises UnsupportedLine for what cannot be read, and what `base_of`
    raises.
    """
    arguments, stages, lines = dict[str, str](), set[str](), list[str]()
    for step in read_instructions(text):
        rest, flags = step.rest, dict(step.flags)
        if step.name == "FROM":
            name, *alias = step.words(arguments) or [""]
            if name != "scratch" and name.lower() not in stages:
                name = base_of(name)
            stages |= {"", *(word.lower() for word in alias[1:])}
            rest = " ".join([name, *alias])
        elif step.name == "ARG" and not stages:
            for word in step.words(arguments):
                key, _, default = word.partition("=")
                arguments[key] = build_args.get(key, default)
        elif step.name in ("COPY", "ADD") and not _is_stage(flags.get("from", ""), stages):
            rest = rest.replace(f"--from={flags['from']}", f"--from={base_of(flags['from'])}", 1)
        # At the end of a file, a backslash would join the line with one that is added behind it.
        lines.append(f"{step.name} {rest}".rstrip("\\") + "\n")
        if step.name == "FROM":
            lines.append(first)
    return "".join(lines)


def _is_stage(name: str, stages: Iterable[str]) -> bool:
    """Whether a `COPY --from` names a stage, or nothing, and not an image."""
    return not name or name.isdecimal() or name.lower() in stages
