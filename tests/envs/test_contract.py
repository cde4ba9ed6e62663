"""The contract of `envs/base.py`, kept by every environment; cases and fuzzed answers are in
`contract.py`."""

import json
import pickle
import random
from typing import Any

import numpy as np
import pytest

from envs.base import BaseInteractionEnv
from envs.errors import EpisodeOverError
from envs.text_game import TextGame
from tests.cases import some
from tests.envs.contract import CASES, MOST_TURNS, Case, fuzz

pytestmark = pytest.mark.parametrize(
    "case", some(CASES, [case for case in CASES if not case.slow]), ids=str
)

INFO_TYPES = {
    "reward": float,
    "terminated": bool,
    "truncated": bool,
    "valid_action": bool,
    "executed_action": str,
    "progression": float,
}


def _play(env: BaseInteractionEnv, answers: list[str]) -> list[tuple]:
    """Reset and answer until the episode ends; return what was seen, without pictures'
    identities."""
    trace = [_seen(env, env.reset())]
    for answer in answers:
        observation, done, info = env.step(answer)
        trace.append((_seen(env, observation), done, *(info[key] for key in INFO_TYPES)))
        if done:
            break
    return trace


def _seen(env: BaseInteractionEnv, observation: Any) -> tuple:
    images = (observation.get("multi_modal_data") or {}).get("image", [])
    pixels = tuple(np.asarray(image).tobytes() for image in images)
    return (
        observation["obs_str"],
        json.dumps(observation["text"]),
        env.mission,
        env.instruction_prompt,
        pixels,
    )


def _end(case: Case, env: BaseInteractionEnv) -> None:
    env.reset()
    for answer in case.sensible_answers(env, MOST_TURNS):
        if env.step(answer)[1]:
            return
    pytest.fail(f"{case} did not end within {MOST_TURNS} turns; give the case a smaller max_steps")


def test_seed_and_answers_decide_the_episode(case: Case) -> None:
    first, second = case.build(), case.build()
    first.reset()
    answers = case.sensible_answers(first, 60)
    assert _play(first, answers) == _play(second, answers)


def test_episodes_side_by_side_do_not_disturb_each_other(case: Case) -> None:
    alone, env, other = case.build(), case.build(), case.build(seed=4)
    alone.reset()
    answers = case.sensible_answers(alone, 20)
    expected = _play(alone, answers)
    trace = [_seen(env, env.reset())]
    other.reset()
    for step, answer in enumerate(answers[: len(expected) - 1]):
        random.seed(step)
        np.random.seed(step)
        observation, done, info = env.step(answer)
        trace.append((_seen(env, observation), done, *(info[key] for key in INFO_TYPES)))
        if other.step(answers[-1 - step])[1]:
            other.reset()
    assert trace == expected


def test_different_seeds_give_different_episodes(case: Case) -> None:
    if not case.seeds_differ:
        pytest.skip(f"{case}: the task fixes the whole episode, seeds do not matter")
    start = lambda seed: _play(case.build(seed), [])[0][:3]
    first = start(0)
    assert any(start(seed) != first for seed in range(1, 6))


def test_reset_replays_the_episode_from_any_point(case: Case) -> None:
    env = case.build()
    env.reset()
    answers = case.sensible_answers(env, 30)
    first = _play(env, answers)
    assert _play(env, answers[:2]) == first[:3]
    assert _play(env, answers) == first
    _end(case, env)
    assert _play(env, answers) == first


def test_step_is_refused_before_reset_and_after_the_end(case: Case) -> None:
    env = case.build()
    with pytest.raises(EpisodeOverError):
        env.step("anything")
    _end(case, env)
    with pytest.raises(EpisodeOverError):
        env.step("anything")


def test_no_answer_is_an_exception_and_the_valid_ratio_is_counted(case: Case) -> None:
    env = case.build()
    env.reset()
    valid = 0
    for answer in fuzz(env, case.fuzzed_answers, named=case.fuzzed_actions):
        observation, done, info = env.step(answer)
        _check_info(env, info)
        assert isinstance(observation["obs_str"], str)
        valid += info["valid_action"]
        if done:
            env.reset()
    assert 0 < valid < case.fuzzed_answers, f"valid ratio {valid / case.fuzzed_answers}"


def _check_info(env: BaseInteractionEnv, info: Any) -> None:
    for key, kind in INFO_TYPES.items():
        assert type(info[key]) is kind, (
            f"info[{key!r}] is {info[key]!r}, which is no {kind.__name__}"
        )
    if not info["valid_action"]:
        assert info["executed_action"] == env.default_action
        if isinstance(env, TextGame) and env.settings.format_penalty:
            assert info["reward"] == -env.settings.format_penalty
    if info.get("action_span") is not None:
        start, end = info["action_span"]
        assert 0 <= start <= end


def test_the_action_span_marks_the_action_in_the_answer(case: Case) -> None:
    env = case.build()
    env.reset()
    answer = f"THINK: well then\nACTION: {case.sensible_answers(env, 1)[0]}  \n"
    info = env.step(answer)[2]
    if info.get("action_span") is None:
        pytest.skip(f"{case}: answers have no action part of their own")
    start, end = info["action_span"]
    assert answer[start:end] == info["action"]


def test_task_description_and_replies_travel_between_processes(case: Case) -> None:
    case, env = pickle.loads(pickle.dumps(case)), case.build()
    observation = env.reset()
    assert pickle.loads(pickle.dumps(observation))["text"] == observation["text"]
    reply = env.step(case.sensible_answers(env, 1)[0])
    assert pickle.loads(pickle.dumps(reply))[2] == reply[2]
    assert _play(case.build(), []) == _play(env, [])


def test_the_task_is_described_in_words_and_observations_become_chat_messages(case: Case) -> None:
    """With pictures only on request; at the end, `close` may be called twice."""
    env = case.build()
    observation = env.reset()
    assert env.whole_prompts or env.instruction_prompt.strip()
    assert isinstance(env.mission, str) and isinstance(env.answer_format, str)
    assert not env.actions or env.default_action in env.actions
    assert env.max_steps >= 0
    formatted = env.format_observation(observation)
    message = formatted[0] if isinstance(formatted, list) else formatted
    assert message["role"] == "user"
    wants_images = bool(case.options.get("vlm"))
    assert ("multi_modal_data" in observation) == wants_images
    parts = message["content"] if isinstance(message["content"], list) else []
    assert ("image" in {part["type"] for part in parts}) == wants_images
    env.close()
    env.close()
