"""Reads runs into columns (one per run, setting and player) and judges each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from inspection.report.measures import BY_KEY, MEASURES, QUESTIONS, Measure, Value, Verdict, worst
from inspection.report.reading import read_run
from inspection.report.rejections import Rejections, legal_actions, sort_rejections
from inspection.report.tally import Tally
from inspection.report.values import measure

_HEADLINES = {
    1: ("observation_retrieval", "reasoning_overlap", "state_information", "effective_actions"),
    2: ("answers_with_reasoning", "reasoning_words", "cut_answers"),
    3: ("valid_actions", "translatable"),
    4: ("mean_return", "mean_turns", "stuck_turns"),
}
_JUDGED_IF_SCRIPTED = ("valid_actions", "valid_task_gap", "lost_environment")
_NOT_JUDGED_ALONE = ("mean_progression", "out_of_time", "out_of_context", "early_losses")
"""Numbers of episodes, which are not judged with a single one."""
_FEW_EPISODES = 20


@dataclass(frozen=True)
class Answer:
    """The answer to one of the four questions."""

    question: int
    verdict: Verdict
    sentence: str
    advice: Sequence[str]


@dataclass(frozen=True)
class Column:
    """One column of the report."""

    label: str
    run: str
    setting: str
    tally: Tally
    actions: Sequence[str]
    rejections: Rejections
    values: Mapping[str, Value]
    verdicts: Mapping[str, Verdict]
    answers: Mapping[int, Answer]
    cautions: Sequence[str]


def read_columns(runs: Sequence[Path], actions: Sequence[str] = ()) -> list[Column]:
    """Read all runs; columns keep the order of the files.

    Raises:
        ConfigError: a run cannot be read or holds no episodes.
    """
    tallies: dict[tuple[str, str, str], Tally] = {}
    for path, name in zip(runs, _name_runs(runs), strict=True):
        for episode in tqdm(read_run(path), desc=name, unit="episode", leave=False, disable=None):
            setting, player = episode.group
            tally = tallies.setdefault((name, setting, player), Tally(player))
            tally.add(episode)
    labels = _label(list(tallies))
    return [_make(label, key, tally, actions) for label, (key, tally) in zip(labels, tallies.items(), strict=True)]


def _make(label: str, key: tuple[str, str, str], tally: Tally, given: Sequence[str]) -> Column:
    actions = legal_actions(tally, given)
    rejections = sort_rejections(tally, actions)
    values = measure(tally, actions, rejections)
    verdicts = {m.key: _judge(m, values[m.key], tally) for m in MEASURES}
    answers = {question: _answer(question, tally, values, verdicts) for question in QUESTIONS}
    return Column(label, *key[:2], tally, actions, rejections, values, verdicts, answers, _cautions(tally, values))


def _judge(item: Measure, value: Value, tally: Tally) -> Verdict:
    if tally.is_scripted and item.key not in _JUDGED_IF_SCRIPTED:
        return Verdict.NONE
    if len(tally.episodes) == 1 and item.key in _NOT_JUDGED_ALONE:
        return Verdict.NONE
    if item.key == "valid_drop" and value.number is not None and value.number < 2 * (value.error or 0.0):
        return Verdict.GOOD
    return item.judge(value)


def _answer(question: int, tally: Tally, values: Mapping[str, Value], verdicts: Mapping[str, Verdict]) -> Answer:
    items = [item for item in MEASURES if item.question == question]
    verdict = worst([verdicts[item.key] for item in items])
    off = [item for item in items if verdicts[item.key] in (Verdict.LOOK, Verdict.ACT)]
    off.sort(key=lambda item: verdicts[item.key] != Verdict.ACT)
    advice = list(dict.fromkeys(item.advice for item in off if item.advice))
    if tally.is_scripted and question in (1, 2):
        return Answer(question, verdict, f"the {tally.player} player gives no reasons; a baseline, not judged", advice)
    if tally.is_scripted and question == 4 and not off:
        verdict = Verdict.NONE
    if off:
        found = [f"{i.title} {i.show(values[i.key].number)} (healthy: {i.healthy()})" for i in off[:3]]
        more = f"; {len(off) - 3} more" if len(off) > 3 else ""
        ends = f"{_ends(tally)}; " if question == 4 else ""
        return Answer(question, verdict, ends + "; ".join(found) + more, advice)
    shown = [BY_KEY[key] for key in _HEADLINES[question] if values[key].number is not None]
    parts = [f"{item.title} {item.show(values[item.key].number)}" for item in shown]
    parts = [_ends(tally), *parts] if question == 4 else parts
    return Answer(question, verdict, "; ".join(parts) or "not measured", advice)


def _ends(tally: Tally) -> str:
    """How episodes end, the most frequent first."""
    ends = Counter("success" if e.success else f"{e.stop} without success" for e in tally.episodes)
    return ", ".join(f"{count / len(tally.episodes):.0%} {name}" for name, count in ends.most_common(4))


def _cautions(tally: Tally, values: Mapping[str, Value]) -> list[str]:
    """What the numbers cannot say."""
    n, found = len(tally.episodes), []
    if n == 1:
        found.append(
            "There is only 1 episode: standard errors, shares of episodes, success and the spread of returns mean "
            "nothing yet. Evaluate at least 50."
        )
    elif n < _FEW_EPISODES:
        found.append(f"There are only {n} episodes: differences below two standard errors mean nothing.")
    if not tally.turns:
        found.append("No episode has a turn: all failed before the first answer.")
    elif tally.is_scripted:
        found.append(f"The player is '{tally.player}': it gives no reasons, so reasoning is not judged.")
    elif not tally.reasoned:
        found.append("The answers hold no reasoning, so its diversity is not measured.")
    information = values["state_information"]
    if tally.turns and information.number is None:
        found.append(f"The link of observation and action is not measured: {information.note}.")
    return found


def _name_runs(runs: Sequence[Path]) -> list[str]:
    """The shortest distinct names of the runs: folders from the end of their paths."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent for path in runs]
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({k})" for k, folder in enumerate(folders, 1)]


def _label(keys: Sequence[tuple[str, str, str]]) -> list[str]:
    """Only those parts of run, setting and player that differ; the setting if there is one."""
    differs = [len({key[part] for key in keys}) > 1 for part in range(3)]
    labels = []
    for key in keys:
        parts = dict.fromkeys(key[part] for part in range(3) if differs[part] and key[part] != "-")
        labels.append(", ".join(parts) or (key[1] if key[1] != "-" else key[2] if key[2] != "-" else key[0]))
    return labels
