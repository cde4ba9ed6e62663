"""Reads a Dockerfile as instructions, and their arguments as words.

Written here because `dockerfile-parse`, the library on PyPI, does not know heredocs.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_HEREDOC = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?:(?<=\s)|^)\d*<<-?(['"]?)(?P<mark>[A-Za-z_]\w*)\1""")
_VARIABLE = r"\$\{(?P<name>\w+)(?::(?P<mode>[-+])(?P<word>[^}]*))?\}|\$(?P<plain>\w+)"
_PIECE = re.compile(
    rf"""(?P<space>\s+)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|{_VARIABLE}|(?P<other>.)""",
    re.DOTALL,
)
_QUOTED_PIECE = re.compile(rf"""\\(?P<escaped>["\\$])|{_VARIABLE}|(?P<other>.)""", re.DOTALL)
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
        return f"{where} ({self.name} {shown})"

    def flags(self) -> tuple[Mapping[str, str], str]:
        """The leading `--name=value` flags, and the other arguments."""
        found, rest = dict[str, str](), self.rest
        while flag := re.match(r"--([\w-]+)(?:=(\S*))?\s*", rest):
            found[flag[1]] = flag[2] or ""
            rest = rest[flag.end() :]
        return found, rest

    def listed(self) -> list[str] | None:
        """The arguments after the flags if they are a JSON list, as in `CMD ["ls"]`."""
        rest = self.flags()[1]
        try:
            found = json.loads(rest) if rest.startswith("[") else None
        except ValueError:
            return None
        is_list = isinstance(found, list) and all(isinstance(word, str) for word in found)
        return found if is_list else None

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """The arguments after the flags, without quotes and with variables filled in.

        Raises:
            UnsupportedLine: a quote without its end, or a substitution that docker does not know either.
        """
        listed = self.listed()
        if listed is not None:
            return [expand(self.line, word, variables) for word in listed]
        rest, found, word = self.flags()[1], list[str](), None
        for piece in _PIECE.finditer(_checked(self.line, rest)):
            if piece["space"] is None:
                word = (word or "") + _value(self.line, piece, variables)
            elif word is not None:
                found.append(word)
                word = None
        return found if word is None else [*found, word]


def expand(line: str, text: str, variables: Mapping[str, str]) -> str:
    """Read `text` as one word.

    Raises:
        UnsupportedLine: see `Instruction.words`.
    """
    pieces = _PIECE.finditer(_checked(line, text))
    return "".join(piece["space"] or _value(line, piece, variables) for piece in pieces)


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables and `\\$` as in double quotes; unknown ones become empty, as in docker."""
    return _QUOTED_PIECE.sub(lambda piece: _plain_value(piece, variables), text)


def _checked(line: str, text: str) -> str:
    if _ODD.search(text):
        raise UnsupportedLine(f"{line} uses a substitution that is not supported")
    return text


def _value(line: str, piece: re.Match[str], variables: Mapping[str, str]) -> str:
    if piece["other"] in ("'", '"'):
        raise UnsupportedLine(f"{line} has a quote without its end")
    if piece["single"] is not None:
        return piece["single"]
    return _plain_value(piece, variables) if piece["double"] is None else fill_in(piece["double"], variables)


def _plain_value(piece: re.Match[str], variables: Mapping[str, str]) -> str:
    literal = piece["escaped"] or piece["other"]
    if literal is not None:
        return literal
    value = variables.get(piece["name"] or piece["plain"], "")
    if piece["mode"]:
        is_set = bool(value)
        return fill_in(piece["word"], variables) if is_set == (piece["mode"] == "+") else value * (piece["mode"] == "-")
    return value


def read_instructions(text: str) -> Iterator[Instruction]:
    """Split a Dockerfile; continued lines are joined, comments dropped, and heredocs kept apart."""
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
    name, rest = re.fullmatch(r"(\S+)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    name, heredocs = name.upper(), list[Heredoc]()
    for found in _HEREDOC.finditer(rest) if name in ("ADD", "COPY", "RUN") else ():
        if mark := found["mark"]:
            is_indented = found[0].lstrip("0123456789").startswith("<<-")
            body = list[str]()
            for _, raw in lines:
                raw = raw.lstrip("\t") if is_indented else raw
                if raw == mark:
                    break
                body.append(f"{raw}\n")
            heredocs.append(Heredoc(mark, "".join(body), bool(found[1])))
    return Instruction(number, name, rest, tuple(heredocs))
