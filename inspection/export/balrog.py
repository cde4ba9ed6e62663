"""Writes recorded episodes as the submission folder that BALROG's leaderboard takes (balrog-ai/experiments on GitHub).

    OUT/FAMILY/TASK/TASK_run_00.json, .csv     an episode's numbers, and its steps
    OUT/FAMILY/FAMILY_summary.json             progression with standard error, in percent
    OUT/summary.json                           the mean over the families
    OUT/metadata.yaml, README.md               to be completed by hand

The layout, the keys and the arithmetic are those of BALROG's own evaluator; its `submit.py` computes the same
summaries from the episodes.
"""

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from envs.base import text_of
from inspection.command import VERSION
from inspection.records import replacing, split_prompts
from slime_verlog import ConfigError

FAMILIES = {
    **{"babyai": (5, 10), "babaisai": (40, 3), "textworld": (3, 10)},
    **{"crafter": (1, 10), "nle": (1, 5), "minihack": (8, 5)},
}
"""BALROG's families: how many tasks each has, and the least number of episodes of a task."""
# As in `envs.babyai.levels`, which needs minigrid.
_BABYAI = "BabyAI-MixedTrainLocal-v0/"
_BABYAI_GOALS = ("goto", "pickup", "open", "putnext", "pick_up_seq_go_to")
_TEXTWORLD = ("treasure_hunter", "the_cooking_game", "coin_collector")


def write_balrog(episodes: Iterable[Mapping[str, Any]], out: Path) -> tuple[int, list[str]]:
    """Write the folder `out`; return the number of episodes, and what the leaderboard would find missing.

    Raises ConfigError, and writes nothing, if `out` exists or an episode was not played as BALROG plays it.
    """
    if out.exists():
        raise ConfigError(f"--out {out} exists already; give a new folder")
    with replacing(out) as part:
        return _write(episodes, part)


def _write(episodes: Iterable[Mapping[str, Any]], out: Path) -> tuple[int, list[str]]:
    logs: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    agents, played = set(), set()
    for episode in episodes:
        family, task = balrog_task(episode)
        if (key := (family, task, episode.get("seed"), episode.get("repeat"))) in played:
            raise ConfigError(f"task {task}, seed {episode.get('seed')}, is there twice; give every RUN once")
        played.add(key)
        agents.add((str(episode.get("player")), str(episode.get("setting"))))
        if len(agents) > 1:
            raise ConfigError(f"a submission is of one player, these are several: {sorted(agents)}; see --setting")
        runs = logs[family][task]
        path = out / family / task / f"{task}_run_{len(runs):02d}.json"  # a task with a slash nests twice
        runs.append(_log(episode, task))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(runs[-1], indent=4), encoding="utf-8", errors="replace")
        _write_steps(episode, path.with_suffix(".csv"))
    (player, setting), count = agents.pop(), sum(len(runs) for tasks in logs.values() for runs in tasks.values())
    missing = _missing(logs)
    _write_summaries(logs, out)
    (out / "metadata.yaml").write_text(
        yaml.safe_dump({"name": player}, allow_unicode=True)
        + "oss: false      # true if the model and the strategy are open source\n"
        + "site: null      # a link to more about the agent\n"
        + f'verified: false # BALROG\'s team sets this\ndate: "{date.today().isoformat()}"\n',
        encoding="utf-8",
    )
    played_by = f"Played by slime-verlog {VERSION} with `preset: balrog`" + (f", {setting}." if setting != "-" else ".")
    lines = [f"# {player}", "", played_by, "", "Say here what the agent is.", *(f"- {words}" for words in missing)]
    (out / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return count, missing


def balrog_task(episode: Mapping[str, Any]) -> tuple[str, str]:
    """Return BALROG's family and task of an episode; raises ConfigError if it was played in another way."""
    env, task = str(episode.get("env_path")), str(episode.get("task"))
    options, seed = episode.get("options") or {}, episode.get("seed")
    found = {
        "envs.babyai": ("babyai", _BABYAI + task.removeprefix(_BABYAI)),
        "envs.babaisai": ("babaisai", "env/" + task.removeprefix("env/")),
        "envs.crafter": ("crafter", task),
        "envs.textworld": ("textworld", task),
        "envs.balrog": tuple(task.split("/", 1)),
    }.get(env, ("", task))
    where = f"task {task} of {env}, seed {seed}"
    is_textworld = env == "envs.textworld"
    if (
        len(found) != 2
        or found[0] not in FAMILIES
        or {"", ".", ".."} & set(found[1].split("/"))  # a record may hold any text, and this becomes a path
        or (found[0] == "babyai" and found[1].removeprefix(_BABYAI) not in _BABYAI_GOALS)
        or (is_textworld and (task not in _TEXTWORLD or not options.get("games_path")))
    ):
        hint = "; TextWorld needs BALROG's games in env.games_path" if is_textworld else ""
        raise ConfigError(f"{where}, is not one of BALROG's tasks; leave it out with --task{hint}")
    if options.get("preset") != "balrog" or options.get("max_steps") is not None:
        advice = "evaluate with --set env.preset=balrog and no env.max_steps"
        raise ConfigError(f"{where}, was not played as BALROG does; {advice}")
    if episode.get("stop") == "max_turns":
        raise ConfigError(
            f"{where}, was stopped after {episode.get('turns')} turns, before the game's own limit; evaluate with "
            "--set eval.max_turns=null, and no max_turns"
        )
    return found[0], found[1]


def _log(episode: Mapping[str, Any], task: str) -> dict[str, Any]:
    """An episode's numbers under the names of BALROG's evaluator."""
    turns = [turn for turn in episode["story"] if "summary" not in turn]  # turns of notes do not step the game
    usage, ids = episode.get("usage") or {}, [turn["token_ids"] for turn in episode["story"] if turn.get("token_ids")]
    achievements = {
        name.removeprefix("achievement/"): int(value)
        for name, value in (episode.get("metrics") or {}).items()
        if name.startswith("achievement/")
    }
    return {
        "task": task,
        "action_frequency": dict(Counter(str(turn["executed_action"]) for turn in turns)),
        "input_tokens": usage.get("prompt_tokens") or sum(found["shared"] + len(found["prompt"]) for found in ids),
        "output_tokens": usage.get("completion_tokens") or sum(len(found["response"]) for found in ids),
        **({"done": True} if turns[-1]["terminated"] or turns[-1]["truncated"] else {}),
        "episode_return": episode["return"],
        "num_steps": len(turns),
        "failed_candidates": [turn["response"] for turn in turns if turn["valid"] is False],
        **({"achievements": achievements} if achievements else {}),
        "progression": episode["progression"],
        "seed": episode.get("seed"),
        "agent": {"type": "slime-verlog", "options": dict(episode.get("options") or {})},
        "client": {"client_name": "slime-verlog", "model_id": str(episode.get("player"))},
    }


def _write_steps(episode: Mapping[str, Any], path: Path) -> None:
    """Write what BALROG's evaluator writes per step; the observation is the one after the step, in the next prompt."""
    messages, turns = split_prompts(episode)
    news = [text_of(messages[turn["prompt"][-1]]) if turn["prompt"] else "" for turn in turns]
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.writer(file, escapechar="˘")
        writer.writerow(["Step", "Action", "Reasoning", "Observation", "Reward", "Done"])
        played = [place for place, turn in enumerate(turns) if "summary" not in turn]
        for step, place in enumerate(played):
            turn, after = turns[place], news[place + 1] if place + 1 < len(news) else ""
            done = bool(turn["terminated"] or turn["truncated"])
            writer.writerow([step, turn["executed_action"], turn["response"], after, turn["reward"], done])


def _write_summaries(logs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], out: Path) -> None:
    about: dict[str, dict[str, float]] = {}
    about_all = next(run for tasks in logs.values() for found in tasks.values() for run in found)
    read = wrote = 0
    for family, tasks in logs.items():
        runs = [run for found in tasks.values() for run in found]
        sent, said = (sum(run[key] for run in runs) for key in ("input_tokens", "output_tokens"))
        read, wrote, about[family] = read + sent, wrote + said, _score(runs)
        steps = float(np.mean([run["num_steps"] for run in runs]))
        of_tasks = {task: _score(found) for task, found in tasks.items()}
        tokens = {"input_tokens": sent, "output_tokens": said}
        summary = {**about[family], "average_steps": steps, "tasks": of_tasks, **tokens}
        (out / family / f"{family}_summary.json").write_text(json.dumps(summary, indent=4), encoding="utf-8")
    whole = {
        "average_progress": float(np.mean([score["progression_percentage"] for score in about.values()])),
        "standard_error": float(np.linalg.norm([score["standard_error"] for score in about.values()])) / len(about),
        "environments": about,
        "total_input_tokens": read,
        "total_output_tokens": wrote,
        **{key: about_all[key] for key in ("client", "agent")},
    }
    (out / "summary.json").write_text(json.dumps(whole, indent=4), encoding="utf-8")


def _score(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean and standard error as BALROG computes them: of the population, 0 for a single episode."""
    found = [run["progression"] for run in runs]
    error = float(np.std(found)) / len(found) ** 0.5
    return {
        "progression_percentage": 100 * float(np.mean(found)),
        "standard_error": 100 * error,
        "episodes_played": len(found),
    }


def _missing(logs: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[str]:
    sentences = []
    if absent := [family for family in FAMILIES if family not in logs]:
        sentences.append(f"missing: {', '.join(absent)}; the leaderboard's average is over all six families")
    for family, tasks in logs.items():
        wanted, least = FAMILIES[family]
        if len(tasks) < wanted:
            sentences.append(f"{family}: {len(tasks)} of {wanted} tasks")
        if short := [task for task, runs in tasks.items() if len(runs) < least]:
            sentences.append(f"{family}: fewer than {least} episodes of {len(short)} tasks, such as {short[0]}")
    return sentences
