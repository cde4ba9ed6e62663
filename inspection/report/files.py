"""Writes `report.md` and `report.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspection.report.columns import Column
from inspection.report.measures import MEASURES, QUESTIONS
from inspection.report.tally import EpisodeLine
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

_MOST_TASKS = 60
_TASK_HEAD = ("", "task", "episodes", "success", "return", "valid", "turns", "ends")
_PLOTS = {1: "diversity", 2: "reasoning", 3: "validity", 4: "failures"}


def write_json(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm]) -> None:
    """All numbers, verdicts and examples, for programs."""
    data = {"columns": [_column(column) for column in columns], "alarms": [vars(alarm) for alarm in alarms]}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n", "utf-8", "replace")


def _column(column: Column) -> dict[str, Any]:
    return {
        "label": column.label,
        "run": column.run,
        "player": column.tally.player,
        "episodes": len(column.tally.episodes),
        "turns": column.tally.turns,
        "cautions": list(column.cautions),
        "questions": {
            str(question): {"text": QUESTIONS[question], "verdict": answer.verdict, "sentence": answer.sentence}
            for question, answer in column.answers.items()
        },
        "numbers": {
            item.key: {**vars(column.values[item.key]), "verdict": column.verdicts[item.key], "healthy": item.healthy()}
            for item in MEASURES
        },
        "actions": dict(column.tally.actions.most_common(100)),
        "invalid": dict(column.rejections.causes),
        "translatable": column.rejections.catchable,
        "aliases": [vars(alias) for alias in column.rejections.aliases[:100]],
        "unknown": dict(column.rejections.unknown[:100]),
        "examples": [
            {"what": what, "task": place.task, "seed": place.seed, "turn": place.turn or None, "text": place.text}
            for what, place in examples(column)
        ],
    }


def write_page(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm], plots: Sequence[str]) -> None:
    """The report as Markdown; `plots` are names of PNG files beside it."""
    lines = ["# Report", "", _table(["", *map(_label, columns)], _verdict_rows(columns)), ""]
    for column in columns:
        lines += [f"- {_label(column)}: {caution}" for caution in column.cautions]
    if alarms:
        lines += ["", "## Over updates", ""]
        lines += [f"- **{alarm.verdict}**, {alarm.name}: {alarm.sentence}. {alarm.advice}" for alarm in alarms]
    advice = what_to_do(columns, alarms)
    if advice:
        lines += ["", "## What to do", "", *(f"{number}. {text}" for number, text in enumerate(advice, 1))]
    for question, title in QUESTIONS.items():
        lines += ["", f"## {question}. {title}", ""]
        lines += [
            f"- {_label(c)}: **{c.answers[question].verdict}**. {_text(c.answers[question].sentence, 400)}"
            for c in columns
        ]
        lines += ["", _table(["number", *map(_label, columns), "healthy", "detail"], _number_rows(columns, question))]
        lines += [f"\n![{title}]({name})" for name in plots if _PLOTS[question] in name]
        if question == 3:
            lines += [line for column in columns for line in _invalid(column)]
        if question == 4:
            lines += ["", "### By task", "", _table(_TASK_HEAD, [row for c in columns for row in _task_rows(c)])]
    if "report_updates.png" in plots:
        lines += ["", "![Over updates](report_updates.png)"]
    lines += ["", "## Worst examples", "", "`slime-verlog view` shows them by seed and turn.", ""]
    rows = [[_label(c), what, _text(where(p), 120), _code(p.text)] for c in columns for what, p in examples(c)]
    lines += [_table(["", "what", "where", "text"], rows) if rows else "There are none.", ""]
    path.write_text("\n".join(lines), "utf-8", "replace")


def _verdict_rows(columns: Sequence[Column]) -> list[list[str]]:
    rows = [[f"{q}. {title}", *(f"**{c.answers[q].verdict}**" for c in columns)] for q, title in QUESTIONS.items()]
    return [*rows, ["episodes / turns", *(f"{len(c.tally.episodes)} / {c.tally.turns}" for c in columns)]]


def _number_rows(columns: Sequence[Column], question: int) -> list[list[str]]:
    rows = []
    for item in (item for item in MEASURES if item.question == question):
        notes = [column.values[item.key].note for column in columns]
        detail = _text("; ".join(dict.fromkeys(note for note in notes if note)), 200)
        rows.append([item.title, *(cell(column, item) for column in columns), item.healthy(), detail])
    return rows


def _task_rows(column: Column) -> list[list[str]]:
    """One row per task: episodes, success, return, valid answers, turns, and how episodes end."""
    tasks: dict[str, list[EpisodeLine]] = {}
    for episode in column.tally.episodes:
        tasks.setdefault(episode.task, []).append(episode)
    rows = []
    for task, group in list(tasks.items())[:_MOST_TASKS]:
        n, turns = len(group), sum(episode.turns for episode in group)
        ends = ", ".join(f"{count} {name}" for name, count in Counter(e.stop for e in group).most_common())
        numbers = [
            f"{sum(e.success for e in group) / n:.1%}",
            f"{sum(e.episode_return for e in group) / n:.3g}",
            f"{sum(e.valid for e in group) / turns:.1%}" if turns else "-",
            f"{turns / n:.1f}",
        ]
        rows.append([_label(column), _text(task, 60), str(n), *numbers, _text(ends, 200)])
    return rows


def _invalid(column: Column) -> list[str]:
    if not column.rejections.causes:
        return []
    rows = [[cause, str(count), _code(shown), change] for cause, count, shown, change in cause_rows(column)]
    lines = [
        "",
        f"### Invalid answers: {_label(column)}",
        "",
        _table(["cause", "count", "example", "change"], rows),
        "",
    ]
    lines += [text for text in (describe_gain(column),) if text]
    if column.rejections.unknown:
        lines += ["", f"Wanted, but not offered: {_text(unknown_actions(column), 600)}"]
    if alias_lines(column):
        lines += ["", alias_heading(column), "", *(f"    {line}" for line in alias_lines(column))]
    return lines


def _label(column: Column) -> str:
    return _text(column.label, 60)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(text: str, most: int) -> str:
    """Text of a record, without effect as Markdown or HTML."""
    plain = clean(text, most)
    for char in "\\`*_[]|":
        plain = plain.replace(char, "\\" + char)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    return f"`` {clean(text).replace('`', chr(39)).replace('|', chr(92) + '|')} ``" if text.strip() else ""
