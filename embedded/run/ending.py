"""The last lines of a run: its results, what went wrong, and the commands that continue from
here."""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_PAIRS = 10  # with fewer held-out episodes, two standard errors mean nothing
SOLVED = 0.95
ENOUGH_UPDATES = 30
"""Updates of the actor after which more of them are not the first thing to try."""
MEASURES = {"success": "win rate", "progression": "progression", "return": "return"}
"""What held-out episodes are judged by, the deciding one first, and the names."""
UNCHANGED = "no significant change"
Episode = Mapping[str, Any]

PROGRAM = (
    "slime-verlog"
    if shutil.which("slime-verlog")
    else f"{shlex.quote(sys.executable)} -m inspection"
)
"""How a shell calls the command; a checkout that is not installed has no `slime-verlog`."""


def setting_of(updates: int | str) -> str:
    """Name the `setting` of records that were played after this many updates."""
    return f"update {updates}"


def describe(rate: Mapping[str, float]) -> str:
    """Put a win rate in words."""
    return f"win rate {rate['mean']:.3f} ± {rate['se']:.3f} over {rate['n']:.0f} seeds"


def describe_played(episodes: Sequence[Mapping[str, Any]]) -> str:
    """Put the win rate of held-out episodes in words, and how many of them failed."""
    failed = sum(episode["fault"] is not None for episode in episodes)
    words = []
    if failed < len(episodes):
        words.append(describe(win_rate(played(episodes))))
    if failed:
        words.append(f"{failed} of {len(episodes)} held-out episodes failed")
    return "; ".join(words)


def played(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that means are over: those that did not fail, or all if all did."""
    return [episode for episode in episodes if episode["fault"] is None] or list(episodes)


def win_rate(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the share of successful episodes, its standard error, and the number of episodes."""
    return spread(episode["success"] for episode in episodes)


def ending(summary: Mapping[str, Any], folder: Path) -> str:
    """Format the last lines of a run: results, warnings, and the commands that continue from
    here."""
    verdict = summary["verdict"]
    lines = [
        f"before: {describe(summary['win_rate_before'])}",
        f"after:  {describe(summary['win_rate_after'])}",
        f"verdict: {verdict['sentence']}",
    ]
    if verdict["verdict"] != "improved" and not (summary["fault"] or summary["note"]):
        lines.append(f"next: {next_step(summary)}")
    if failed := summary["failed_episodes"]:
        first = summary["first_failure"]
        lines.append(f"error: {failed} held-out episodes failed; the first: {first}")
    if summary["note"]:
        lines.append(f"note: {summary['note']}")
    if summary["fault"]:
        lines.append(f"error: {summary['fault']}")
    lines.append(
        f"written to {folder}/; policy_best/ is the policy after {summary['best_update']} updates"
    )
    return "\n".join([*lines, *(f"  {command}" for command in commands(folder, summary))])


def commands(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """List the commands that evaluate the last policy, show the episodes, and compare before with
    after."""
    here = shlex.quote(str(folder))
    lengths = " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in summary["lengths"].items()
    )
    last = setting_of(summary["updates"])
    return [
        f"{PROGRAM} evaluate {here}/config.yaml --player {here}/policy_after {lengths} --out "
        f"{here}/evaluation",
        f"{PROGRAM} view {here}",
        f"{PROGRAM} compare {here} {here} --settings '{setting_of(0)}' '{last}'",
    ]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Compute mean, standard error and number of the values."""
    found = list(values)
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return {
        "mean": round(statistics.fmean(found or [0.0]), 4),
        "se": round(error, 4),
        "n": len(found),
    }


@dataclass(frozen=True)
class Change:
    """How one measure of held-out episodes changed, by the mean difference of pairs with the same
    seed."""

    measure: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    mean: float
    interval: tuple[float, float]
    """95 %: two standard errors."""
    pairs: int

    @classmethod
    def of(cls, measure: str, pairs: Sequence[tuple[Episode, Episode]]) -> Change:
        """Compute it from the pairs (episode before, episode after)."""
        before = [float(first[measure]) for first, _ in pairs]
        after = [float(second[measure]) for _, second in pairs]
        change = spread(second - first for first, second in zip(before, after, strict=True))
        mean = change["mean"]
        reach = 2 * change["se"]
        return cls(
            measure, spread(before), spread(after), mean, (mean - reach, mean + reach), len(pairs)
        )

    @property
    def verdict(self) -> str:
        """Say what the interval means; it means nothing with fewer than `MIN_PAIRS` pairs."""
        if self.pairs < MIN_PAIRS:
            return f"{self.pairs} held-out episodes are too few to tell"
        low, high = self.interval
        return "improved" if low > 0 else "worse" if high < 0 else UNCHANGED

    def words(self) -> str:
        """Return both results and the change."""
        low, high = self.interval
        before = f"{self.before['mean']:.3f} ± {self.before['se']:.3f} before"
        after = f"{self.after['mean']:.3f} ± {self.after['se']:.3f} after"
        change = f"change {self.mean:+.3f}, 95 % interval [{low:+.3f}, {high:+.3f}]"
        return f"{MEASURES[self.measure]} {before}, {after}; {change}"


def judge(before: Sequence[Episode], after: Sequence[Episode]) -> dict[str, Any]:
    """Judge whether held-out episodes changed: win rate, progression and return, each by its 95 %
    interval. Pairs with a failed episode are left out.

    The first of them that changed decides. The sentence names it first, and then the others.
    """
    earlier = {(episode["task_name"], episode["seed"]): episode for episode in played(before)}
    pairs = []
    for episode in played(after):
        first = earlier.get((episode["task_name"], episode["seed"]))
        if first is not None:
            pairs.append((first, episode))
    changes = [Change.of(measure, pairs) for measure in MEASURES]
    changed = [change for change in changes if change.verdict in ("improved", "worse")]
    nonzero = [change for change in changes if change.before["mean"] or change.after["mean"]]
    deciding = [*changed, *nonzero, changes[-1]][0]
    words = [f"{deciding.verdict}: {deciding.words()}, over {len(pairs)} pairs of equal seeds"]
    told = [deciding.interval]
    for change in changes:
        if change.interval not in told:  # progression often equals the win rate
            told.append(change.interval)
            words.append(change.words())
    return {
        "verdict": deciding.verdict,
        "measure": deciding.measure,
        "change": deciding.mean,
        "interval": list(deciding.interval),
        "sentence": "; ".join(words),
    }


def is_better(after: Sequence[Episode], before: Sequence[Episode]) -> bool:
    """Whether `judge` says that `after` improved; if it sees no change, the higher means count, in
    the same order."""
    verdict = judge(before, after)["verdict"]
    if verdict in ("improved", "worse"):
        return verdict == "improved"
    return _means(after) > _means(before)


def _means(episodes: Sequence[Episode]) -> list[float]:
    found = played(episodes)
    return [statistics.fmean(float(episode[key]) for episode in found) for key in MEASURES]


def next_step(summary: Mapping[str, Any]) -> str:
    """Suggest what to try after a run that did not improve."""
    if summary["alarms"]:
        return f"first what the warning said: {next(iter(summary['alarms'].values()))}"
    if summary["win_rate_before"]["mean"] >= SOLVED:
        return "the policy won before PPO; choose a harder task, or fewer demonstrated answers of the expert"
    if summary["actor_updates"] < ENOUGH_UPDATES:
        return f"train longer: --updates {2 * max(summary['updates'], ENOUGH_UPDATES)}, in another --out"
    if not summary["win_rate_after"]["mean"]:
        return "no held-out episode was ever won: reward progress, or begin with an easier task"
    return "read the episodes; then try larger batches (--set-flag rollout_batch_size=512) or rewards for progress"


def seeds_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with one row per seed."""
    lines = [
        "",
        "| seed | win rate before | after | turns per episode before | after | wall time | "
        "verdict |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for summary in summaries:
        before = summary["win_rate_before"]
        after = summary["win_rate_after"]
        verdict = summary["verdict"]
        rates = (
            f"{before['mean']:.2f} ± {before['se']:.2f} | {after['mean']:.2f} ± {after['se']:.2f}"
        )
        turns = (
            f"{summary['turns_per_episode_before']:.0f} | {summary['turns_per_episode_after']:.0f}"
        )
        judged = f"{verdict['verdict']}: {MEASURES[verdict['measure']]} {verdict['change']:+.3f}"
        lines.append(
            f"| {summary['seed']} | {rates} | {turns} | {summary['wall_time_s']:.0f} s | {judged} |"
        )
    return "\n".join(lines)
