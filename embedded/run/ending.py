"""The last lines of a run: its results, what went wrong, and the commands that continue from here."""

import shlex
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MIN_PAIRS = 10  # with fewer held-out episodes, two standard errors mean nothing
SOLVED = 0.95
ENOUGH_UPDATES = 30
"""Updates of the actor after which more of them are not the first thing to try."""


PROGRAM = "slime-verlog" if shutil.which("slime-verlog") else f"{shlex.quote(sys.executable)} -m inspection"
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
    words = [describe(win_rate(episodes))] if failed < len(episodes) else []
    words += [f"{failed} of {len(episodes)} held-out episodes failed and count as 0"] if failed else []
    return "; ".join(words)


def win_rate(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the share of successful episodes, its binomial standard error, and the number of episodes."""
    return share(episode["success"] for episode in episodes)


def share(values: Iterable[float]) -> dict[str, float]:
    """Compute the mean of zeros and ones, its binomial standard error, and their number."""
    found = list(values)
    rate, n = statistics.fmean(found or [0.0]), len(found)
    return {"mean": round(rate, 4), "se": round((rate * (1 - rate) / max(n, 1)) ** 0.5, 4), "n": n}


def ending(summary: Mapping[str, Any], folder: Path) -> str:
    """Format the last lines of a run: results, warnings, and the commands that continue from here."""
    lines = [f"before: {describe(summary['win_rate_before'])}", f"after:  {describe(summary['win_rate_after'])}"]
    if not summary["win_rate_after"]["mean"]:
        before, after = summary["return_before"], summary["return_after"]
        lines.append(f"return: {before['mean']:.3f} ± {before['se']:.3f} → {after['mean']:.3f} ± {after['se']:.3f}")
    verdict = summary["verdict"]
    lines.append(f"verdict: {verdict['sentence']}")
    if verdict["verdict"] != "improved" and not (summary["fault"] or summary["note"]):
        lines.append(f"next: {next_step(summary)}")
    if failed := summary["failed_episodes"]:
        first = summary["first_failure"]
        lines.append(f"error: {failed} held-out episodes failed and count as 0; the first: {first}")
    if summary["note"]:
        lines.append(f"note: {summary['note']}")
    if summary["fault"]:
        lines.append(f"error: {summary['fault']}")
    lines.append(f"written to {folder}/; policy_best/ is the policy after {summary['best_update']} updates")
    return "\n".join([*lines, *(f"  {command}" for command in commands(folder, summary))])


def commands(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """List the commands that evaluate the last policy, show the episodes, and compare before with after."""
    me, here = PROGRAM, shlex.quote(str(folder))
    lengths = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in summary["lengths"].items())
    return [
        f"{me} evaluate {here}/config.yaml --player {here}/policy_after {lengths} --out {here}/evaluation",
        f"{me} view {here}",
        f"{me} compare {here} {here} --settings '{setting_of(0)}' '{setting_of(summary['updates'])}'",
    ]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Compute mean, standard error and number of the values."""
    found = list(values)
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return {"mean": round(statistics.fmean(found or [0.0]), 4), "se": round(error, 4), "n": len(found)}


def judge(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge whether held-out episodes changed, by the mean difference of pairs with the same seed.

    Compares the win rate, or the return if no episode was won. A change counts if it exceeds two standard errors, and
    there are at least `MIN_PAIRS` pairs.
    """
    key = "success" if any(episode["success"] for episode in (*before, *after)) else "return"
    results = [{(e["task_name"], e["seed"]): float(e[key]) for e in episodes} for episodes in (before, after)]
    pairs = [(results[0][seed], result) for seed, result in results[1].items() if seed in results[0]]
    change = spread(second - first for first, second in pairs)
    means = [(share if key == "success" else spread)(pair[k] for pair in pairs) for k in (0, 1)]
    low, high = (change["mean"] + sign * 2 * change["se"] for sign in (-1, 1))
    word = "improved" if low > 0 else "worse" if high < 0 else "no significant change"
    if len(pairs) < MIN_PAIRS:
        word = f"{len(pairs)} held-out episodes are too few to tell"
    numbers = [f"{mean['mean']:.3f} ± {mean['se']:.3f}" for mean in means]
    sentence = (
        f"{word}: {'win rate' if key == 'success' else 'return'} {numbers[0]} before, {numbers[1]} after; change "
        f"{change['mean']:+.3f}, 95 % interval [{low:+.3f}, {high:+.3f}], over {len(pairs)} pairs of equal seeds"
    )
    return {"verdict": word, "measure": key, "change": change["mean"], "interval": [low, high], "sentence": sentence}


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
    lines = ["", "| seed | win rate before | after | turns per episode before | after | wall time |"]
    lines += ["|---|---|---|---|---|---|"]
    for s in summaries:
        before, after = s["win_rate_before"], s["win_rate_after"]
        lines.append(
            f"| {s['seed']} | {before['mean']:.2f} ± {before['se']:.2f} | {after['mean']:.2f} ± {after['se']:.2f} "
            f"| {s['turns_per_episode_before']:.0f} | {s['turns_per_episode_after']:.0f} | {s['wall_time_s']:.0f} s |"
        )
    return "\n".join(lines)
