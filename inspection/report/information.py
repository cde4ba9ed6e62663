"""Measures how much actions and reasoning depend on the observation; all functions are deterministic.

RAGEN (Wang et al. 2025, "Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", arXiv
2504.20073) calls the fall into repeated phrasing the echo trap. RAGEN-2 (Wang et al. 2026, "Reasoning Collapse in
Agentic RL", arXiv 2604.06268) splits the diversity of responses Z to prompts X into H(Z|X) and the mutual information
I(X;Z), and calls a low I(X;Z) template collapse: responses vary, but not with the prompt. Its estimates need the
policy's log-probs of each response under each prompt; those here need only the recorded text.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_FEATURES = 400
LEVELS = 4
SHUFFLES = 200
MAX_ACTIONS = 20
MIN_TURNS = 100
CANDIDATES = 16
PAIRS = 1000
_WORD = re.compile(r"\w+")
_CLAUSE = re.compile(r"[\n,.;:!?]+")


@dataclass(frozen=True)
class Information:
    """Mutual information of observation and action, in bits."""

    bits: float
    """Miller-Madow estimate; it can be slightly negative."""
    plug_in: float
    baseline: float
    """99th percentile of the plug-in estimate with shuffled actions."""
    entropy: float
    """Entropy of the actions."""
    turns: int

    @property
    def is_noisy(self) -> bool:
        """Whether chance alone could look like a twentieth of the entropy, and the estimate is not above chance."""
        return self.plug_in <= self.baseline and self.baseline > 0.05 * self.entropy > 0

    @property
    def share(self) -> float:
        """Share of the actions' entropy that the observation explains; 0 if it is not above the baseline."""
        if self.entropy <= 0 or self.plug_in <= self.baseline:
            return 0.0
        return min(max(self.bits / self.entropy, 0.0), 1.0)


def state_information(observations: Sequence[str], actions: Sequence[str]) -> Information | None:
    """Return a lower bound on I(observation; action), from turns in order.

    None with fewer than `MIN_TURNS`, or if no phrase tells observations apart.

    Observations are seldom equal, so they are put into at most 2^4 cells: by the presence of four phrases (words or
    clauses), chosen greedily on one half of the turns to predict the action. The other half gives the estimate, then
    the halves change roles. Cells are a function of the observation, so by the data-processing inequality they carry
    no more information than it does. Subtracting (K_xy - K_x - K_y + 1) / 2n nats from the plug-in estimate is the bias
    correction of Miller (1955) and Madow, where K counts the non-empty cells. The baseline shifts the actions
    circularly by 200 random offsets, which keeps their order and breaks their link to the observation.
    """
    if len(actions) < MIN_TURNS:
        return None
    common = [action for action, _ in Counter(actions).most_common(MAX_ACTIONS - 1)]
    index = {action: k for k, action in enumerate(common)}
    y = np.array([index.get(action, MAX_ACTIONS - 1) for action in actions])
    lowered = [text.lower() for text in observations]
    x = _presence([{clause.strip() for clause in _CLAUSE.split(t)} | set(_WORD.findall(t)) for t in lowered])
    if not x.shape[1]:
        return None
    middle = len(y) // 2
    halves = (slice(None, middle), slice(middle, None))
    parts = [(_apply(x[b], _choose(x[a], y[a])), y[b]) for a, b in (halves, halves[::-1])]
    rng = np.random.default_rng(0)
    shifted = []
    for _ in range(SHUFFLES):
        rolled = [(cells, np.roll(part, rng.integers(1, len(part)))) for cells, part in parts]
        shifted.append(np.mean([mutual_information(*part)[0] for part in rolled]))
    plug_in, bits = (float(value) for value in np.mean([mutual_information(*part) for part in parts], axis=0))
    return Information(bits, plug_in, float(np.quantile(shifted, 0.99)), entropy(Counter(y.tolist())), len(actions))


def entropy(counts: Counter[Any]) -> float:
    """Plug-in entropy of a distribution, in bits."""
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values() if n) if total else 0.0


def _presence(features: Sequence[set[str]]) -> np.ndarray:
    """Bool [turns, features]: the phrases that are present in some turns and absent in others, the evenest first."""
    n = len(features)
    counts = Counter(name for found in features for name in found)
    useful = [name for name, k in counts.items() if 0.02 * n <= k <= 0.98 * n and name]
    useful = sorted(useful, key=lambda name: (abs(counts[name] - n / 2), name))[:MAX_FEATURES]
    return np.array([[name in found for name in useful] for found in features], dtype=bool).reshape(n, len(useful))


def _choose(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The columns that, added one by one, give the cells with the most information about y."""
    chosen: list[int] = []
    for _ in range(min(LEVELS, x.shape[1])):
        cells = _apply(x, chosen)
        gain = np.array([mutual_information(2 * cells + column, y)[0] for column in x.T])
        gain[chosen] = -np.inf
        chosen.append(int(np.argmax(gain)))
    return chosen


def _apply(x: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    return (x[:, list(chosen)] * 2 ** np.arange(len(chosen))).sum(1).astype(int)


def mutual_information(cells: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Mutual information of cells (below 16) and actions (below 20) in bits: plug-in, and Miller and Madow's."""
    joint = np.bincount(cells * MAX_ACTIONS + y, minlength=2**LEVELS * MAX_ACTIONS).reshape(-1, MAX_ACTIONS)
    p = joint / joint.sum()
    outer = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    filled = joint > 0
    plain = float((p[filled] * np.log2(p[filled] / outer[filled])).sum())
    extra = filled.sum() - filled.any(1).sum() - filled.any(0).sum() + 1
    return plain, plain - float(extra) / (2 * len(y) * math.log(2))


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
        others = rng.sample(distinct, CANDIDATES)
        others = [text for text in others if text != observation][: CANDIDATES - 1]
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
