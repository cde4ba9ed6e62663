"""Plays episodes with a scripted expert and writes its answers as THINK/ACTION text.

The environment's module must have `expert_action(env)`. Some actions are random, to reach unusual states.
`imitation.py` imitates the random actions too, on purpose, so PPO has something left to learn. In supervised data sets
(`inspection/demonstrations.py`) every answer is the expert's.
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
"""Seeds of demonstrated episodes. By default, training seeds start at 0 and evaluation seeds at 1,000,000,000.
Environments that map seeds to fewer worlds do so within each range of 1,000,000,000."""
_SEEDS_EACH = 100_000
"""Distance between the first seeds of runs with consecutive `seed`; they repeat after 10,000 runs."""
_ARTICLES = re.compile(r"\b(?:the|a|an)\s+")


@dataclass(frozen=True)
class Demonstration:
    """One demonstrated turn: the prompt as in a rollout, and the answer."""

    messages: list[dict[str, Any]]
    answer: str
    task: str = ""
    seed: int = 0
    turn: int = 0
    progression: float = 0.0
    """Progression of its episode at the end; 1 is success."""


Reason = Callable[[Any, str, str], str]
"""Writes the thought before an action, given the environment, the observation's text and the action."""


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

    A turn's answer is the played action. With `expert_answers` it is always the expert's action, even if a random one
    was played instead. `reason` writes the thoughts (default: `think`). Environments without a list of actions get no
    random ones.

    Raises:
        ConfigError: the environment has no expert, the history is not a window, or training or evaluation uses the
            same seeds.
    """
    if config.history != "window":
        raise ConfigError("demonstrations need one prompt per turn: use history: window")
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
        is_random = rng.random() < random_share and len(env.actions) > 0
        action = rng.choice(list(env.actions)) if is_random else expert(env)
        taught = expert(env) if is_random and expert_answers else action
        answer = f"THINK: {reason(env, observation['text']['long_term_context'], taught)}\nACTION: {taught}"
        turns.append(Demonstration(messages, answer, spec.name, spec.env.metadata["seed"], len(turns)))
        # A random move has no reason to show.
        played = answer if taught == action else f"THINK: I try something.\nACTION: {action}"
        shown = observation
        observation, done, info = env.step(played)
        past.append(Exchange(shown, played, info["valid_action"], info["executed_action"]))
    env.close()
    return [replace(turn, progression=info["progression"]) for turn in turns]


def think(mission: str, observation: str) -> str:
    """A short thought: the first line of the observation with the mission's object, or that there is none."""
    wanted = _ARTICLES.split(mission)[-1]
    for line in observation.splitlines():
        if f" {wanted} " in f" {line} ":
            return _ARTICLES.sub("", line, count=1)
    return f"no {wanted} here"
