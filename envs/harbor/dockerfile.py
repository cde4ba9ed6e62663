"""Reads Dockerfiles: instructions, and from these what needs no build (`read_image`), or a build's stages.

`read_image` and `read_dockerfile` refuse every line that they cannot execute before anything is pulled. The reader is
ours because `dockerfile-parse`, the library on PyPI, does not know heredocs.
"""

import fnmatch
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from envs.errors import did_you_mean

_HEREDOC = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)\d*<<-?(['"]?)(?P<mark>[A-Za-z_]\w*)\1""")
_VARIABLE = r"\$\{(?P<name>\w+)(?::(?P<mode>[-+])(?P<word>[^}]*))?\}|\$(?P<plain>\w+)"
_PIECE = re.compile(
    rf"""(?P<space>\s+)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|{_VARIABLE}|(?P<other>.)""",
    re.DOTALL,
)
_QUOTED_PIECE = re.compile(rf"""\\(?P<escaped>["\\$])|{_VARIABLE}|(?P<other>.)""", re.DOTALL)
_LITERAL = ("space", "single", "escaped", "other")
_FLAGS = re.compile(r"^(--[\w-]+(=\S*)?\s*)+")
_ODD = re.compile(r"\$\{(?!\w+(?::[-+][^}]*)?\})")
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
"""Instructions that change nothing for a command that is given. ENTRYPOINT, HEALTHCHECK and VOLUME name programs and
folders of the image, so `read_image` refuses them; only a build, which makes that image, ignores them."""
IGNORED = (*WITHOUT_EFFECT, "ENTRYPOINT", "HEALTHCHECK", "VOLUME")
"""Instructions without a meaning here: no process outlives a command, and no port or volume leads outside."""
_KNOWN_FLAGS: Mapping[str, tuple[str, ...]] = {
    "ADD": ("chmod", "chown", "link"),
    "COPY": ("chmod", "chown", "from", "link"),
    "FROM": ("platform",),
    "RUN": ("mount",),
    **dict.fromkeys(("ARG", "ENV", "SHELL", "USER", "WORKDIR"), ()),
}
"""The instructions that are executed, and their flags."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class UnsupportedLine(Exception):
    """A line that cannot be executed here; the text names it."""


@dataclass(frozen=True)
class Heredoc:
    """The lines that follow an instruction up to its mark. A quoted mark keeps `$` as it is."""

    mark: str
    text: str
    is_quoted: bool = False


@dataclass(frozen=True)
class Instruction:
    """One instruction: its line number, its name in capitals, and its arguments as written."""

    number: int
    name: str
    rest: str
    heredocs: tuple[Heredoc, ...] = ()

    @property
    def line(self) -> str:
        """How errors call it."""
        shown = " ".join(self.rest.split())
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        where = f"line {self.number} of environment/Dockerfile" if self.number else "env.build_command"
        return f"{where} ({f'{self.name} {shown}'.strip()})"

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
        """Return the arguments, unquoted and with variables filled in; raises UnsupportedLine for open quotes."""
        listed = self.listed()
        if listed is not None:
            return [self.expand(word, variables) for word in listed]
        found, word = list[str](), None
        for space, text in self._pieces(f"{self.arguments} ", variables):
            if not space:
                word = (word or "") + text
            elif word is not None:
                found.append(word)
                word = None
        return found

    def expand(self, text: str, variables: Mapping[str, str]) -> str:
        """Read `text` as one word. Raises as `words`."""
        return "".join(space or piece for space, piece in self._pieces(text, variables))

    def _pieces(self, text: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Split a text into white space (first entry), and what stands between (second)."""
        if _ODD.search(text):
            raise UnsupportedLine(f"{self.line} uses a substitution that is not supported")
        for piece in _PIECE.finditer(text):
            if piece["other"] in ("'", '"'):
                raise UnsupportedLine(f"{self.line} has a quote without its end")
            double = piece["double"]
            yield piece["space"] or "", _value(piece, variables) if double is None else fill_in(double, variables)


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables and `\\$` as in double quotes; unknown ones become empty, as in docker."""
    return _QUOTED_PIECE.sub(lambda piece: _value(piece, variables), text)


def _value(piece: re.Match[str], variables: Mapping[str, str]) -> str:
    literals = [text for name, text in piece.groupdict().items() if name in _LITERAL and text is not None]
    if literals:
        return literals[0]
    value = variables.get(piece["name"] or piece["plain"], "")
    if piece["mode"] and bool(value) == (piece["mode"] == "+"):
        return fill_in(piece["word"], variables)
    return "" if piece["mode"] == "+" else value


def read_instructions(text: str) -> Iterator[Instruction]:
    """Split a Dockerfile into instructions; raises UnsupportedLine for a heredoc without its end."""
    lines = iter(enumerate(text.splitlines(), 1))
    number, pending = 0, ""
    for count, raw in lines:
        line = raw.rstrip()
        if not line or line.lstrip().startswith("#"):
            continue
        number = number if pending else count
        pending += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield _instruction(number, pending.strip(), lines)
            pending = ""
    if pending.strip():
        yield _instruction(number, pending.strip(), lines)


def _instruction(number: int, text: str, lines: Iterator[tuple[int, str]]) -> Instruction:
    name, *rest = text.split(None, 1)
    step, heredocs = Instruction(number, name.upper(), "".join(rest)), list[Heredoc]()
    for found in _HEREDOC.finditer(step.rest) if step.name in ("ADD", "COPY", "RUN") else ():
        if mark := found["mark"]:
            is_indented, body = found[0].lstrip("0123456789").startswith("<<-"), list[str]()
            for _, raw in lines:
                line = raw.lstrip("\t") if is_indented else raw
                if line == mark:
                    break
                body.append(f"{line}\n")
            else:
                raise UnsupportedLine(f"{step.line} has a heredoc without its end, {mark}")
            heredocs.append(Heredoc(mark, "".join(body), bool(found[1])))
    return replace(step, heredocs=tuple(heredocs))


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
    """Read a Dockerfile that needs no build and only programs of this machine; else raises UnsupportedLine."""
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


@dataclass(frozen=True)
class Stage:
    """One `FROM` and what follows it; `name` is empty if it has none."""

    name: str
    base: str
    steps: list[Instruction] = field(default_factory=list)


def read_dockerfile(text: str, build_args: Mapping[str, str]) -> tuple[list[Stage], Mapping[str, str]]:
    """Read stages and the values of `ARG` before the first `FROM`; raises UnsupportedLine, with the line."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    known = {"OS": "linux", "ARCH": machine, "PLATFORM": f"linux/{machine}"}
    arguments = {f"{side}{name}": value for side in ("BUILD", "TARGET") for name, value in known.items()}
    stages = list[Stage]()
    for step in read_instructions(text):
        _check(step)
        if step.name == "FROM":
            words = step.words(arguments)
            if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
                raise UnsupportedLine(f"{step.line} is not FROM IMAGE or FROM IMAGE AS NAME")
            stages.append(Stage(words[2].lower() if len(words) == 3 else "", words[0]))
        elif stages:
            stages[-1].steps.append(step)
        elif step.name == "ARG":
            arguments |= read_arguments(step, arguments, {}, build_args)
        else:
            raise UnsupportedLine(f"{step.line} stands before the first FROM")
    if not stages:
        raise UnsupportedLine("environment/Dockerfile has no FROM")
    return stages, arguments


def read_arguments(
    step: Instruction, variables: Mapping[str, str], outer: Mapping[str, str], build_args: Mapping[str, str]
) -> dict[str, str]:
    """The build arguments that an ARG declares: from `build_args`, its own default, or the value before FROM."""
    found = dict[str, str]()
    for word in step.words(variables):
        name, has_default, default = word.partition("=")
        if name in build_args:
            found[name] = build_args[name]
        elif has_default or name in outer:
            found[name] = default if has_default else outer[name]
    return found


def run_command(step: Instruction, shell: Sequence[str]) -> list[str]:
    """The command line of a RUN."""
    listed = step.listed()
    if listed is not None:
        return listed
    if len(step.heredocs) == 1 and re.fullmatch(r"<<-?['\"]?\w+['\"]?", step.arguments):
        return [*shell, step.heredocs[0].text]
    return [*shell, "\n".join([step.arguments, *(f"{doc.text}{doc.mark}" for doc in step.heredocs)])]


def _check(step: Instruction) -> None:
    if step.name in IGNORED:
        return
    known = (*_KNOWN_FLAGS, *IGNORED, "ONBUILD")
    if step.name not in known:
        hint = did_you_mean(step.name, known, n=1)
        raise UnsupportedLine(f"{step.line} is not a Dockerfile instruction{f'; {hint}' * bool(hint)}")
    if step.name not in _KNOWN_FLAGS:
        raise UnsupportedLine(f"{step.line} is not supported")
    for flag, value in step.flags:
        is_cache = flag == "mount" and re.search(r"\btype=cache\b", value)  # without its cache, it only takes longer
        if flag not in _KNOWN_FLAGS[step.name] or (flag == "mount" and not is_cache):
            raise UnsupportedLine(f"{step.line} uses --{flag}{f'={value}' * bool(value)}, which is not supported")
    if step.name == "ADD" and re.search(r"(^|\s|\")(https?://|git@)", step.arguments):
        raise UnsupportedLine(f"{step.line} downloads a file; use RUN with curl or git in its place")
    if step.name == "SHELL" and not step.listed():
        raise UnsupportedLine(f"{step.line} needs a JSON list")
    if step.name == "RUN" and any(document.text.startswith("#!") for document in step.heredocs):
        raise UnsupportedLine(f"{step.line} has a heredoc for another interpreter, which is not supported")
