"""Defines the report's numbers and computes those of one column; `measures.yaml` describes each.

Two say how varied responses are, and how much their reasoning depends on the observation. RAGEN
(Wang et al. 2025, "Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement
Learning", arXiv 2504.20073) calls the fall into repeated phrasing the echo trap. RAGEN-2 (Wang et
al. 2026, "Reasoning Collapse in Agentic RL", arXiv 2604.06268) calls responses that vary, but not
with the prompt, template collapse. Its estimates need the policy's log-probs of each response under
each prompt; those here need only the recorded text, and are deterministic.
"""

import enum
import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from inspection.report.reading import Episode, Turn
from slime_verlog import Settings

CANDIDATES = 16
"""Observations that a reasoning is compared with, its own among them."""
_MAX_TRIED = 400
"""Reasonings that are compared with observations."""
_DISTINCT_OF = 1000
"""Reasonings of which distinct ones are counted; among more, the share would be smaller."""
_REPEATS = 2
"""Earlier occurrences of an attempt after which it counts as repeated."""
_WORD = re.compile(r"\w+")


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

    def judge(self, value: float | None) -> Verdict:
        """Compare with the healthy range."""
        if value is None or self.good is None:
            return Verdict.NONE
        sign = 1 if self.higher else -1
        if sign * value >= sign * self.good:
            return Verdict.GOOD
        must_act = self.act is not None and sign * value <= sign * self.act
        return Verdict.ACT if must_act else Verdict.LOOK

    def show(self, number: float | None) -> str:
        """Return the number as text."""
        if number is None:
            return "-"
        if self.percent:
            return f"{100 * number:.1f} %"
        return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"

    def healthy(self) -> str:
        """Return the healthy range as text."""
        if self.good is None:
            return ""
        if not self.good:
            return "none"
        return f"{'at least' if self.higher else 'at most'} {self.show(self.good)}"


_DATA = yaml.safe_load(Path(__file__).with_name("measures.yaml").read_text(encoding="utf-8"))
QUESTIONS: Mapping[int, str] = _DATA["questions"]
MEASURES = tuple(Measure(key=key, **measure) for key, measure in _DATA["numbers"].items())


Values = dict[str, float | None]
"""Numbers by their key; None if one could not be measured."""


def measure(episodes: Sequence[Episode], translatable: int) -> Values:
    """Return all values of a column by the keys of `MEASURES`; `translatable` invalid responses are
    near matches."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return _reasoning(turns) | _validity(turns, translatable) | _failures(episodes)


def _reasoning(turns: Sequence[Turn]) -> Values:
    reasoned = [turn for turn in turns if turn.words]
    words = [turn.words for turn in reasoned]
    tokens = [turn.tokens for turn in turns if turn.tokens is not None]
    every = max(len(reasoned) // _DISTINCT_OF, 1)
    compared = [turn.reasoning for turn in reasoned[::every]][:_DISTINCT_OF]
    distinct = len(set(compared)) / len(compared) if len(compared) > 1 else None
    accuracy = retrieve_observations([(turn.observation, turn.reasoning) for turn in reasoned])
    if accuracy is not None:
        chance = 1 / CANDIDATES
        accuracy = max((accuracy - chance) / (1 - chance), 0.0)
    return {
        "distinct_reasoning": distinct,
        "observation_retrieval": accuracy,
        "answers_with_reasoning": _share(len(words), len(turns)),
        "reasoning_words": statistics.median(words) if words else None,
        "response_tokens": statistics.median(tokens) if tokens else None,
    }


def _validity(turns: Sequence[Turn], translatable: int) -> Values:
    actions = Counter(turn.executed for turn in turns if turn.valid)
    cut = [turn.cut for turn in turns if turn.cut is not None]
    return {
        "effective_actions": 2 ** entropy(actions) if actions else None,
        "cut_answers": _share(sum(cut), len(cut)),
        "valid_actions": _share(actions.total(), len(turns)),
        "translatable": _share(translatable, len(turns)),
    }


def _failures(episodes: Sequence[Episode]) -> Values:
    stops = Counter(episode.stop for episode in episodes if not episode.success)
    played = [e for e in episodes if e.fault is None and e.stop != "failed"]
    repeated = sum(len(find_repeats(episode)) for episode in episodes)
    known = sum(turn.state is not None for episode in episodes for turn in episode.turns)
    return {
        "mean_progression": statistics.fmean(e.progression for e in played or episodes),
        "equal_returns": _equal_returns(played or episodes),
        "lost_environment": _share(len(episodes) - len(played), len(episodes)),
        "out_of_time": _share(stops["time_limit"] + stops["max_turns"], len(episodes)),
        "out_of_context": _share(stops["context"] + stops["encoding"], len(episodes)),
        "stuck_turns": _share(repeated, known),
    }


def find_repeats(episode: Episode) -> list[Turn]:
    """Return the turns that repeat an earlier attempt, which is an action in an observation; none
    of a won episode.

    A stretch of equal attempts that ends in another observation had an effect, such as a walk
    through an empty room, and counts as one attempt.
    """
    turns = [] if episode.success else [turn for turn in episode.turns if turn.state is not None]
    stretches = [
        list(group)
        for _, group in itertools.groupby(turns, lambda turn: (turn.state, turn.executed))
    ]
    seen: Counter[tuple[int | None, str]] = Counter()
    repeated = []
    for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
        had_effect = following is not None and following[0].state != stretch[0].state
        for turn in stretch[:1] if had_effect else stretch:
            attempt = turn.state, turn.executed
            if seen[attempt] >= _REPEATS:
                repeated.append(turn)
            seen[attempt] += 1
    return repeated


def _equal_returns(episodes: Sequence[Episode]) -> float | None:
    """Share of starts (task and seed) that were played more than once with one return; else of
    tasks.

    Those that were always won count as unequal: they are solved, which is no reason to worry.
    """
    played = [episode for episode in episodes if episode.fault is None]
    for groups in (_groups(played, _start), _groups(played, attrgetter("task"))):
        repeated = [group for group in groups if len(group) > 1]
        if repeated:
            unsolved = [
                group for group in repeated if not all(episode.success for episode in group)
            ]
            spreads = [
                statistics.pstdev(episode.episode_return for episode in group) for group in unsolved
            ]
            return _share(sum(spread < 1e-9 for spread in spreads), len(repeated))
    return None


def _share(count: int, total: int) -> float | None:
    return count / total if total else None


def _start(episode: Episode) -> Hashable:
    return episode.task, id(episode) if episode.seed is None else str(episode.seed)


def _groups(
    episodes: Sequence[Episode], key: Callable[[Episode], Hashable]
) -> Iterable[list[Episode]]:
    found: dict[Hashable, list[Episode]] = defaultdict(list)
    for episode in episodes:
        found[key(episode)].append(episode)
    return found.values()


def entropy(counts: Counter[Any]) -> float:
    """Plug-in entropy of a distribution, in bits."""
    shares = [count / counts.total() for count in counts.values() if count]
    return -sum(share * math.log2(share) for share in shares)


def retrieve_observations(turns: Sequence[tuple[str, str]]) -> float | None:
    """Return the share of reasonings that resemble their observation more than 15 others; None with
    too few.

    RAGEN-2's retrieval accuracy with tf-idf similarity of words and word pairs in place of the
    policy's log-probs. Of the pairs of observation and reasoning in `turns`, each observation
    counts once, and at most 400 do.
    """
    rng = random.Random(0)
    reasoning_of = dict(rng.sample(turns, len(turns)))
    observations = list(reasoning_of)[:_MAX_TRIED]
    if len(observations) < CANDIDATES:
        return None
    terms = {text: _terms(text) for text in observations}
    frequency = Counter(itertools.chain(*terms.values()))
    weight = {term: math.log(len(observations) / count) for term, count in frequency.items()}
    norm = {text: math.hypot(*(weight[term] for term in bag)) or 1.0 for text, bag in terms.items()}
    hits = 0
    for observation in observations:
        said = _terms(reasoning_of[observation])
        others = [text for text in rng.sample(observations, CANDIDATES) if text != observation]
        similarity = {}
        for text in (observation, *others[: CANDIDATES - 1]):
            similarity[text] = sum(weight[term] for term in said & terms[text]) / norm[text]
        hits += similarity.pop(observation) > max(similarity.values())
    return hits / len(observations)


def _terms(text: str) -> set[str]:
    words = _WORD.findall(text.lower())
    return {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}
