"""Scripted play written out as THINK/ACTION text, for the policy to start from.

An environment module that offers `expert_action(env)` can be demonstrated; some actions are random instead, so that
unusual states are seen. `imitation.py` imitates these too, on purpose, to leave something to learn; as a supervised
data set (`inspection/demonstrations.py`) every answer is the expert's.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from envs.loading import load_env_module
from rollout.bridge.settings import RolloutSettings
from rollout.data_source import make_episode, pick_task, read_tasks
from rollout.errors import ConfigError
from rollout.play.memory import Exchange, build_memory, build_messages
from rollout.spec import EpisodeSpec

DEMONSTRATION_SEEDS = range(2_000_000_000, 3_000_000_000)
"""Seeds of demonstrated episodes. Training counts up from 0 and evaluation from 1,000,000,000, unless the YAML says
otherwise; environments that fold seeds into fewer worlds do so within each thousand million."""
_SEEDS_EACH = 100_000
"""Seeds between those of one run's `seed` and the next one's; they come round again after 10,000."""
_ARTICLES = re.compile(r"\b(?:the|a|an)\s+")


@dataclass(frozen=True)
class Demonstration:
    """One demonstrated turn: the conversation as a rollout would show it, and the answer."""

    messages: list[dict[str, Any]]
    answer: str
    task: str = ""
    seed: int = 0
    turn: int = 0
    progression: float = 0.0
    """How far its episode came in the end; 1 is success."""


Reason = Callable[[Any, str, str], str]
"""The thought before an action, from the environment, the observation's text and the action."""


def demonstrate(
    config: RolloutSettings,
    episodes: int,
    random_share: float,
    seed: int,
    reason: Reason | None = None,
    *,
    expert_answers: bool = False,
) -> list[Demonstration]:
    """Play `episodes` of the config's tasks; each action is random with probability `random_share`.

    A turn's answer is the action that was played, or, with `expert_answers`, the expert's even where a random action
    was played in its place: what it would do in the states that random moves lead to. `reason` writes the thoughts;
    None: `think`. Where an environment lists no actions, none is random.

    Raises:
        ConfigError: an environment without an expert, a history that is not a window, or seeds that training or
            evaluation uses.
    """
    if config.history != "window":
        raise ConfigError("demonstrations show each turn by itself: use history: window")
    _check_seeds(config)
    tasks, rng = read_tasks(config), random.Random(seed)
    turns: list[Demonstration] = []
    for k in tqdm(range(episodes), desc="demonstrations", unit="episode", leave=False):
        number = DEMONSTRATION_SEEDS[(seed * _SEEDS_EACH + k) % len(DEMONSTRATION_SEEDS)]
        spec = make_episode(config, pick_task(tasks, seed, k), k, number)
        thinker = reason or (lambda env, text, _: think(env.mission, text))
        turns += _play(config, spec, random_share, rng, thinker, expert_answers)
    return turns


def _check_seeds(config: RolloutSettings) -> None:
    first, last = DEMONSTRATION_SEEDS.start, DEMONSTRATION_SEEDS[-1]
    held_out = config.eval.seed_start
    if config.seed_start >= first or (held_out <= last and held_out + config.eval.episodes > first):
        raise ConfigError(
            f"seed_start is {config.seed_start} and eval.seed_start is {held_out}, but demonstrations are played with "
            f"seeds {first} to {last}; choose others"
        )


def _play(
    config: RolloutSettings,
    spec: EpisodeSpec,
    random_share: float,
    rng: random.Random,
    reason: Reason,
    expert_answers: bool,
) -> list[Demonstration]:
    expert = getattr(load_env_module(spec.env.env_path), "expert_action", None)
    if expert is None:
        raise ConfigError(f"{spec.env.env_path} has no expert_action(env), so it cannot be demonstrated")
    memory, env, turns, info = build_memory(config.memory), spec.env.build(), [], {"progression": 0.0}
    past: deque[Exchange] = deque(maxlen=memory.horizon)
    observation, done = env.reset(), False
    while not done and len(turns) < (config.max_turns or env.max_steps or 1000):
        messages = build_messages(
            memory, env.instruction_prompt, list(past), observation, len(turns), env.answer_format
        )
        astray = rng.random() < random_share and len(env.actions) > 0
        action = rng.choice(list(env.actions)) if astray else expert(env)
        taught = expert(env) if astray and expert_answers else action
        answer = f"THINK: {reason(env, observation['text']['long_term_context'], taught)}\nACTION: {taught}"
        turns.append(Demonstration(messages, answer, spec.name, spec.env.metadata["seed"], len(turns)))
        # A move at random has no reason to show.
        played = answer if taught == action else f"THINK: I try something.\nACTION: {action}"
        shown = observation
        observation, done, info = env.step(played)
        past.append(Exchange(shown, played, info["valid_action"], info["executed_action"]))
    env.close()
    return [replace(turn, progression=info["progression"]) for turn in turns]


def think(mission: str, observation: str) -> str:
    """A short thought: the line of the observation that shows what the mission names, or that none does."""
    wanted = _ARTICLES.split(mission)[-1]
    for line in observation.splitlines():
        if f" {wanted} " in f" {line} ":
            return _ARTICLES.sub("", line, count=1)
    return f"no {wanted} here"
