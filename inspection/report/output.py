"""Writes the report: the summary on the terminal, `report.md` and `report.json`."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inspection.report.columns import Alarm, Column
from inspection.report.invalid import ALIAS_KINDS, CAUSES, Place
from inspection.report.measures import BY_KEY, MEASURES, QUESTIONS, Measure, Verdict
from inspection.report.reading import Episode
from inspection.text import align

_WIDTH = 110
_MAX_TEXT = 140
_MAX_COLUMNS, _MAX_ADVICE = 5, 6
"""Of the summary on the terminal."""
_MAX_TASKS, _MAX_ALIASES = 60, 15
_PLOTS = {1: "diversity", 2: "reasoning", 3: "validity", 4: "failures"}


def clean(text: str, most: int = _MAX_TEXT) -> str:
    """Return the text as one line without control characters, which would change a terminal or a page."""
    spaced = " ".join(text[: 16 * most].split())
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in spaced[: 4 * most])
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def write_json(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm]) -> None:
    """Write all numbers, verdicts and examples, for programs."""
    data = {"columns": [_as_json(column) for column in columns], "alarms": [vars(alarm) for alarm in alarms]}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n", "utf-8", "replace")


def _as_json(column: Column) -> dict[str, Any]:
    return {
        "label": column.label,
        "run": column.run,
        "player": column.counts.player,
        "episodes": len(column.counts.episodes),
        "turns": column.counts.turns,
        "cautions": list(column.cautions),
        "questions": {
            str(question): {"text": QUESTIONS[question], "verdict": answer.verdict, "sentence": answer.sentence}
            for question, answer in column.answers.items()
        },
        "numbers": {
            item.key: {**vars(column.values[item.key]), "verdict": column.verdicts[item.key], "healthy": item.healthy()}
            for item in MEASURES
        },
        "actions": dict(column.counts.actions.most_common(100)),
        "invalid": dict(column.rejections.causes),
        "translatable": column.rejections.catchable,
        "aliases": [vars(alias) for alias in column.rejections.aliases[:100]],
        "unknown": dict(column.rejections.unknown[:100]),
        "examples": [
            {"what": what, "task": place.task, "seed": place.seed, "turn": place.turn or None, "text": place.text}
            for what, place in _examples(column)
        ],
    }


def write_page(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm], plots: Sequence[str]) -> None:
    """Write the report as Markdown; `plots` are names of PNG files beside it."""
    labels = [_label(column) for column in columns]
    verdicts = [[f"{q}. {title}", *(f"**{c.answers[q].verdict}**" for c in columns)] for q, title in QUESTIONS.items()]
    verdicts.append(["episodes / turns", *(f"{len(c.counts.episodes)} / {c.counts.turns}" for c in columns)])
    lines = ["# Report", "", _table(["", *labels], verdicts), ""]
    lines += [f"- {label}: {caution}" for label, c in zip(labels, columns, strict=True) for caution in c.cautions]
    if alarms:
        lines += ["", "## Over updates", ""]
        lines += [f"- **{alarm.verdict}**, {alarm.name}: {alarm.sentence}. {alarm.advice}" for alarm in alarms]
    if advice := _what_to_do(columns, alarms):
        lines += ["", "## What to do", "", *(f"{number}. {text}" for number, text in enumerate(advice, 1))]
    for question, title in QUESTIONS.items():
        lines += ["", f"## {question}. {title}", ""]
        for label, answer in zip(labels, (column.answers[question] for column in columns), strict=True):
            lines.append(f"- {label}: **{answer.verdict}**. {_escaped(answer.sentence, 400)}")
        lines += ["", _table(["number", *labels, "healthy", "detail"], _number_rows(columns, question))]
        lines += [f"\n![{title}]({name})" for name in plots if _PLOTS[question] in name]
        if question == 3:
            lines += [line for column in columns for line in _invalid(column)]
        if question == 4:
            head = ("", "task", "episodes", "success", "return", "valid", "turns", "ends")
            lines += ["", "### By task", "", _table(head, [row for c in columns for row in _task_rows(c)])]
    if "report_updates.png" in plots:
        lines += ["", "![Over updates](report_updates.png)"]
    lines += ["", "## Worst examples", "", "`slime-verlog view` shows them by seed and turn.", ""]
    rows = [[_label(c), what, _escaped(_where(p), 120), _code(p.text)] for c in columns for what, p in _examples(c)]
    lines += [_table(["", "what", "where", "text"], rows) if rows else "There are none.", ""]
    path.write_text("\n".join(lines), "utf-8", "replace")


def _number_rows(columns: Sequence[Column], question: int) -> list[list[str]]:
    rows = []
    for item in (item for item in MEASURES if item.question == question):
        notes = [column.values[item.key].note for column in columns]
        detail = _escaped("; ".join(dict.fromkeys(note for note in notes if note)), 200)
        rows.append([item.title, *(_cell(column, item) for column in columns), item.healthy(), detail])
    return rows


def _task_rows(column: Column) -> list[list[str]]:
    """One row per task: episodes, success, return, valid answers, turns, and how episodes end."""
    tasks: dict[str, list[Episode]] = {}
    for episode in column.counts.episodes:
        tasks.setdefault(episode.task, []).append(episode)
    rows = []
    for task, group in list(tasks.items())[:_MAX_TASKS]:
        n, turns = len(group), sum(episode.turns for episode in group)
        ends = ", ".join(f"{count} {name}" for name, count in Counter(e.stop for e in group).most_common())
        numbers = [
            f"{sum(e.success for e in group) / n:.1%}",
            f"{sum(e.episode_return for e in group) / n:.3g}",
            f"{sum(e.valid for e in group) / turns:.1%}" if turns else "-",
            f"{turns / n:.1f}",
        ]
        rows.append([_label(column), _escaped(task, 60), str(n), *numbers, _escaped(ends, 200)])
    return rows


def _invalid(column: Column) -> list[str]:
    if not column.rejections.causes:
        return []
    rows = [[cause, str(count), _code(shown), change] for cause, count, shown, change in _cause_rows(column)]
    table = _table(["cause", "count", "example", "change"], rows)
    lines = ["", f"### Invalid answers: {_label(column)}", "", table, "", *_gain(column)]
    if wanted := _unknown_actions(column):
        lines += ["", _escaped(wanted, 640)]
    if aliases := _aliases(column):
        lines += ["", aliases[0], "", *(f"    {line}" for line in aliases[1:])]
    return lines


def _label(column: Column) -> str:
    return _escaped(column.label, 60)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escaped(text: str, most: int) -> str:
    """Text of a record, without effect as Markdown or HTML."""
    plain = re.sub(r"([\\`*_\[\]|])", r"\\\1", clean(text, most))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    return f"`` {clean(text).replace('`', chr(39)).replace('|', chr(92) + '|')} ``" if text.strip() else ""


def summarize(columns: Sequence[Column], alarms: Sequence[Alarm], written: Sequence[str]) -> str:
    """Return the summary for the terminal: verdicts first, then what to do, then the numbers."""
    several = len(columns) > 1
    lines = [*(_grid(columns) if several else _verdicts(columns[0], False)), ""]
    if alarms:
        lines += ["Over updates", *(_fold(f"{a.verdict.upper():5} {a.name}: {a.sentence}", "  ") for a in alarms), ""]
    if advice := _what_to_do(columns, alarms):
        lines += ["What to do first", *(_fold(sentence, "  - ") for sentence in advice[:_MAX_ADVICE]), ""]
    if len(columns) <= _MAX_COLUMNS:
        rows = [["number", *(clean(column.label, 24) for column in columns), "healthy"]]
        for item in MEASURES:
            cells = [_cell(column, item) for column in columns]
            if any(text != "-" for text in cells):
                rows.append([f"{item.question} {item.title}", *cells, item.healthy()])
        lines += [*align(rows), ""]
    else:
        lines += [f"report.md has the numbers and examples of all {len(columns)} columns.", ""]
    for column in columns[:_MAX_COLUMNS]:
        lines += [*_verdicts(column, True), ""] if several else []
        lines += _details(column, f" ({clean(column.label, 24)})" if several else "")
    return "\n".join([*lines, *written])


def _grid(columns: Sequence[Column]) -> list[str]:
    """One row of verdicts per column."""
    rows = [["", "1 diverse", "2 reasoning", "3 valid", "4 failures", "valid", "success", "episodes"]]
    for column in columns:
        verdicts = [_shout(answer.verdict) for answer in column.answers.values()]
        numbers = [BY_KEY[key].show(column.values[key].number) for key in ("valid_actions", "success")]
        rows.append([clean(column.label, 40), *verdicts, *numbers, str(len(column.counts.episodes))])
    return align(rows)


def _shout(verdict: Verdict) -> str:
    return "----" if verdict == Verdict.NONE else verdict.upper()


def _verdicts(column: Column, named: bool) -> list[str]:
    episodes = column.counts.episodes
    tasks = len({episode.task for episode in episodes})
    count = f"{len(episodes)} episode{'s' * (len(episodes) != 1)}, {column.counts.turns} turns, {tasks} task"
    head = f"{clean(column.label)}: {count}{'s' * (tasks != 1)}"
    lines = [head if named or column.run == column.label else f"{clean(column.run)}, {head}"]
    for question, answer in column.answers.items():
        sentence = f"{_shout(answer.verdict):5} {question} {QUESTIONS[question]} {clean(answer.sentence, 400)}"
        lines.append(_fold(sentence, "  "))
    return [*lines, *(_fold(f"note: {caution}", "  ") for caution in column.cautions)]


def _details(column: Column, suffix: str) -> list[str]:
    lines = []
    if column.rejections.causes:
        lines += [f"Invalid answers{suffix}"]
        for cause, count, shown, change in _cause_rows(column):
            lines += [f"  {count:6}  {cause}, for example {shown!r}", f"          -> {change}"]
        lines += [_fold(text, "  ") for text in (*_gain(column), _unknown_actions(column)) if text]
        if aliases := _aliases(column):
            lines += [f"  {aliases[0]}", *(f"    {line}" for line in aliases[1:7])]
        lines += [""]
    unused = column.values["unused_actions"]
    if unused.number:
        lines += [_fold(f"Never used{suffix}: {clean(unused.note, 200)}", ""), ""]
    if shown := _examples(column):
        lines += [f"Worst examples{suffix}; slime-verlog view shows them by seed and turn"]
        lines += [_fold(f"{what}: {_where(place)} {clean(place.text)!r}", "  - ") for what, place in shown] + [""]
    return lines


def _fold(text: str, mark: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=mark, subsequent_indent=" " * (len(mark) + 2))


def _cell(column: Column, item: Measure) -> str:
    """A number with its standard error and its verdict, if it is not good."""
    value, verdict = column.values[item.key], column.verdicts[item.key]
    text = item.show(value.number)
    if value.error is not None:
        text += f" ± {item.show(value.error)}"
    return f"{text} [{verdict}]" if verdict in (Verdict.LOOK, Verdict.ACT) else text


def _what_to_do(columns: Sequence[Column], alarms: Sequence[Alarm]) -> list[str]:
    """The advice of all columns and alarms, the most urgent first, each once."""
    found: list[tuple[bool, str]] = [(alarm.verdict != Verdict.ACT, alarm.advice) for alarm in alarms]
    for answer in (answer for column in columns for answer in column.answers.values()):
        found += [(answer.verdict != Verdict.ACT, sentence) for sentence in answer.advice]
    return list(dict.fromkeys(sentence for _, sentence in sorted(found, key=lambda item: item[0])))


def _gain(column: Column) -> list[str]:
    """What a translation would change, in one sentence; none if it would catch nothing."""
    catchable, turns, valid = column.rejections.catchable, column.counts.turns, column.counts.valid
    if not catchable:
        return []
    gain = f"from {valid / turns:.1%} to {(valid + catchable) / turns:.1%}"
    return [f"Translations would catch {catchable} of {turns - valid} invalid answers: valid answers rise {gain}."]


def _aliases(column: Column) -> list[str]:
    """Entries for a table of aliases, as Python, the most frequent first; the first line says where they belong."""
    paths = list(column.counts.env_paths)
    is_crafter = paths == ["envs.crafter"]
    path = paths[0] if len(paths) == 1 else ""
    name = f"`{path}`" if re.fullmatch(r"[\w./ -]{1,100}", path) else "the environment"
    table = "`_SYNONYMS` in `envs/crafter/vocabulary.py`" if is_crafter else f"the method `translate` of {name}"
    lines = [f"Candidates for {table}:"]
    aliases = [alias for alias in column.rejections.aliases if alias.kind in ALIAS_KINDS]
    for alias in aliases[:_MAX_ALIASES]:
        text = clean(alias.text, 60)
        lines.append(f"{(text.title() if is_crafter else text)!r}: {clean(alias.action, 60)!r},  # {alias.count} times")
    return lines if aliases else []


def _cause_rows(column: Column) -> list[tuple[str, int, str, str]]:
    """Cause, count, example and change, the most frequent first."""
    rows = []
    for cause, count in column.rejections.causes.items():
        example = column.rejections.examples[cause]
        rows.append((cause, count, clean(example.candidate or example.place.text, 60), CAUSES[cause]))
    return rows


def _unknown_actions(column: Column, most: int = 8) -> str:
    """Actions that the model wants and the environment lacks, in one sentence."""
    wanted = ", ".join(f"{clean(text, 40)} ({count})" for text, count in column.rejections.unknown[:most])
    return f"Wanted, but not offered: {wanted}" if wanted else ""


def _examples(column: Column) -> list[tuple[str, Place]]:
    """The worst examples, each with what is wrong."""
    counts, rejections = column.counts, column.rejections
    found = [
        (f"invalid: {cause}, {rejections.causes[cause]} times", rejections.examples[cause].place)
        for cause in list(rejections.causes)[:4]
    ]
    found += [(f"loop of {size} turns", place) for size, place in counts.loops[:3]]
    repeated = counts.openings.most_common(1)
    if repeated and repeated[0][1] > 0.2 * counts.reasoned and counts.reasoned > 10:
        text, count = repeated[0]
        found.append((f"{count} of {counts.reasoned} reasonings begin with this", Place("", None, 0, text)))
    median = column.values["reasoning_words"].number or 0
    found += [(f"longest reasoning, {k} words", place) for k, place in counts.longest[:1] if k > 3 * median]
    found += [(f"shortest reasoning, {-k} word(s)", place) for k, place in counts.shortest[:1] if k > -3]
    faults = [episode for episode in counts.episodes if episode.fault]
    found += [("failed", Place(e.task, e.seed, e.turns, e.fault or "")) for e in faults[:2]]
    return found


def _where(place: Place) -> str:
    """Task, seed and turn of an example, for `slime-verlog view`."""
    return f"{clean(place.task, 40)}, seed {clean(str(place.seed), 24)}, turn {place.turn}" if place.turn else ""
