"""Computes the numbers of one column."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from inspection.report import information
from inspection.report.invalid import NO_LINE, Rejections
from inspection.report.measures import Value
from inspection.report.played import Played
from inspection.report.reading import Episode

_DISTINCT_OF = 1000
_MIN_PER_TASK = 20
_OUT_OF_TIME = ("time_limit", "max_turns")
_NO_REASONING = "the answers hold no reasoning"
_NO_IMAGES = "the pictures are not recorded"
_FREE_TEXT = "actions are free text"
_ONE_EPISODE = "needs at least two episodes"


def measure(played: Played, actions: Sequence[str], rejections: Rejections) -> dict[str, Value]:
    """Return all values of a column by the keys of `MEASURES`."""
    return _diversity(played, actions) | _reasoning(played) | _validity(played, rejections) | _failures(played)


def _diversity(played: Played, actions: Sequence[str]) -> dict[str, Value]:
    sample = played.sample()
    thought = [turn for turn in sample if turn.parts.reasoning]
    reasonings = [turn.parts.reasoning for turn in thought]
    overlap = information.mean_overlap(reasonings, [turn.state for turn in thought])
    compared = thought[:: max(len(thought) // _DISTINCT_OF, 1)][:_DISTINCT_OF]
    distinct = len({turn.parts.reasoning for turn in compared}) / len(compared) if len(compared) > 1 else None
    few = _NO_REASONING if not thought else "too few answers"
    unused = [action for action in actions if action not in played.actions]
    pointing = Value(None, few)
    if found := information.retrieve_observations([turn.observation for turn in thought], reasonings):
        (accuracy, tried), chance = found, 1 / information.CANDIDATES
        detail = f"right in {accuracy:.0%} of {tried}, chance {chance:.0%}"
        pointing = Value(max((accuracy - chance) / (1 - chance), 0.0), detail)
    return {
        "distinct_reasoning": Value(distinct, f"of {len(compared)} answers" if compared else few),
        "reasoning_overlap": Value(overlap, "" if overlap is not None else few),
        "observation_retrieval": pointing,
        "effective_actions": Value(2 ** information.entropy(played.actions) if played.actions else None),
        "same_state_variety": _variety(played),
        "unused_actions": Value(len(unused) / len(actions), ", ".join(unused[:8]) + " ..." * (len(unused) > 8))
        if actions
        else Value(None, _FREE_TEXT),
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
    places = [(turn.valid, 3 * k // len(e.turns)) for e in played.episodes for k, turn in enumerate(e.turns)]
    first, last = ([valid for valid, third in places if third == wanted] for wanted in (0, 2))
    drop = Value(None, "episodes have fewer than three turns")
    if first and last:
        early, late = statistics.fmean(first), statistics.fmean(last)
        drop = Value(early - late, error=(early * (1 - early) / len(first) + late * (1 - late) / len(last)) ** 0.5)
    return {
        "valid_actions": Value(ratio, error=_ratio_error(played.episodes)),
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
        "success": _mean([float(episode.success) for episode in episodes]),
        "mean_return": _mean([episode.episode_return for episode in episodes]),
        "mean_progression": _mean([episode.progression for episode in episodes]),
        "mean_turns": _mean([float(len(episode.turns)) for episode in episodes]),
        "equal_returns": _equal_returns(episodes),
        "lost_environment": _share(sum(e.fault is not None or e.stop == "failed" for e in episodes), n),
        "out_of_time": _share(sum(stops[stop] for stop in _OUT_OF_TIME), n),
        "out_of_context": _share(stops["context"] + stops["encoding"], n),
        "early_losses": _share(len(early), n) if n > 1 else Value(None, _ONE_EPISODE),
        "loop_turns": _share(played.looped, known, _NO_IMAGES),
        "stuck_turns": _share(played.stuck, known, _NO_IMAGES),
    }


def _equal_returns(episodes: Sequence[Episode]) -> Value:
    """Share of starts (task and seed) that were played more than once with one return; else of tasks.

    Those that were always won count as unequal: they are solved, which is no reason to worry.
    """
    starts: dict[tuple[str, str], list[Episode]] = defaultdict(list)
    tasks: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.fault is None:
            starts[(episode.task, str(episode.seed))].append(episode)
            tasks[episode.task].append(episode)
    for name, groups in (("starts", starts), ("tasks", tasks)):
        repeated = [group for group in groups.values() if len(group) > 1]
        if repeated:
            unsolved = [[e.episode_return for e in group] for group in repeated if not all(e.success for e in group)]
            equal = sum(max(returns) - min(returns) < 1e-9 for returns in unsolved)
            return Value(equal / len(repeated), f"{equal} of {len(repeated)} {name}")
    return Value(None, _ONE_EPISODE)


def _share(count: int, total: int, otherwise: str = "no turns") -> Value:
    return Value(count / total if total else None, "" if total else otherwise)


def _mean(values: Sequence[float]) -> Value:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Value(statistics.fmean(values), error=error)


def _ratio_error(episodes: Sequence[Episode]) -> float | None:
    """Standard error of valid turns / turns, with whole episodes as the unit (linearised ratio estimator)."""
    turns, n = sum(len(episode.turns) for episode in episodes), len(episodes)
    if n < 2 or not turns:
        return None
    ratio = sum(episode.valid for episode in episodes) / turns
    return (sum((e.valid - ratio * len(e.turns)) ** 2 for e in episodes) * n / (n - 1)) ** 0.5 / turns
