"""Scores recorded episodes with another reward or judge, without playing them, and compares old and
new.

    slime-verlog rescore outputs/evaluation --with my_reward.py:score --out outputs/rescored
    slime-verlog rescore outputs/evaluation --judge custom_configs/judge.yaml --out outputs/judged

`score(episode)` gets an episode of episodes.jsonl: among others `task_name`, `seed`, `success`,
`progression`, `messages`, and `story`, whose turns have `response`, `executed_action`, `valid` and
`reward`. It returns a number, which is paid in the last turn, or a list with one reward per turn of
the story.

A judge is asked as in play, with its settings and rubric from `env.judge` of the YAML. It reads the
prompt's last message as the observation, and the system message as the task. Failed episodes are
left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.judge.rubric import JudgeSettings

Score = Callable[[Mapping[str, Any]], Any]
FORM = "return a number, or one number per turn of its story"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "episodes", type=Path, metavar="RUN", help="folder of an evaluation, or a file of episodes"
    )
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument(
        "--with",
        dest="function",
        metavar="FILE.py:FUNCTION",
        help="the new reward; or MODULE:FUNCTION",
    )
    by.add_argument("--judge", metavar="YAML", help="a configuration of envs.judge")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="gets episodes.jsonl"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the episodes in --out")


def run(options: argparse.Namespace) -> int:
    """Write the episodes with their new scores, and print the comparison."""
    from envs.judge.rubric import JudgedSettings
    from envs.loading import load_attribute
    from inspection.evaluate.pairs import compare
    from inspection.records import FILE, append_episode, read_episodes, replacing
    from inspection.target import check_free
    from slime_verlog import ConfigError, read_settings, read_yaml_mapping

    target = options.out / FILE
    kept = 0
    source = options.episodes / FILE if options.episodes.is_dir() else options.episodes
    check_free(target, options.overwrite, [source])
    if options.judge:
        keys = read_yaml_mapping(options.judge, "configuration").get("env") or {}
        judge = read_settings(JudgedSettings, keys, "env.").judge
        score: Score = lambda episode: ask_judge(episode, judge)
    else:
        score = load_attribute(options.function, "--with")
    with replacing(target) as part:
        for episode in read_episodes(options.episodes, quiet=True):  # `compare` notes a cut record
            if episode.get("stop") != "failed" and episode["story"]:
                append_episode(
                    part,
                    rescored(episode, score),
                    episode.get("player", "-"),
                    episode.get("setting", "-"),
                )
                kept += 1
        if not kept:
            raise ConfigError(f"{options.episodes} holds no episode that was played")
    print(f"{compare(options.episodes, options.out)}\n\n{kept} episodes written to {options.out}")
    return 0


def rescored(episode: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """Return the episode with its new score; raises ConfigError if the function fails or returns
    something else."""
    from envs.errors import describe
    from slime_verlog import ConfigError, SlimeVerlogError

    where = f"task {episode.get('task_name')}, seed {episode.get('seed')}"
    story = episode["story"]
    try:
        given = score(episode)
    except SlimeVerlogError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"the new reward fails on {where}: {describe(error)}") from error
    plain = given.tolist() if hasattr(given, "tolist") else given  # NumPy's
    rewards = plain if isinstance(plain, list | tuple) else [0.0] * (len(story) - 1) + [plain]
    try:
        numbers = [math.nan if isinstance(reward, str) else float(reward) for reward in rewards]
    except (TypeError, ValueError):
        numbers = [math.nan]
    if len(numbers) != len(story) or not math.isfinite(sum(numbers)):
        raise ConfigError(
            f"the new reward of {where} ({len(story)} turns) is {given!r:.200}; {FORM}"
        )
    turns = [{**turn, "reward": reward} for turn, reward in zip(story, numbers, strict=True)]
    return {**episode, "story": turns, "return": sum(numbers)}


def ask_judge(episode: Mapping[str, Any], settings: JudgeSettings) -> list[float]:
    """Return the rewards of an episode that is played once more, from its record, before the
    judge."""
    from envs.base import BaseInteractionEnv, Observation, StepInfo, make_observation, text_of
    from envs.judge import JudgedEnv

    messages = episode["messages"]
    story = episode["story"]
    played = [turn for turn in story if "summary" not in turn]

    class Recorded(BaseInteractionEnv):
        instruction_prompt = "\n".join(
            text_of(message) for message in messages if message["role"] == "system"
        )

        def reset(self) -> Observation:
            self._left = iter(played)
            self._shown = (
                make_observation(text_of(messages[turn["prompt"][-1]])) for turn in played
            )
            return next(self._shown)

        def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
            turn = next(self._left)
            known = ("reward", "executed_action", "terminated", "truncated", "progression")
            info: Any = {"valid_action": turn["valid"], **{key: turn[key] for key in known}}
            return next(self._shown, make_observation("")), turn["done"], info

    env = JudgedEnv(Recorded(), settings, str(episode.get("task_name") or ""))
    env.reset()
    return [0.0 if "summary" in turn else env.step(turn["response"])[2]["reward"] for turn in story]
