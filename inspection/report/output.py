"""Renders the report as a page of Markdown, which is also what the terminal shows, and as JSON."""

import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from inspection.report.columns import Alarm, Column
from inspection.report.invalid import CHANGES
from inspection.report.numbers import MEASURES, QUESTIONS, Measure, Verdict
from inspection.report.reading import Episode
from inspection.text import align

_MAX_TEXT = 140
_MAX_LISTED = 100
_CELL_BORDER = re.compile(r"(?<!\\)\|")


def clean(text: str, limit: int = _MAX_TEXT) -> str:
    """Return the text as one line without control characters, which would change a terminal or a page."""
    spaced = " ".join(text[: 16 * limit].split())
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in spaced[: 4 * limit])
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def code(text: object, limit: int = _MAX_TEXT) -> str:
    """Return text of a record as Markdown code, in which nothing is markup; empty for empty text."""
    plain = clean(str(text), limit).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`" if plain.strip() else ""


def render_json(columns: Sequence[Column], alarms: Sequence[Alarm]) -> str:
    """Return all numbers, verdicts and examples, for programs."""
    data = {"columns": list(map(_as_json, columns)), "alarms": [vars(alarm) for alarm in alarms]}
    return json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n"


def _as_json(column: Column) -> dict[str, Any]:
    rejections = column.rejections
    aliases = rejections.aliases.most_common(_MAX_LISTED)
    invalid = [(f"invalid: {cause}", place) for cause, place in rejections.examples.items()]
    return {
        "label": column.label,
        "run": column.run,
        "player": column.player,
        "episodes": len(column.episodes),
        "turns": column.turns,
        "cautions": column.cautions,
        "questions": column.questions,
        "numbers": {
            item.key: {**vars(column.values[item.key]), "verdict": column.verdicts[item.key], "healthy": item.healthy()}
            for item in MEASURES
        },
        "invalid": rejections.causes,
        "aliases": [{"text": text, "action": action, "count": count} for (text, action), count in aliases],
        "unknown": dict(rejections.unknown.most_common(_MAX_LISTED)),
        "examples": [{"what": what, **place._asdict()} for what, place in [*invalid, *column.examples]],
    }


def render_page(columns: Sequence[Column], alarms: Sequence[Alarm]) -> str:
    """Return the report as Markdown with aligned tables: verdicts first, then what to do, then the numbers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment.filters |= {"code": code}
    environment.globals |= {"questions": QUESTIONS, "measures": MEASURES, "changes": CHANGES}
    environment.globals |= {"cell": _cell, "ends": _ends}
    page = environment.get_template("report.md.j2").render(
        columns=columns, alarms=alarms, advice=_find_advice(columns, alarms)
    )
    lines: list[str] = []
    for is_table, group in itertools.groupby(page.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            rows = [[cell.strip() for cell in _CELL_BORDER.split(line)] for line in group]
            lines += [line.strip() for line in align(rows, border=" | ")]
        else:
            lines += group
    return "\n".join(lines) + "\n"


def _find_advice(columns: Sequence[Column], alarms: Sequence[Alarm]) -> list[str]:
    """Return the advice of all alarms and columns, the most urgent first, each once."""
    advice = [(alarm.verdict, alarm.advice) for alarm in alarms]
    advice += [(column.verdicts[item.key], item.advice) for column in columns for item in MEASURES]
    urgent = [text for verdict, text in advice if verdict == Verdict.ACT]
    others = [text for verdict, text in advice if verdict == Verdict.LOOK]
    return list(dict.fromkeys(urgent + others))


def _cell(column: Column, item: Measure) -> str:
    """A number with its standard error, and its verdict unless that is good."""
    value, verdict = column.values[item.key], column.verdicts[item.key]
    text = item.show(value.number)
    if value.error is not None:
        text += f" ± {item.show(value.error)}"
    return f"{text} **{verdict}**" if verdict in (Verdict.LOOK, Verdict.ACT) else text


def _ends(episodes: Sequence[Episode]) -> str:
    """How the episodes of a task ended, with counts."""
    counts = Counter("success" if episode.success else episode.stop for episode in episodes)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
