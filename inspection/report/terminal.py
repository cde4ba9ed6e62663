"""The summary on the terminal: verdicts first, then what to do, then the numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from inspection.report.columns import Column
from inspection.report.measures import BY_KEY, MEASURES, QUESTIONS, Verdict
from inspection.report.trends import Alarm
from inspection.report.writing import (
    alias_heading,
    alias_lines,
    cause_rows,
    cell,
    clean,
    describe_gain,
    examples,
    unknown_actions,
    what_to_do,
    where,
)

_WIDTH = 110
_MOST_COLUMNS = 5
_MOST_ADVICE = 6


def summarize(columns: Sequence[Column], alarms: Sequence[Alarm], written: Sequence[str]) -> str:
    """The whole summary as text."""
    several = len(columns) > 1
    lines = [*_grid(columns), ""] if several else [*_verdicts(columns[0], False), ""]
    if alarms:
        lines += ["Over updates", *(_fold(f"{a.verdict.upper():5} {a.name}: {a.sentence}", "  ") for a in alarms), ""]
    advice = what_to_do(columns, alarms)
    if advice:
        lines += ["What to do first", *(_fold(sentence, "  - ") for sentence in advice[:_MOST_ADVICE]), ""]
    if len(columns) <= _MOST_COLUMNS:
        lines += _numbers(columns)
    else:
        lines += [f"report.md has the numbers and examples of all {len(columns)} columns.", ""]
    for column in columns[:_MOST_COLUMNS]:
        lines += [*_verdicts(column, True), ""] if several else []
        lines += _details(column, several)
    return "\n".join([*lines, *written])


def _grid(columns: Sequence[Column]) -> list[str]:
    """One row of verdicts per column."""
    rows = [["", "1 diverse", "2 reasoning", "3 valid", "4 failures", "valid", "success", "episodes"]]
    for column in columns:
        verdicts = [_shout(answer.verdict) for answer in column.answers.values()]
        numbers = [BY_KEY[key].show(column.values[key].number) for key in ("valid_actions", "success")]
        rows.append([clean(column.label, 40), *verdicts, *numbers, str(len(column.tally.episodes))])
    return _align(rows)


def _shout(verdict: Verdict) -> str:
    return "----" if verdict == Verdict.NONE else verdict.upper()


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _verdicts(column: Column, named: bool) -> list[str]:
    tally = column.tally
    tasks = len({episode.task for episode in tally.episodes})
    count = f"{len(tally.episodes)} episode{'s' * (len(tally.episodes) != 1)}, {tally.turns} turns, {tasks} task"
    head = f"{clean(column.label)}: {count}{'s' * (tasks != 1)}"
    lines = [head if named or column.run == column.label else f"{clean(column.run)}, {head}"]
    for question, answer in column.answers.items():
        lines.append(
            _fold(f"{_shout(answer.verdict):5} {question} {QUESTIONS[question]} {clean(answer.sentence, 400)}", "  ")
        )
    return [*lines, *(_fold(f"note: {caution}", "  ") for caution in column.cautions)]


def _numbers(columns: Sequence[Column]) -> list[str]:
    labels = [clean(column.label, 24) for column in columns]
    rows = [["number", *labels, "healthy"]]
    for item in MEASURES:
        cells = [cell(column, item) for column in columns]
        if any(text != "-" for text in cells):
            rows.append([f"{item.question} {item.title}", *cells, item.healthy()])
    return [*_align(rows), ""]


def _details(column: Column, named: bool) -> list[str]:
    suffix = f" ({clean(column.label, 24)})" if named else ""
    lines = []
    if column.rejections.causes:
        lines += [f"Invalid answers{suffix}"]
        for cause, count, shown, change in cause_rows(column):
            lines += [f"  {count:6}  {cause}, for example {shown!r}", f"          -> {change}"]
        lines += [_fold(text, "  ") for text in (describe_gain(column),) if text]
        if column.rejections.unknown:
            lines += [_fold(f"Wanted, but not offered: {unknown_actions(column)}", "  ")]
        if alias_lines(column):
            lines += [f"  {alias_heading(column)}", *(f"    {line}" for line in alias_lines(column)[:6])]
        lines += [""]
    unused = column.values["unused_actions"]
    if unused.number:
        lines += [_fold(f"Never used{suffix}: {clean(unused.note, 200)}", ""), ""]
    shown = examples(column)
    if shown:
        lines += [f"Worst examples{suffix}; slime-verlog view shows them by seed and turn"]
        lines += [_fold(f"{what}: {where(place)} {clean(place.text)!r}", "  - ") for what, place in shown] + [""]
    return lines


def _fold(text: str, mark: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=mark, subsequent_indent=" " * (len(mark) + 2))
