"""BabaIsAI against what BALROG and Verlog recorded, its options, its endings and its scripted player."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.babaisai import YOU_BROKEN, BabaIsAI, build_env, expert_action, find_plan
from envs.babaisai.levels import TASKS
from envs.errors import ConfigError
from envs.loading import build_env_from
from rollout.bridge.settings import load_settings
from tests.conftest import load_recording

ALL_TASKS = sorted(TASKS)
recording = cache(load_recording)


def make(task: str = "goto_win", seed: int = 0, **env: Any) -> BabaIsAI:
    return build_env(SimpleNamespace(metadata={"task": task, "seed": seed}), SimpleNamespace(env=env))


def long_term(observation: Any) -> str:
    return observation["text"]["long_term_context"]


def _agrees(text: str, recorded: str) -> bool:
    """Whether the text is the recorded one; where BALROG printed an object, whether it shows the level inside."""
    if "defaultdict" not in recorded:
        return text == recorded
    inside = re.search(r"'long_term_context': (['\"])(.*?)\1, 'short_term_context'", recorded)
    return text == f"{YOU_BROKEN}\n\n" + inside.group(2).replace("\\n", "\n")


@pytest.mark.parametrize("task", ALL_TASKS)
def test_every_recorded_step_of_balrog_is_repeated(task: str) -> None:
    episodes = [e for e in recording("babaisai.json.gz")["episodes"] if e["task"] == f"env/{task}"]
    assert episodes
    for episode in episodes:
        env = make(episode["task"], episode["seed"], preset="balrog")
        assert (list(env.actions), env.default_action) == (episode["actions"], episode["default_action"])
        assert _agrees(long_term(env.reset()), episode["initial"][0])
        for step in episode["steps"]:
            observation, done, info = env.step(step["a"])
            assert _agrees(long_term(observation), step["l"])
            assert observation["text"]["short_term_context"] == step["s"]
            assert (info["reward"], info["progression"]) == (step["r"], step["p"])
            assert (info["terminated"], info["truncated"]) == (step["te"], step["tr"])
            assert done == (step["te"] or step["tr"])


def test_answers_are_judged_and_paid_as_verlog_recorded() -> None:
    episode = next(e for e in recording("verlog_prompts.json.gz")["episodes"] if e["env"] == "babaisai")
    env = make(episode["task"], episode["seed"])
    env.reset()
    for step in episode["steps"]:
        observation, _, info = env.step(step["response"])
        assert (info["executed_action"], info["valid_action"]) == (step["executed"], step["is_valid"])
        assert info["reward"] == pytest.approx(step["reward"])
        assert (info["terminated"], info["truncated"]) == (step["te"], step["tr"])
        shown = step["messages"][-1]["content"].removeprefix("Current Observation:\n")
        assert shown.startswith(long_term(observation) + "\n\nWhat will you do next?")


def test_there_are_forty_tasks_and_balrogs_names_work_too() -> None:
    assert len(TASKS) == 40
    for task in TASKS:
        short, balrog = make(task, 5), make(f"env/{task}", 5)
        assert short.reset() == balrog.reset()


def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"two_room-make_wal.*two_room-make_wall_win"):
        make("env/two_room-make_wal")


def test_the_shipped_yaml_is_accepted_and_builds_its_tasks() -> None:
    path = Path(__file__).parents[3] / "custom_configs" / "babaisai.yaml"
    config = load_settings(SimpleNamespace(custom_config_path=str(path)))
    for task in config.tasks:
        env = build_env_from(config.rollout_interaction_env_path, {"task": task, "seed": 0}, config.env)
        assert (env.settings.format_penalty, env.settings.binary_reward) == (0.1, True)


def test_an_unknown_option_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"env\.time_limit"):
        make(time_limits="truncated")


def test_the_generator_is_its_own_and_starts_anew_at_every_reset() -> None:
    env = make("two_room-make_you", 7)
    first = env.reset()
    np.random.seed(1)
    env.step("up")
    assert env.reset() == first
    state = np.random.get_state()[1].tolist()
    env.reset()
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("seed", [2**32, 2**63])
def test_seeds_beyond_32_bits_are_legal(seed: int) -> None:
    assert long_term(make(seed=seed).reset()) == long_term(make(seed=seed % 2**32).reset())


def test_a_win_pays_one_in_training_and_less_the_later_under_balrogs_preset() -> None:
    trained, measured = make(seed=3), make(seed=3, preset="balrog")
    trained.reset(), measured.reset()
    plan = find_plan(trained.world)
    for action in plan:
        _, done, info = trained.step(action)
        _, _, native = measured.step(action)
    assert done and info["terminated"] and info["progression"] == 1.0
    assert info["reward"] == 1.0
    assert native["reward"] == 1 - 0.9 * (len(plan) / 100)


def test_running_out_of_steps_is_truncation_unless_balrogs_word_is_asked_for() -> None:
    for env, ending in ((make(), "truncated"), (make(preset="balrog"), "terminated")):
        env.reset()
        infos = [env.step("idle") for _ in range(100)]
        assert [done for _, done, _ in infos] == [False] * 99 + [True]
        assert {key: infos[-1][2][key] for key in ("terminated", "truncated")} == {
            "terminated": ending == "terminated",
            "truncated": ending == "truncated",
        }
        assert infos[-1][2]["progression"] == 0.0


def test_the_step_limit_is_an_option() -> None:
    env = make(max_steps=3)
    env.reset()
    assert [env.step("idle")[1] for _ in range(3)] == [False, False, True]


def break_you(env: BabaIsAI) -> tuple[Any, bool, Any]:
    """Take the IS out of the YOU rule by hand, then bump into it with any move."""
    world = env.world
    index = next(i for i, x, y in world.interior if (w := world.top(x, y)) and w.kind == "property" and w.name == "you")
    world.cells[index] = ()
    world.reread()
    return env.step("up")


def test_breaking_the_you_rule_is_said_in_a_sentence_and_the_next_level_shown() -> None:
    env = make("two_room-make_you", 2)
    env.reset()
    before = env.world
    for _ in range(10):
        env.step("idle")
    observation, done, info = break_you(env)
    assert env.world is not before and not done
    assert long_term(observation).startswith(YOU_BROKEN + "\n\nActive rules:\n")
    assert "defaultdict" not in long_term(observation) and "0x" not in long_term(observation)
    assert info["metrics"]["you_rule_broken"] == 1.0
    assert YOU_BROKEN not in long_term(env.step("idle")[0]), "it is said once"


def test_the_level_after_a_broken_you_rule_has_all_its_steps() -> None:
    env = make(max_steps=5)
    env.reset()
    for _ in range(3):
        env.step("idle")
    break_you(env)
    assert [env.step("idle")[1] for _ in range(5)] == [False] * 4 + [True]


def test_the_time_left_is_that_of_the_level_after_a_broken_you_rule() -> None:
    env = make(max_steps=5, show_time_left=True)
    env.reset()
    env.step("idle")
    shown = [break_you(env)[0], *(env.step("idle")[0] for _ in range(5))]
    times = [observation["text"]["short_term_context"] for observation in shown]
    assert times == [f"Time left: {left}%" for left in (100, 80, 60, 40, 20, 0)]


@pytest.mark.parametrize("task", ALL_TASKS)
def test_the_scripted_player_wins_every_task(task: str) -> None:
    for seed in range(10, 13):
        env = make(task, seed, preset="balrog")
        env.reset()
        done = False
        while not done:
            _, done, info = env.step(expert_action(env))
        assert info["progression"] == 1.0, f"seed {seed}"


def test_the_scripted_player_copes_with_moves_it_did_not_advise() -> None:
    env = make("two_room-break_stop-goto_win", 4)
    env.reset()
    done, turn = False, 0
    while not done:
        advice = expert_action(env)
        _, done, info = env.step("left" if turn % 3 == 0 else advice)
        turn += 1
    assert info["progression"] == 1.0


def test_the_scripted_player_idles_where_nothing_wins() -> None:
    env = make()
    env.reset()
    world = env.world
    for index, _, _ in world.interior:
        world.cells[index] = tuple(p for p in world.cells[index] if not (p.kind == "property" and p.name == "win"))
    world.reread()
    assert expert_action(env) == "idle"


def test_the_prompt_and_the_answer_format_name_every_action() -> None:
    env = make()
    env.reset()
    for action, effect in env.actions.items():
        assert f"{action}: {effect}" in env.instruction_prompt
        assert action in env.answer_format


def test_a_picture_is_drawn_only_when_asked_for_and_follows_the_world() -> None:
    plain, seeing = make(seed=1), make(seed=1, vlm=True)
    assert "multi_modal_data" not in plain.reset()
    images = [seeing.reset()["multi_modal_data"]["image"][0]]
    images += [seeing.step(action)[0]["multi_modal_data"]["image"][0] for action in ("left", "right")]
    assert {(image.size, image.mode) for image in images} == {((256, 256), "RGB")}
    assert images[0].tobytes() != images[1].tobytes()
