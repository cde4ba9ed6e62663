"""A process that decides whether two mathematical expressions are equal.

Some comparisons never end (`9^{9^{9^9}}`) and cannot be interrupted from Python. When one takes too
long, the kernel ends this process, and its parent starts another.

The process reads one JSON list `[reference, answer]` per line and writes `true` or `false`. Its
first line is "ready".
"""

import contextlib
import json
import logging
import re
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Result:
    """An expression, and its unit: "" for none, "degree", "percent", or a short name with its power
    (`cm^2`)."""

    expression: str
    unit: str = ""


_NOTATION = yaml.safe_load(Path(__file__).with_name("notation.yaml").read_text(encoding="utf-8"))
_CHARACTERS = str.maketrans(_NOTATION["characters"])
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,!]|,\\!)(?=\d{3}(?!\d))")
_SPACES = re.compile(r"\\[,;:>! ]|\\(?:quad|qquad|displaystyle|left|right)(?![a-zA-Z])|~")
_WRAPPERS = re.compile(r"\\(?:mathrm|textrm|textbf|textit|mbox|operatorname)(?=\s*\{)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|cong)(?![a-zA-Z])")
_NAME = re.compile(r"^(?:m?\s*\\(?:measured)?angle\s*[A-Za-z0-9]{1,3}\s*)?=\s*")
_DEGREE = (
    r"(?:\^\s*(?:\{\s*)?(?:\\circ|\\degree|∘|o(?![a-zA-Z]))(?:\s*\})?|°|\\degrees?(?![a-zA-Z])"
    r"|(?<=[\d\s})])degrees?(?![a-zA-Z]))"
)
_DEGREES = re.compile(_DEGREE)
_ANGLE = re.compile(rf"(\d{{1,20}}(?:\.\d{{1,20}})?)\s*{_DEGREE}")
_TRIGONOMETRY = re.compile(r"sin|cos|tan|cot|sec|csc")
_BRACKET = re.compile(r"[(){}]")
_ROOT = re.compile(r"(√|∛|(?<![\\a-zA-Z])sqrt)\s*")
_OPERAND = re.compile(r"\d{1,20}(?:\.\d{1,20})?|[a-zA-Z]")
_FRACTION = r"(?:(\d{1,9})\s*/\s*(\d{1,9})|\\[dt]?frac\s*\{(\d{1,9})\}\s*\{(\d{1,9})\})(?![\d.])"
_MIXED = re.compile(rf"(?<![\d.\w}}^])(\d{{1,9}})(?:\s+(?:and\s+)?|(?=\\)){_FRACTION}")
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3}){1,6})(?![\d/])")
_SIDE_BY_SIDE = re.compile(r"(?<=\d)\s+(?=\d)")
_SCIENTIFIC = re.compile(r"^(-?\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,3})$")
_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")

_NAMES = {name: unit for unit, others in _NOTATION["units"].items() for name in (unit, *others)}
_NAMES |= {f"{name}s": unit for name, unit in _NAMES.items() if len(name) > 1}
_MEASURE = re.compile(
    r"(?P<number>.*(?:[\d})]|\\pi))(?P<gap>\s*)(?P<shape>(?:square|sq\.?|cubic)\s+)?(?P<name>[a-zA-Z]{1,12})\.?"
    r"(?P<power>\s*\^\s*(?:\{\s*[23]\s*\}|[23])|\s+(?:squared|cubed))?(?:\s*/\s*(?P<per>[a-zA-Z]{1,12}))?",
    re.DOTALL,
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def read_result(text: str) -> Result:
    """Return the expression and the unit of a result in LaTeX, Unicode or plain text."""
    text = _THOUSANDS.sub("", text.translate(_CHARACTERS).replace("\\$", "").replace("$", ""))
    text = _TEXT.sub(_unwrapped, _WRAPPERS.sub(r"\\text", _SPACES.sub(" ", text)))
    text = _PI.sub(r"\\pi ", _APPROXIMATELY.sub("=", _with_roots(text)))
    text = _NAME.sub("", text.strip()).strip().removesuffix(".")
    text, unit = _without_unit(_GROUPS.sub(lambda number: number[0].replace(" ", ""), text))
    text = _MIXED.sub(_sum, text).strip()
    # The parser would add up two numbers side by side, so they become a list.
    return Result(_SIDE_BY_SIDE.sub(", ", _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)), unit)


def _unwrapped(wrapped: re.Match[str]) -> str:
    """Return a unit or a degree sign without its `\\text{}`; other text is unchanged."""
    words = wrapped[1].strip()
    return (
        f" {words} "
        if words in ("o", "degree", "degrees") or _parsed_unit(f"1 {words}")
        else wrapped[0]
    )


def _with_roots(text: str) -> str:
    """Return the text with LaTeX roots. A root sign applies to the number, letter or bracket that
    follows it."""
    closings = _closings(text)
    edits: list[tuple[int, int, str]] = []
    """Start, end and replacement of each changed part; none overlap."""
    position = 0
    while (root := _ROOT.search(text, position)) is not None:
        begin, position = root.span()
        command = r"\sqrt[3]{" if root[1] == "∛" else r"\sqrt{"
        if (plain := _OPERAND.match(text, position)) is not None:
            position = plain.end()
            edits.append((begin, position, f"{command}{plain[0]}}}"))
        elif (closing := closings.get(position)) is not None:
            position += 1
            edits.append((begin, position, command))
            edits.append((closing, closing + 1, "}"))
    pieces: list[str] = []
    position = 0
    for begin, end, replacement in sorted(edits):
        pieces += text[position:begin], replacement
        position = end
    return "".join([*pieces, text[position:]])


def _closings(text: str) -> dict[int, int]:
    """Return the position of the bracket that closes each bracket; either kind closes either."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in "({":
            opened.append(bracket.start())
        elif opened:
            found[opened.pop()] = bracket.start()
    return found


def _without_unit(text: str) -> tuple[str, str]:
    if _TRIGONOMETRY.search(text):
        return _ANGLE.sub(r"(\1\\cdot\\frac{\\pi}{180})", text), ""
    if _DEGREES.search(text):
        return _DEGREES.sub(" ", text), "degree"
    if text.endswith("%"):
        return text.removesuffix("%").rstrip("\\ "), "percent"
    return _parsed_unit(text) or (text, "")


def _parsed_unit(text: str) -> tuple[str, str] | None:
    """Return number and unit of a text that ends in a known unit; None for algebra and for all
    other texts."""
    found = _MEASURE.fullmatch(text)
    if (
        found is None
        or found["name"] not in _NAMES
        or (found["per"] and found["per"] not in _NAMES)
    ):
        return None
    value = found["number"].rpartition("=")[2]
    if re.search(r"[a-zA-Z]", _COMMAND.sub("", value)) or (
        len(found["name"]) == 1 and not found["gap"]
    ):
        return None
    unit = _NAMES[found["name"]]
    if unit == "unit":
        return found["number"], ""
    shape = f"{found['shape'] or ''}{found['power'] or ''}"
    unit += "^2" * ("sq" in shape or "2" in shape) + "^3" * ("cub" in shape or "3" in shape)
    return found["number"], f"{unit}/{_NAMES[found['per']]}" if found["per"] else unit


def _sum(mixed: re.Match[str]) -> str:
    whole, *parts = mixed.groups()
    above, below = (part for part in parts if part is not None)
    return rf"({whole}+\frac{{{above}}}{{{below}}})" if int(above) < int(below) else mixed[0]


SECONDS = 5.0
"""Time limit of one comparison."""
MEMORY_BYTES = 4 << 30
"""Memory limit of the process."""


def equal(reference: str, answer: str) -> bool:
    """Return whether two expressions are equal. Units count if both have one; 25% is 0.25 or, as
    reference, 25."""
    gold = read_result(reference)
    given = read_result(answer)
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    if "percent" not in (gold.unit, given.unit) or gold.unit == given.unit:
        return _same(gold.expression, given.expression)
    if given.unit == "percent":
        return _same(gold.expression, f"({given.expression})/100")
    return _same(gold.expression, given.expression) or _same(
        f"({gold.expression})/100", given.expression
    )


def _same(reference: str, answer: str) -> bool:
    from math_verify import parse, verify

    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=0) for text in (reference, answer))
    return bool(verify(gold, given, timeout_seconds=None))


def main() -> None:
    """Answer lines until stdin closes."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        import math_verify  # noqa: F401 - the slow import must end before "ready"

        print(json.dumps("ready"), file=replies, flush=True)
        for line in sys.stdin:
            reference, answer = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                result = equal(reference, answer)
            except Exception:  # what the parser cannot read is not equal
                result = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(result), file=replies, flush=True)


if __name__ == "__main__":
    main()
