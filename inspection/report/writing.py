"""Shared by the terminal summary and the Markdown page: safe text, tables, examples, and what to do first."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from inspection.report.columns import Column
from inspection.report.measures import Measure, Verdict
from inspection.report.rejections import CAUSES, alias_place
from inspection.report.tally import Place
from inspection.report.translations import ALIAS_KINDS
from inspection.report.trends import Alarm

MOST_ALIASES = 15
_MOST_TEXT = 140


def clean(text: str, most: int = _MOST_TEXT) -> str:
    """One line without control characters, which would change a terminal or a page."""
    spaced = " ".join(text[: 16 * most].split())
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in spaced[: 4 * most])
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def cell(column: Column, item: Measure) -> str:
    """A number with its standard error and its verdict, if it is not good."""
    value, verdict = column.values[item.key], column.verdicts[item.key]
    text = item.show(value.number)
    if value.error is not None:
        text += f" ± {item.show(value.error)}"
    return f"{text} [{verdict}]" if verdict in (Verdict.LOOK, Verdict.ACT) else text


def what_to_do(columns: Sequence[Column], alarms: Sequence[Alarm]) -> list[str]:
    """The advice of all columns and alarms, the most urgent first, each once."""
    found: list[tuple[bool, str]] = [(alarm.verdict != Verdict.ACT, alarm.advice) for alarm in alarms]
    for column in columns:
        for answer in column.answers.values():
            found += [(answer.verdict != Verdict.ACT, sentence) for sentence in answer.advice]
    return list(dict.fromkeys(sentence for _, sentence in sorted(found, key=lambda item: item[0])))


def describe_gain(column: Column) -> str:
    """What a translation would change; empty if nothing was rejected that it would catch."""
    catchable, turns, valid = column.rejections.catchable, column.tally.turns, column.tally.valid
    if not catchable:
        return ""
    gain = f"from {valid / turns:.1%} to {(valid + catchable) / turns:.1%}"
    return f"Translations would catch {catchable} of {turns - valid} invalid answers: valid answers rise {gain}."


def alias_lines(column: Column) -> list[str]:
    """Entries for a table of aliases, as Python, the most frequent first; the other kinds need a rule instead."""
    title = list(column.tally.env_paths) == ["envs.crafter"]
    aliases = [alias for alias in column.rejections.aliases if alias.kind in ALIAS_KINDS]
    lines = []
    for alias in aliases[:MOST_ALIASES]:
        text = clean(alias.text, 60)
        lines.append(f"{(text.title() if title else text)!r}: {clean(alias.action, 60)!r},  # {alias.count} times")
    return lines


def alias_heading(column: Column) -> str:
    """Where the aliases belong."""
    return f"Candidates for {alias_place(column.tally)}:"


def cause_rows(column: Column) -> list[tuple[str, int, str, str]]:
    """Cause, count, example and change, the most frequent first."""
    rows = []
    for cause, count in column.rejections.causes.items():
        example = column.rejections.examples[cause]
        shown = clean(example.candidate or example.place.text, 60)
        rows.append((cause, count, shown, CAUSES[cause]))
    return rows


def unknown_actions(column: Column, most: int = 8) -> str:
    """Actions that the model wants and the environment lacks."""
    return ", ".join(f"{clean(text, 40)} ({count})" for text, count in column.rejections.unknown[:most])


def examples(column: Column) -> list[tuple[str, Place]]:
    """The worst examples, each with what is wrong."""
    found = [
        (f"invalid: {cause}, {column.rejections.causes[cause]} times", column.rejections.examples[cause].place)
        for cause in list(column.rejections.causes)[:4]
    ]
    found += [(f"loop of {size} turns", place) for size, place in column.tally.loops[:3]]
    repeated = column.tally.openings.most_common(1)
    if repeated and repeated[0][1] > 0.2 * column.tally.reasoned and column.tally.reasoned > 10:
        text, count = repeated[0]
        found.append((f"{count} of {column.tally.reasoned} reasonings begin with this", Place("", None, 0, text)))
    median = column.values["reasoning_words"].number or 0
    longest = column.tally.longest[:1]
    found += [(f"longest reasoning, {size} words", place) for size, place in longest if size > 3 * median]
    shortest = column.tally.shortest[:1]
    found += [(f"shortest reasoning, {-size} word(s)", place) for size, place in shortest if size > -3]
    faults = [episode for episode in column.tally.episodes if episode.fault]
    found += [("failed", Place(e.task, e.seed, e.turns, e.fault or "")) for e in faults[:2]]
    return found


def where(place: Place) -> str:
    """Task, seed and turn of an example, for `slime-verlog view`."""
    return f"{clean(place.task, 40)}, seed {clean(str(place.seed), 24)}, turn {place.turn}" if place.turn else ""
