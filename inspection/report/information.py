"""Measures how varied responses are, and how much their reasoning depends on the observation.

RAGEN (Wang et al. 2025, "Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement Learning", arXiv
2504.20073) calls the fall into repeated phrasing the echo trap. RAGEN-2 (Wang et al. 2026, "Reasoning Collapse in
Agentic RL", arXiv 2604.06268) splits the diversity of responses Z to prompts X into H(Z|X) and the mutual information
I(X;Z), and calls a low I(X;Z) template collapse: responses vary, but not with the prompt. Its estimates need the
policy's log-probs of each response under each prompt; those here need only the recorded text, and are deterministic.
"""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

CANDIDATES = 16
PAIRS = 1000
_WORD = re.compile(r"\w+")


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
