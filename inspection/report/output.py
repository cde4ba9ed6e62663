"""Renders the report as a page of Markdown, which is also what the terminal shows, and as JSON."""

import itertools
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import jinja2

from inspection.records import Record
from inspection.report.columns import Column
from inspection.report.invalid import CHANGES
from inspection.report.numbers import MEASURES, QUESTIONS, Measure, Verdict
from inspection.text import align

_MAX_TEXT = 140
_MAX_LISTED = 100
_CELL_BORDER = re.compile(r"(?<!\\)\|")


def clean(text: str, limit: int = _MAX_TEXT) -> str:
    """Return the text as one line without control characters, which would change a terminal or a
    page."""
    spaced = " ".join(text[: 16 * limit].split())
    plain = "".join(
        " " if unicodedata.category(char).startswith("C") else char for char in spaced[: 4 * limit]
    )
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def code(text: object, limit: int = _MAX_TEXT) -> str:
    """Return text of a record as Markdown code, in which nothing is markup; empty for empty
    text."""
    plain = clean(str(text), limit).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain.strip() else ""


def render_json(columns: Sequence[Column]) -> str:
    """Return all numbers, verdicts and examples, for programs."""
    return (
        json.dumps(
            {"columns": list(map(_as_json, columns))}, indent=1, ensure_ascii=False, default=str
        )
        + "\n"
    )


def _as_json(column: Column) -> Record:
    rejections = column.rejections
    aliases = rejections.aliases.most_common(_MAX_LISTED)
    examples = [(f"invalid: {cause}", place) for cause, place in rejections.examples.items()]
    numbers = {}
    for item in MEASURES:
        judged = {"verdict": column.verdicts[item.key], "healthy": item.healthy()}
        numbers[item.key] = {"number": column.values[item.key], **judged}
    return {
        "label": column.label,
        "player": column.player,
        "episodes": len(column.episodes),
        "turns": column.turns,
        "cautions": column.cautions,
        "questions": column.questions,
        "numbers": numbers,
        "invalid": rejections.causes,
        "aliases": [
            {"text": text, "action": action, "count": count} for (text, action), count in aliases
        ],
        "unknown": dict(rejections.unknown.most_common(_MAX_LISTED)),
        "examples": [
            {"what": what, **place._asdict()} for what, place in [*examples, *column.examples]
        ],
    }


def render_page(columns: Sequence[Column]) -> str:
    """Return the report as Markdown with aligned tables: verdicts first, then what to do, then the
    numbers."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment.filters |= {"code": code}
    environment.globals |= {"questions": QUESTIONS, "measures": MEASURES, "changes": CHANGES}
    environment.globals["cell"] = _cell
    template = environment.get_template("report.md.j2")
    page = template.render(columns=columns, advice=_find_advice(columns))
    lines: list[str] = []
    for is_table, group in itertools.groupby(page.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            rows = [[cell.strip() for cell in _CELL_BORDER.split(line)] for line in group]
            lines += [line.strip() for line in align(rows, border=" | ")]
        else:
            lines += group
    return "\n".join(lines) + "\n"


def _find_advice(columns: Sequence[Column]) -> list[str]:
    """Return the advice of all columns, the most urgent first, each once."""
    urgent = []
    others = []
    for column in columns:
        for item in MEASURES:
            verdict = column.verdicts[item.key]
            if verdict == Verdict.ACT:
                urgent.append(item.advice)
            elif verdict == Verdict.LOOK:
                others.append(item.advice)
    return list(dict.fromkeys(urgent + others))


def _cell(column: Column, item: Measure) -> str:
    """A number, and its verdict unless that is good."""
    verdict = column.verdicts[item.key]
    text = item.show(column.values[item.key])
    return f"{text} **{verdict}**" if verdict in (Verdict.LOOK, Verdict.ACT) else text
