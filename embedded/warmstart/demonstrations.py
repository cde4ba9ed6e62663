"""Plays episodes with a scripted expert and writes its responses as THINK/ACTION text.

The expert is `expert_action(env)` of the environment's module. Some actions are random, to reach
unusual states. `imitation.py` imitates the random actions too, on purpose, so PPO has something
left to learn. In supervised data sets (`inspection/demonstrations.py`) every response is the
expert's.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from envs.errors import describe
from envs.loading import checked_text, load_env_module
from rollout.bridge.settings import RolloutSettings
from rollout.errors import ConfigError, EnvironmentFault, SlimeVerlogError
from rollout.play.conversation import Conversation
from rollout.play.memory import Compaction, memory_of
from rollout.play.notes import write_facts
from rollout.spec import EpisodeSpec
from rollout.tasks import make_episode, pick_task, read_tasks
from rollout.workers.reply import read_step
from rollout.workers.worker import make_reply

DEMONSTRATION_SEEDS = range(2_000_000_000, 3_000_000_000)
"""Seeds of demonstrated episodes. By default, training seeds start at 0 and evaluation seeds at
1,000,000,000. Environments that map seeds to fewer worlds do so within each range of
1,000,000,000."""
_SEEDS_EACH = 100_000
"""Distance between the first seeds of runs with consecutive `seed`; they repeat after 10,000
runs."""
_COMPACTED = 0.05
"""Probability that a conversation of `history: full` is compacted before a demonstrated turn."""
_MAX_WORDS = 12  # words of an observation that a thought repeats
_SENTENCE_END = re.compile(r"(?<=[.!?]) ")
_ARTICLES = re.compile(r"\b(?:the|a|an)\s+")


@dataclass(frozen=True)
class Demonstration:
    """One demonstrated turn: the prompt as in a rollout, and the response."""

    messages: list[dict[str, Any]]
    response: str
    task: str = ""
    seed: int = 0
    turn: int = 0
    progression: float = 0.0
    """Progression of its episode at the end; 1 is success."""
    valid: bool = True
    """Whether the environment accepted the played response."""
    finished: bool = True
    """Whether its episode was played to its end."""


Reason = Callable[[Any, str, str], str]
"""Writes the thought before an action, given the environment, the observation's text and the
action."""


def demonstrate(
    config: RolloutSettings,
    episodes: int,
    random_share: float,
    seed: int,
    reason: Reason | None = None,
    *,
    expert_answers: bool = False,
    needs_expert: bool = True,
    most_turns: int | None = None,
) -> list[Demonstration]:
    """Play `episodes` of the config's tasks; each action is random with probability `random_share`.

    A turn's answer is the played action. With `expert_answers` it is always the expert's action,
    even if a random one was played instead. `reason` writes the thoughts; default: what the
    module's `explain_action` says before its last sentence, or else a quote of the observation.
    Environments without a list of actions get no random ones; with `needs_expert=False`, those
    without an expert get no others. An episode is cut after `most_turns`.

    Raises:
        ConfigError: no expert; prompts with images; or seeds that training or evaluation uses.
        EnvironmentFault: an environment raised.
    """
    if episodes < 1 or not 0 <= random_share <= 1:
        wanted = "at least one episode and a share of random moves from 0 to 1"
        raise ConfigError(f"demonstrations need {wanted}, got {episodes} and {random_share:g}")
    _check_seeds(config)
    tasks = read_tasks(config)
    rng = random.Random(seed)
    turns: list[Demonstration] = []
    for k in tqdm(
        range(episodes), desc="demonstrations", unit="episode", leave=False, disable=None
    ):
        number = DEMONSTRATION_SEEDS[(seed * _SEEDS_EACH + k) % len(DEMONSTRATION_SEEDS)]
        spec = make_episode(config, pick_task(tasks, seed, k), k, number)
        expert = getattr(load_env_module(spec.env.env_path), "expert_action", None)
        if expert is None and needs_expert:
            raise ConfigError(
                f"{spec.env.env_path} has no expert_action(env), so it cannot be demonstrated"
            )
        player = _player(
            expert,
            random_share,
            rng,
            reason or _find_thinker(spec.env.env_path, rng),
            expert_answers,
        )
        try:
            turns += _play(config, spec, player, most_turns, rng, is_random=expert is None)
        except SlimeVerlogError:
            raise
        except Exception as error:
            raised = f"{spec.env.env_path} raised {describe(error, spec.env.env_path)}"
            raise EnvironmentFault(f"task {spec.name!r}, seed {number}: {raised}") from error
    return turns


def _find_thinker(env_path: str, rng: random.Random) -> Reason:
    """Return the default `Reason` of an environment's module.

    The last sentence of an explanation, unless it is the only one, is left out: it names the
    expert's action, and most actions are random.
    """
    explain = getattr(load_env_module(env_path), "explain_action", None)
    if explain is not None:

        def without_last_sentence(env: Any, text: str, action: str) -> str:
            sentences = _SENTENCE_END.split(checked_text(explain(env), explain))
            return " ".join(sentences[:-1] or sentences)

        return without_last_sentence
    return lambda env, text, action: think(env.mission, text) if env.mission else quote(text, rng)


def _check_seeds(config: RolloutSettings) -> None:
    first = DEMONSTRATION_SEEDS.start
    last = DEMONSTRATION_SEEDS[-1]
    held_out = config.eval.seed_start
    is_held_out = held_out <= last and held_out + config.eval.episodes > first
    if config.seed_start >= first or is_held_out:
        raise ConfigError(
            f"seed_start is {config.seed_start} and eval.seed_start is {held_out}, but "
            f"demonstrations are played with seeds {first} to {last}; choose others"
        )


Player = Callable[[Any, str], tuple[str, str]]
"""Returns the response to learn and the one to play, given the environment and the observation's
text."""


def _player(
    expert: Callable[[Any], str] | None,
    random_share: float,
    rng: random.Random,
    reason: Reason,
    expert_answers: bool,
) -> Player:
    """Play the environment's expert with random actions in between, or random actions alone without
    an expert."""

    def play(env: Any, text: str) -> tuple[str, str]:
        if expert is None:
            # Each thought quotes a part of the observation, which teaches the policy to read it.
            response = _response(quote(text, rng), rng.choice(list(env.actions)))
            return response, response
        is_random = rng.random() < random_share and len(env.actions) > 0
        action = rng.choice(list(env.actions)) if is_random else checked_text(expert(env), expert)
        taught = checked_text(expert(env), expert) if is_random and expert_answers else action
        response = _response(reason(env, text, taught), taught)
        if taught == action:
            return response, response
        # A random move has no reason that could be shown.
        return response, _response("I try something.", action)

    return play


def _response(thought: str, action: str) -> str:
    return f"THINK: {thought}\nACTION: {action}"


def _play(
    config: RolloutSettings,
    spec: EpisodeSpec,
    player: Player,
    most_turns: int | None,
    rng: random.Random,
    *,
    is_random: bool,
) -> list[Demonstration]:
    memory = memory_of(config)
    conversation = Conversation(memory)
    env = spec.env.build()
    turns = []
    info = {"progression": 0.0}
    reply = make_reply(env, env.reset())
    limit = min(config.max_turns or env.max_steps or 1000, most_turns or math.inf)
    steps = 0
    seed = spec.env.metadata["seed"]
    while not reply.done and steps < limit:
        conversation.show(reply)
        # The context's length is not known here, so a conversation is compacted at random turns.
        left = 0 if isinstance(memory, Compaction) and rng.random() < _COMPACTED else None
        if reply.facts and conversation.wants_notes(left=left):
            notes = write_facts(reply.facts)
            conversation.show(reply, notes=True)
            turns.append(Demonstration(conversation.messages, notes, spec.name, seed, len(turns)))
            conversation.noted(notes)
            conversation.show(reply)
        messages = conversation.messages
        if any(not isinstance(message["content"], str) for message in messages):
            raise ConfigError(
                f"task {spec.name!r}: the prompts have images, but demonstrations are text only; "
                "remove env.vlm from the YAML, or train a vision-language model on GPUs as "
                "scripts/run_geo3k_vlm.sh does"
            )
        if is_random and not env.actions:
            raise ConfigError(
                f"task {spec.name!r}: {spec.env.env_path} takes free text (its actions are empty) "
                "and has no expert_action(env), so there is nothing to imitate; add "
                "expert_action(env), which returns a scripted player's next answer, or train a "
                "language model: --model MODEL --demonstrations 0"
            )
        shown = reply.observation
        answers = player(env, shown["text"]["long_term_context"])
        response, played = (conversation.with_notes(answer, reply.facts) for answer in answers)
        observation, done, info = read_step(env.step(played))
        reply = make_reply(env, observation, done=done, info=info)
        conversation.answered(shown, played, info["valid_action"], info["executed_action"])
        steps += 1
        turns.append(
            Demonstration(
                messages, response, spec.name, seed, len(turns), valid=info["valid_action"]
            )
        )
    env.close()
    return [replace(turn, progression=info["progression"], finished=reply.done) for turn in turns]


def think(mission: str, observation: str) -> str:
    """Write a short thought: the first line of the observation with the mission's object, or that
    there is none."""
    wanted = _ARTICLES.split(mission)[-1]
    for line in observation.splitlines():
        if f" {wanted} " in f" {line} ":
            return _shorten(_ARTICLES.sub("", line, count=1))
    return f"no {wanted} here"


def quote(observation: str, rng: random.Random) -> str:
    """Write a short thought for environments without a mission: the start of a random line of the
    observation."""
    lines = [line for line in observation.splitlines() if line.strip()]
    return _shorten(rng.choice(lines)) if lines else "I try something."


def _shorten(line: str) -> str:
    return " ".join(line.split()[:_MAX_WORDS])
