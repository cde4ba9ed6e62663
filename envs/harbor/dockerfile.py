"""Reads Dockerfiles: the few that need no build (`read_image`), or the text that buildah gets
(`with_base_images`).

The reader is ours because `dockerfile-parse`, the library on PyPI, does not know heredocs, which
are refused here: buildah 1.28 would execute their lines as instructions.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_HEREDOC = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)\d*<<-?\s*(['"]?)(?P<mark>[A-Za-z_]\w*)\1"""
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-+])([^}$]*))?\}|(\{))")
_KEPT_DOLLAR = re.compile(r"\\\$|'[^']*\$[^']*'")
"""A `$` that is not the beginning of a variable."""
_FLAGS = re.compile(r"^(--[\w-]+(=\S*)?\s*)+")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME = r"[A-Za-z0-9_][\w.-]*"
_FOLDER = re.compile(rf"(/{_NAME})+")
_SOURCE = re.compile(rf"\.|{_NAME}(/{_NAME})*/?")


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

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Return the arguments, unquoted and with variables filled in; raises UnsupportedLine if it
        cannot."""
        if _KEPT_DOLLAR.search(self.arguments):
            raise UnsupportedLine(f"{self.line} has a quoted $, which is not supported")
        try:
            words = shlex.split(self.arguments)
        except ValueError as error:
            raise UnsupportedLine(f"{self.line} has a quote without its end") from error
        return [self.expand(word, variables) for word in words]

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
    number = 0
    pending = ""
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
        raise UnsupportedLine(
            f"{step.line} has a heredoc; put its lines into a file of the folder environment"
        )
    return step


@dataclass(frozen=True)
class Image:
    """The machine that a task starts on."""

    folder: str = "/"
    """Working directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    user: str = "root"
    copied: str | None = None
    """File or folder of `environment` that goes into the working directory. None for an image that
    was built."""
    folders: tuple[str, ...] = ()
    """Further folders, which are created."""


def read_image(text: str) -> Image:
    """Read a Dockerfile of the few lines that need no build; raises UnsupportedLine for the first
    other one.

    See `docs/harbor.md`, "Tasks without an image".
    """
    folder = "/"
    copied = None
    variables = {"PATH": PATH}
    for number, step in enumerate(read_instructions(text)):
        match step.name, step.rest.split():
            case "FROM", [_] if number == 0:
                continue
            case "WORKDIR", [path] if number and copied is None and _FOLDER.fullmatch(path):
                folder = path
            case "COPY", [source, "." | "./"] if (
                folder != "/" and copied is None and _SOURCE.fullmatch(source)
            ):
                copied = source
            case "ENV", [first, *_] if number and "=" in first:
                pairs = (word.partition("=") for word in step.words(variables))
                variables = {**variables, **{name: value for name, _, value in pairs}}
            case _:
                raise UnsupportedLine(f"{step.line} needs an image build")
    return Image(folder, variables, copied=copied)


def with_base_images(
    text: str, build_args: Mapping[str, str], base_of: Callable[[str], str], first: str
) -> str:
    """Return the Dockerfile, one instruction per line, with `base_of(name)` in place of each image
    that it names.

    `first` is a line that each stage begins with. Raises UnsupportedLine for what cannot be read,
    and what `base_of` raises.
    """
    arguments = dict[str, str]()
    stages = set[str]()
    lines = list[str]()
    for step in read_instructions(text):
        rest = step.rest
        flags = dict(step.flags)
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
