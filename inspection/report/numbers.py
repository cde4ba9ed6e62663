"""Defines the report's numbers and questions, and computes the numbers of one column; `measures.yaml` describes each.

Several say how varied responses are, and how much their reasoning depends on the observation. RAGEN (Wang et al. 2025,
"Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", arXiv 2504.20073) calls the fall
into repeated phrasing the echo trap. RAGEN-2 (Wang et al. 2026, "Reasoning Collapse in Agentic RL", arXiv 2604.06268)
splits the diversity of responses Z to prompts X into H(Z|X) and the mutual information I(X;Z), and calls a low I(X;Z)
template collapse: responses vary, but not with the prompt. Its estimates need the policy's log-probs of each response
under each prompt; those here need only the recorded text, and are deterministic.
"""

import enum
import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inspection.report.invalid import NO_LINE, Rejections
from inspection.report.reading import Episode, Played
from slime_verlog import Settings

CANDIDATES = 16
"""Observations that a reasoning is compared with, its own among them."""
PAIRS = 1000
"""Pairs of reasonings that are drawn to measure their overlap."""
_WORD = re.compile(r"\w+")
_DISTINCT_OF = 1000
"""Reasonings of which distinct ones are counted; among more, the share would be smaller."""
_MIN_PER_TASK = 20
"""Turns that a task needs for its share of valid ones to be compared."""
_NO_REASONING = "the answers hold no reasoning"
_NO_IMAGES = "the pictures are not recorded"
_FREE_TEXT = "actions are free text"
_ONE_EPISODE = "needs at least two episodes"


class Verdict(enum.StrEnum):
    """How a number or a question is judged, from best to worst."""

    NONE = "-"
    """Not judged: not measured, or only information."""
    GOOD = "good"
    """Within the healthy range."""
    LOOK = "look"
    """Read some episodes before you train."""
    ACT = "act"
    """Change something before you train."""


@dataclass(frozen=True)
class Value:
    """A measured number."""

    number: float | None
    """None if it could not be measured."""
    note: str = ""
    """Why it could not be measured, or a detail."""
    error: float | None = None
    """Standard error."""


class Measure(Settings):
    """One number of the report."""

    key: str
    question: int
    title: str
    good: float | None = None
    """The limit of the healthy range; None if the number is not judged."""
    act: float | None = None
    """The limit from which on something should change; None if there is none."""
    higher: bool = True
    """Whether higher is better."""
    percent: bool = True
    advice: str = ""
    """What to do outside of the healthy range."""

    def judge(self, value: Value) -> Verdict:
        """Compare with the healthy range."""
        if value.number is None or self.good is None:
            return Verdict.NONE
        sign = 1 if self.higher else -1
        if sign * value.number >= sign * self.good:
            return Verdict.GOOD
        return Verdict.ACT if self.act is not None and sign * value.number <= sign * self.act else Verdict.LOOK

    def show(self, number: float | None) -> str:
        """Return the number as text."""
        if number is None:
            return "-"
        return f"{100 * number:.1f} %" if self.percent else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"

    def healthy(self) -> str:
        """Return the healthy range as text."""
        if self.good is None:
            return ""
        return f"{'at least' if self.higher else 'at most'} {self.show(self.good)}" if self.good else "none"


class Question(Settings):
    """One of the four questions."""

    text: str
    headlines: tuple[str, ...]
    """Keys of the numbers that answer it if all are healthy."""


_DATA = yaml.safe_load(Path(__file__).with_name("measures.yaml").read_text(encoding="utf-8"))
QUESTIONS: Mapping[int, Question] = {number: Question(**question) for number, question in _DATA["questions"].items()}
MEASURES = tuple(Measure(key=key, **measure) for key, measure in _DATA["numbers"].items())
BY_KEY = {measure.key: measure for measure in MEASURES}


def measure(played: Played, actions: Sequence[str], rejections: Rejections) -> dict[str, Value]:
    """Return all values of a column by the keys of `MEASURES`."""
    return _diversity(played, actions) | _reasoning(played) | _validity(played, rejections) | _failures(played)


def _diversity(played: Played, actions: Sequence[str]) -> dict[str, Value]:
    sample = played.sample()
    thought = [turn for turn in sample if turn.parts.reasoning]
    reasonings = [turn.parts.reasoning for turn in thought]
    overlap = mean_overlap(reasonings, [turn.state for turn in thought])
    compared = thought[:: max(len(thought) // _DISTINCT_OF, 1)][:_DISTINCT_OF]
    distinct = len({turn.parts.reasoning for turn in compared}) / len(compared) if len(compared) > 1 else None
    few = _NO_REASONING if not thought else "too few answers"
    unused = [action for action in actions if action not in played.actions]
    listed = ", ".join(unused[:8]) + " ..." * (len(unused) > 8)
    pointing = Value(None, few)
    if found := retrieve_observations([turn.observation for turn in thought], reasonings):
        (accuracy, tried), chance = found, 1 / CANDIDATES
        detail = f"right in {accuracy:.0%} of {tried}, chance {chance:.0%}"
        pointing = Value(max((accuracy - chance) / (1 - chance), 0.0), detail)
    return {
        "distinct_reasoning": Value(distinct, f"of {len(compared)} answers" if compared else few),
        "reasoning_overlap": Value(overlap, "" if overlap is not None else few),
        "observation_retrieval": pointing,
        "effective_actions": Value(2 ** entropy(played.actions) if played.actions else None),
        "same_state_variety": _variety(played),
        "unused_actions": Value(len(unused) / len(actions), listed) if actions else Value(None, _FREE_TEXT),
    }


def _variety(played: Played) -> Value:
    """Mean chance that two responses in the same state choose different actions (Gini-Simpson, without bias)."""
    by_state: dict[int, Counter[str]] = defaultdict(Counter)
    for turn in played.valid:
        if turn.state is not None:
            by_state[turn.state][turn.executed] += 1
    sizes = [(actions.values(), n) for actions in by_state.values() if (n := actions.total()) > 1]
    found = [1 - sum(k * (k - 1) for k in counts) / (n * (n - 1)) for counts, n in sizes]
    never = Value(None, "no state was seen twice; play each seed several times")
    return Value(statistics.fmean(found), f"{len(found)} states") if found else never


def _reasoning(played: Played) -> dict[str, Value]:
    turns, words = played.turns, [turn.words for turn in played.reasoned]
    tokens = [turn.tokens for turn in turns if turn.tokens is not None]
    cut = [turn.cut for turn in turns if turn.cut is not None]
    return {
        "answers_with_reasoning": _share(len(words), len(turns)),
        "reasoning_words": Value(statistics.median(words)) if words else Value(None, _NO_REASONING),
        "response_tokens": Value(statistics.median(tokens)) if tokens else Value(None, "tokens are not recorded"),
        "text_after_action": _share(sum(bool(turn.parts.after) for turn in turns), len(turns)),
        "cut_answers": _share(sum(cut), len(cut), "the record does not say why answers ended"),
    }


def _validity(played: Played, rejections: Rejections) -> dict[str, Value]:
    turns_of = {task: [turn.valid for e in group for turn in e.turns] for task, group in played.by_task.items()}
    ratios = {task: statistics.fmean(valid) for task, valid in turns_of.items() if len(valid) >= _MIN_PER_TASK}
    ratio = len(played.valid) / len(played.turns) if played.turns else None
    lowest = min(ratios, key=lambda task: ratios[task], default=None)
    gap = Value(None, "fewer than 20 turns per task")
    if lowest is not None and ratio is not None:
        gap = Value(ratio - ratios[lowest], f"{lowest}: {ratios[lowest]:.1%}")
    drop = Value(None, "episodes have fewer than three turns")
    if long := [e for e in played.episodes if len(e.turns) >= 3]:
        (early, of_early), (late, of_late) = (_valid_share(long, third) for third in (0, 2))
        drop = Value(early - late, error=_error([a - b for a, b in zip(of_early, of_late, strict=True)]))
    return {
        "valid_actions": Value(ratio, error=_error(_valid_share(played.episodes)[1]) if played.turns else None),
        "valid_task_gap": gap,
        "valid_drop": drop,
        "no_action_line": _share(rejections.causes.get(NO_LINE, 0), len(played.turns)),
        "translatable": _share(rejections.catchable, len(played.turns)),
    }


def _failures(played: Played) -> dict[str, Value]:
    episodes, n = played.episodes, len(played.episodes)
    known = sum(turn.state is not None for turn in played.turns)
    stops = Counter(episode.stop for episode in episodes if not episode.success)
    median = statistics.median(len(episode.turns) for episode in episodes)
    early = [e for e in episodes if e.stop == "terminated" and not e.success and len(e.turns) < median / 4]
    return {
        "success": _mean(episodes, lambda episode: episode.success),
        "mean_return": _mean(episodes, lambda episode: episode.episode_return),
        "mean_progression": _mean(episodes, lambda episode: episode.progression),
        "mean_turns": _mean(episodes, lambda episode: len(episode.turns)),
        "equal_returns": _equal_returns(episodes),
        "lost_environment": _share(sum(e.fault is not None or e.stop == "failed" for e in episodes), n),
        "out_of_time": _share(stops["time_limit"] + stops["max_turns"], n),
        "out_of_context": _share(stops["context"] + stops["encoding"], n),
        "early_losses": _share(len(early), n) if n > 1 else Value(None, _ONE_EPISODE),
        "loop_turns": _share(played.looped, known, _NO_IMAGES),
        "stuck_turns": _share(played.stuck, known, _NO_IMAGES),
    }


def _equal_returns(episodes: Sequence[Episode]) -> Value:
    """Share of starts (task and seed) that were played more than once with one return; else of tasks.

    Those that were always won count as unequal: they are solved, which is no reason to worry.
    """
    played = [episode for episode in episodes if episode.fault is None]
    for name, groups in (("starts", _groups(played)), ("tasks", _groups(played, lambda episode: episode.task))):
        repeated = [group for group in groups if len(group) > 1]
        if repeated:
            unsolved = [[e.episode_return for e in group] for group in repeated if not all(e.success for e in group)]
            equal = sum(max(returns) - min(returns) < 1e-9 for returns in unsolved)
            return Value(equal / len(repeated), f"{equal} of {len(repeated)} {name}")
    return Value(None, _ONE_EPISODE)


def _share(count: int, total: int, otherwise: str = "no turns") -> Value:
    return Value(count / total if total else None, "" if total else otherwise)


def _start(episode: Episode) -> Hashable:
    return episode.task, id(episode) if episode.seed is None else str(episode.seed)


def _groups(episodes: Sequence[Episode], key: Callable[[Episode], Hashable] = _start) -> list[list[Episode]]:
    """Collect the episodes with the same key; by default the repeats of a seed, which are not independent."""
    found: dict[Hashable, list[Episode]] = defaultdict(list)
    for episode in episodes:
        found[key(episode)].append(episode)
    return list(found.values())


def _mean(episodes: Sequence[Episode], of: Callable[[Episode], float]) -> Value:
    values = [statistics.fmean(map(of, repeats)) for repeats in _groups(episodes)]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Value(statistics.fmean(values), error=error)


def _valid_share(episodes: Sequence[Episode], third: int | None = None) -> tuple[float, list[float]]:
    """Return valid turns / turns, in this third of the episodes, and what each start adds to its error (linearised)."""
    within = lambda e: [turn.valid for k, turn in enumerate(e.turns) if third in (None, 3 * k // len(e.turns))]
    units = [[valid for e in group for valid in within(e)] for group in _groups(episodes)]
    total = sum(map(len, units))
    ratio = sum(map(sum, units)) / total
    return ratio, [(sum(unit) - ratio * len(unit)) / total for unit in units]


def _error(parts: Sequence[float]) -> float | None:
    """Standard error from what each start adds to it; None for a single one."""
    return (sum(part**2 for part in parts) * len(parts) / (len(parts) - 1)) ** 0.5 if len(parts) > 1 else None


def entropy(counts: Counter[Any]) -> float:
    """Plug-in entropy of a distribution, in bits."""
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values() if n) if total else 0.0


def retrieve_observations(observations: Sequence[str], reasonings: Sequence[str]) -> tuple[float, int] | None:
    """Return the share of reasonings that resemble their observation more than 15 others, and how many were tried.

    None with too few. RAGEN-2's retrieval accuracy with tf-idf similarity of words and word pairs in place of the
    policy's log-probs. Each observation counts once, and at most 400 do. Ties share the point, so equal reasonings
    score 1/16 on average.
    """
    pairs = [pair for pair in zip(observations, reasonings, strict=True) if pair[1].strip()]
    rng = random.Random(0)
    rng.shuffle(pairs)
    pairs = list(dict(pairs).items())[:400]
    distinct = [observation for observation, _ in pairs]
    if len(pairs) < CANDIDATES:
        return None
    terms = {text: _terms(text) for text in distinct}
    found = Counter(term for bag in terms.values() for term in bag)
    weight = {term: math.log(len(distinct) / k) for term, k in found.items()}
    norm = {text: math.sqrt(sum(weight[term] ** 2 for term in bag)) or 1.0 for text, bag in terms.items()}
    hits = 0.0
    for observation, reasoning in pairs:
        said = _terms(reasoning)
        others = [text for text in rng.sample(distinct, CANDIDATES) if text != observation][: CANDIDATES - 1]
        scores = [sum(weight[term] for term in said & terms[text]) / norm[text] for text in (observation, *others)]
        level = [score for score in scores if score >= scores[0] - 1e-9]
        hits += 1 / len(level) if max(level) <= scores[0] + 1e-9 else 0.0
    return hits / len(pairs), len(pairs)


def _terms(text: str) -> set[str]:
    words = _WORD.findall(text.lower())
    return {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}


def mean_overlap(reasonings: Sequence[str], states: Sequence[int | None]) -> float | None:
    """Mean Jaccard index of the word trigrams of two reasonings in different states; 1 if all are equal.

    Unlike counts of distinct n-grams, it does not depend on the number of texts. None with fewer than 10 pairs.
    """
    rng = random.Random(0)
    used = [k for k, text in enumerate(reasonings) if text.strip()]
    if len(used) < 2:
        return None
    grams: dict[int, set[tuple[str, ...]]] = {}
    values = []
    for _ in range(PAIRS):
        first, second = rng.sample(used, 2)
        if states[first] != states[second]:
            for k in {first, second} - grams.keys():
                words = _WORD.findall(reasonings[k].lower())
                grams[k] = {tuple(words[j : j + 3]) for j in range(max(len(words) - 2, 1))}
            a, b = grams[first], grams[second]
            values.append(len(a & b) / len(a | b))
    return sum(values) / len(values) if len(values) >= 10 else None
