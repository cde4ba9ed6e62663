"""Writes the report: the summary on the terminal, `report.md` and `report.json`."""

import json
import re
import shutil
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from embedded.run.folder import write_text
from inspection.report.columns import Alarm, Column
from inspection.report.invalid import ALIAS_KINDS, CAUSES, Place
from inspection.report.numbers import BY_KEY, MEASURES, QUESTIONS, Measure, Verdict
from inspection.report.reading import EXCERPT
from inspection.text import align

_MAX_WIDTH = 110
_MAX_TEXT = 140
_MAX_ALIASES = 15


def clean(text: str, most: int = _MAX_TEXT) -> str:
    """Return the text as one line without control characters, which would change a terminal or a page."""
    spaced = " ".join(text[: 16 * most].split())
    plain = "".join(" " if unicodedata.category(char).startswith("C") else char for char in spaced[: 4 * most])
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def write_json(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm]) -> None:
    """Write all numbers, verdicts and examples, for programs."""
    data = {"columns": list(map(_as_json, columns)), "alarms": [vars(alarm) for alarm in alarms]}
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")


def _as_json(column: Column) -> dict[str, Any]:
    return {
        "label": column.label,
        "run": column.run,
        "player": column.played.player,
        "episodes": len(column.played.episodes),
        "turns": len(column.played.turns),
        "cautions": list(column.cautions),
        "questions": {
            str(question): {"text": QUESTIONS[question].text, "verdict": answer.verdict, "sentence": answer.sentence}
            for question, answer in column.answers.items()
        },
        "numbers": {
            item.key: {**vars(column.values[item.key]), "verdict": column.verdicts[item.key], "healthy": item.healthy()}
            for item in MEASURES
        },
        "actions": dict(column.played.actions.most_common(100)),
        "invalid": dict(column.rejections.causes),
        "translatable": column.rejections.catchable,
        "aliases": [vars(alias) for alias in column.rejections.aliases[:100]],
        "unknown": dict(column.rejections.unknown[:100]),
        "examples": [
            {"what": what, "task": place.task, "seed": place.seed, "turn": place.turn or None, "text": place.text}
            for what, place in _examples(column)
        ],
    }


def write_page(path: Path, columns: Sequence[Column], alarms: Sequence[Alarm]) -> None:
    """Write the report as Markdown."""
    write_text(path, _render("report.md.j2", columns, alarms))


def summarize(columns: Sequence[Column], alarms: Sequence[Alarm], written: Sequence[str]) -> str:
    """Return the summary for the terminal: verdicts first, then what to do, then the numbers."""
    return _render("summary.txt.j2", columns, alarms, written=written)


def _render(template: str, columns: Sequence[Column], alarms: Sequence[Alarm], **more: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.loader = jinja2.FileSystemLoader(Path(__file__).parent)
    width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
    fold = lambda text, mark: textwrap.fill(text, width, initial_indent=mark, subsequent_indent=" " * (len(mark) + 2))
    code = lambda text: f"`` {clean(text).replace('`', chr(39)).replace('|', chr(92) + '|')} ``" if text.strip() else ""
    count_stops = lambda group: Counter(episode.stop for episode in group).most_common()
    stops = lambda group: ", ".join(f"{count} {name}" for name, count in count_stops(group))
    where = lambda at: f"{clean(at.task, 40)}, seed {clean(str(at.seed), 24)}, turn {at.turn}" if at.turn else ""
    texts = {"clean": clean, "escaped": _escaped, "code": code, "fold": fold, "shout": _shout, "repr": repr}
    environment.filters |= texts | {"examples": _examples, "where": where, "stops": stops}
    parts = {"cell": _cell, "cause_rows": _cause_rows, "gain": _gain, "unknown_actions": _unknown_actions}
    parts |= {"aliases": _aliases, "grid": _grid, "numbers": _numbers, "heading": _heading}
    environment.globals |= parts | {"questions": QUESTIONS, "measures": MEASURES}
    # The advice of all columns and alarms, the most urgent first, each once.
    urgent: list[tuple[bool, str]] = [(alarm.verdict != Verdict.ACT, alarm.advice) for alarm in alarms]
    for answer in (answer for column in columns for answer in column.answers.values()):
        urgent += [(answer.verdict != Verdict.ACT, sentence) for sentence in answer.advice]
    advice = list(dict.fromkeys(sentence for _, sentence in sorted(urgent, key=lambda item: item[0])))
    return environment.get_template(template).render(columns=columns, alarms=alarms, advice=advice, **more)


def _escaped(text: str, most: int) -> str:
    plain = re.sub(r"([\\`*_\[\]|])", r"\\\1", clean(text, most))
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _grid(columns: Sequence[Column]) -> str:
    rows = [["", "1 diverse", "2 reasoning", "3 valid", "4 failures", "valid", "success", "episodes"]]
    for column in columns:
        verdicts = [_shout(answer.verdict) for answer in column.answers.values()]
        numbers = [BY_KEY[key].show(column.values[key].number) for key in ("valid_actions", "success")]
        rows.append([clean(column.label, 40), *verdicts, *numbers, str(len(column.played.episodes))])
    return "\n".join(align(rows))


def _shout(verdict: Verdict) -> str:
    return "----" if verdict == Verdict.NONE else verdict.upper()


def _numbers(columns: Sequence[Column]) -> str:
    rows = [["number", *(clean(column.label, 24) for column in columns), "healthy"]]
    for item in MEASURES:
        cells = [_cell(column, item) for column in columns]
        if any(text != "-" for text in cells):
            rows.append([f"{item.question} {item.title}", *cells, item.healthy()])
    return "\n".join(align(rows))


def _heading(column: Column, named: bool) -> str:
    episodes = column.played.episodes
    tasks = len(column.played.by_task)
    count = f"{len(episodes)} episode{'s' * (len(episodes) != 1)}, {len(column.played.turns)} turns, {tasks} task"
    head = f"{clean(column.label)}: {count}{'s' * (tasks != 1)}"
    return head if named or column.run == column.label else f"{clean(column.run)}, {head}"


def _cell(column: Column, item: Measure) -> str:
    """A number with its standard error and its verdict, if it is not good."""
    value, verdict = column.values[item.key], column.verdicts[item.key]
    text = item.show(value.number)
    if value.error is not None:
        text += f" ± {item.show(value.error)}"
    return f"{text} [{verdict}]" if verdict in (Verdict.LOOK, Verdict.ACT) else text


def _gain(column: Column) -> list[str]:
    """What a translation would change, in one sentence; none if it would catch nothing."""
    catchable, turns, valid = column.rejections.catchable, len(column.played.turns), len(column.played.valid)
    if not catchable:
        return []
    gain = f"from {valid / turns:.1%} to {(valid + catchable) / turns:.1%}"
    return [f"Translations would catch {catchable} of {turns - valid} invalid answers: valid answers rise {gain}."]


def _aliases(column: Column) -> list[str]:
    """Entries for a table of aliases, as Python, the most frequent first; the first line says where they belong."""
    paths = column.played.env_paths
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
    causes, examples = column.rejections.causes, column.rejections.examples
    texts = {cause: examples[cause].candidate or examples[cause].place.text for cause in causes}
    return [(cause, count, clean(texts[cause], 60), CAUSES[cause]) for cause, count in causes.items()]


def _unknown_actions(column: Column) -> list[str]:
    """Actions that the model wants and the environment lacks, in one sentence; none if there are none."""
    wanted = [f"{clean(text, 40)} ({count})" for text, count in column.rejections.unknown[:8]]
    return [f"Wanted, but not offered: {', '.join(wanted)}"] if wanted else []


def _examples(column: Column) -> list[tuple[str, Place]]:
    played, rejections = column.played, column.rejections
    found: list[tuple[str, Place]] = []
    for cause, count in list(rejections.causes.items())[:4]:
        found.append((f"invalid: {cause}, {count} times", rejections.examples[cause].place))
    found += [(f"loop of {size} turns", place) for size, place in sorted(played.loops, key=lambda item: -item[0])[:3]]
    openings = Counter(" ".join(turn.parts.reasoning.split()[:8])[:EXCERPT] for turn in played.reasoned)
    for text, count in openings.most_common(1):
        if count > 0.2 * len(played.reasoned) and len(played.reasoned) > 10:
            begin = f"{count} of {len(played.reasoned)} reasonings begin with this"
            found.append((begin, Place("", None, 0, text)))
    median, by_words = column.values["reasoning_words"].number or 0, played.by_words()
    found += [(f"longest reasoning, {k} words", place) for k, place in by_words[-1:] if k > 3 * median]
    found += [(f"shortest reasoning, {k} word(s)", place) for k, place in by_words[:1] if k < 3]
    faults = [episode for episode in played.episodes if episode.fault][:2]
    found += [("failed", Place(e.task, e.seed, e.turns[-1].number if e.turns else 0, e.fault or "")) for e in faults]
    return found
