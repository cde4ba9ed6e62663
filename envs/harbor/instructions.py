"""Reads a Dockerfile as instructions, and their arguments as words.

Written here because `dockerfile-parse`, the library on PyPI, does not know heredocs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
        is_list = isinstance(found, list) and all(isinstance(word, str) for word in found)
        return found if is_list else None

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments, without quotes and with variables filled in.

        Raises:
            UnsupportedLine: a quote without its end, or a substitution that docker does not know either.
        """
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
