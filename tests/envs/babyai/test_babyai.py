"""BabyAI: parity with the recordings, every registered level, options, and the scripted expert."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("minigrid", reason="BabyAI needs minigrid; pip install 'slime-verlog[envs]' enables this test")

from envs import babyai
from envs.babyai import levels
from envs.babyai.levels import HELD_OUT, MIXED_GOALS, describe_view, level_names
from envs.errors import ConfigError, MissingDependencyError
from tests.conftest import load_recording

LEVELS = sorted(set(level_names().values()))
RECORDINGS = {"babyai.json.gz": {}, "babyai_bot.json.gz": {}, "babyai_dists8.json.gz": {"num_dists": 8}}


def build(task: str = "goto", seed: int = 0, **options: Any) -> babyai.BabyAI:
    return babyai.build_env(SimpleNamespace(metadata={"task": task, "seed": seed}), SimpleNamespace(env=options))


@pytest.mark.parametrize("file", RECORDINGS)
def test_every_recorded_step_of_balrog_is_replayed_exactly(file: str) -> None:
    for episode in load_recording(file)["episodes"]:
        env = build(episode["task"], episode["seed"], preset="balrog", **RECORDINGS[file])
        text = env.reset()["text"]
        assert [text["long_term_context"], text["short_term_context"]] == episode["initial"]
        assert (env.mission, env.max_steps) == (episode["mission"], episode["max_steps"])
        assert (list(env.actions), env.default_action) == (episode["actions"], episode["default_action"])
        for step in episode["steps"]:
            observation, _, info = env.step(step["a"])
            text = observation["text"]
            assert (text["long_term_context"], text["short_term_context"]) == (step["l"], step["s"])
            assert (info["reward"], info["progression"]) == (step["r"], step["p"])
            assert (info["terminated"], info["truncated"]) == (step["te"], step["tr"])


def test_answers_are_translated_and_paid_as_in_verlog() -> None:
    recorded = [e for e in load_recording("verlog_prompts.json.gz")["episodes"] if e["env"] == "babyai"]
    assert recorded
    for episode in recorded:
        env = build(episode["task"], episode["seed"])
        env.reset()
        for step in episode["steps"]:
            _, _, info = env.step(step["response"])
            assert (info["executed_action"], info["valid_action"]) == (step["executed"], step["is_valid"])
            assert (info["reward"], info["terminated"]) == (step["reward"], step["te"])


def _slow_description(game: Any) -> str:
    """Describe the view from minigrid's own visibility mask, cell by cell, as a reference."""
    grid, visible = game.gen_obs_grid()
    size = game.agent_view_size
    middle, last = size // 2, size - 1
    shown = {(i, j): grid.get(i, j) for i in range(size) for j in range(size) if visible[i, j] and grid.get(i, j)}
    shown.pop((middle, last), None)
    count = lambda n, where: f"{n} step{'s' if n > 1 else ''} {where}"
    lines = [f"You carry a {game.carrying.color} {game.carrying.type}"] if game.carrying else []
    for di, dj, where in ((0, -1, "forward"), (-1, 0, "left"), (1, 0, "right")):
        for n in range(1, size):
            cell = shown.get((middle + di * n, last + dj * n))
            if cell:
                lines += [f"a wall {count(n, where)}"] if cell.type == "wall" else []
                break
    for (i, j), cell in sorted(shown.items()):
        if cell.type == "wall":
            continue
        state = ["open", "closed", "locked"][cell.encode()[2]] + " " if cell.type == "door" else ""
        places = [count(abs(i - middle), "left" if i < middle else "right")] if i != middle else []
        places += [count(last - j, "forward")] if j != last else []
        lines.append(f"a {state}{cell.color} {cell.type} {' and '.join(places)}")
    return "\n".join(lines)


@pytest.mark.parametrize("level", LEVELS)
def test_every_registered_level_tells_what_minigrid_shows(level: str) -> None:
    env = build(level, seed=5)
    rng = random.Random(level)
    env.reset()
    for _ in range(40):
        _, done, _ = env.step(rng.choice(["go forward", "go forward", *babyai.ACTIONS]))
        assert describe_view(env.game) == _slow_description(env.game)
        if done:
            env.reset()


@pytest.mark.parametrize("short", ["GoToObj", "GoToObjS6", "BossLevel", *MIXED_GOALS])
def test_short_and_full_names_are_one_task(short: str) -> None:
    full = level_names().get(short, f"BabyAI-MixedTrainLocal-v0/{short}")
    first, second = build(short, seed=7), build(full, seed=7)
    assert first.reset() == second.reset()
    assert first.mission == second.mission


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("gotoo", "did you mean goto"),
        ("BabyAI-MixedTrainLocal-v0/pick_up", "BabyAI-MixedTrainLocal-v0/pickup"),
        ("BabyAI-GoToObjMaze-v1", "BabyAI-GoToObjMaze-v0"),
        ("qqqqqqqq", "for example goto"),
    ],
)
def test_an_unknown_task_is_refused_with_the_nearest_names(task: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(task)


def test_a_minigrid_without_levels_is_named_and_its_mixed_tasks_still_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "level_names", dict)
    with pytest.raises(ConfigError, match=r"'GoToObj' is not one of goto, .* minigrid \S+ registers no levels .* fork"):
        build("GoToObj")
    build("goto").reset()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_distractors": 3}, "unknown key 'env.num_distractors'"),
        ({"num_dists": -1}, "env.num_dists must be at least 0"),
        ({"num_dists": "8"}, "env.num_dists must be"),
        ({"preset": "verl"}, "env.preset must be one of 'verlog', 'balrog'"),
        ({"format_penalty": -0.1}, "env.format_penalty"),
        ({"max_steps": 0}, "env.max_steps"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build(**options)


def test_num_dists_is_refused_where_a_level_has_no_such_setting() -> None:
    with pytest.raises(ConfigError, match=r"BabyAI task 'OpenDoor' has no env.num_dists"):
        build("OpenDoor", num_dists=2)
    build("GoToLocal", num_dists=2).reset()


def test_without_minigrid_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("minigrid", "envs.babyai."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'slime-verlog\[envs\]'"):
        build()


def test_no_picture_is_drawn_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    env = build()
    monkeypatch.setattr(type(env.game), "get_pov_render", lambda *_, **__: pytest.fail("drew a picture"))
    monkeypatch.setattr(type(env.game), "gen_obs_grid", lambda *_, **__: pytest.fail("encoded a picture"))
    env.reset()
    assert "multi_modal_data" not in env.step("turn left")[0]


def test_the_picture_for_vlms_is_balrogs_first_person_view() -> None:
    env = build("open", vlm=True)
    env.reset()
    image = env.step("turn left")[0]["multi_modal_data"]["image"][0]
    assert (image.mode, image.size) == ("RGB", (112, 112))
    assert (np.asarray(image) == env.game.get_pov_render(tile_size=16)).all()


def _win(env: babyai.BabyAI) -> dict:
    env.reset()
    done = False
    while not done:
        _, done, info = env.step(babyai.expert_action(env))
    return info


def test_verlog_pays_one_for_a_win_and_balrog_pays_less_the_longer_it_took() -> None:
    assert _win(build())["reward"] == 1.0
    env = build(preset="balrog")
    assert _win(env)["reward"] == pytest.approx(1 - 0.9 * env.game.step_count / 64)
    assert _win(build(preset="balrog", binary_reward=True))["reward"] == 1.0


def test_a_win_by_the_default_action_of_an_invalid_answer_is_paid_the_penalty() -> None:
    by_chance = []
    for seed in range(10):
        env, done = build(seed=seed), False
        env.reset()
        while not done:
            advice = babyai.expert_action(env)
            _, done, info = env.step("no idea" if advice == env.default_action else advice)
        if not info["valid_action"]:
            by_chance.append((info["executed_action"], info["reward"], info["terminated"], info["progression"]))
    assert by_chance and set(by_chance) == {("go forward", -0.1, True, 1.0)}


def test_the_step_limit_truncates_and_scales_balrogs_reward() -> None:
    env = build(max_steps=5, preset="balrog")
    env.reset()
    assert env.max_steps == 5
    infos = [env.step("turn left")[2] for _ in range(5)]
    assert [info["truncated"] for info in infos] == [False] * 4 + [True]
    assert not any(info["terminated"] for info in infos)


def test_the_prompt_states_goal_actions_and_their_effects() -> None:
    env = build("pick_up_seq_go_to", seed=1)
    env.reset()
    assert env.mission in env.instruction_prompt
    for action, effect in env.actions.items():
        assert f"{action}: {effect}" in env.instruction_prompt


def test_the_users_own_prompt_template_takes_the_place_of_ours(tmp_path: Any) -> None:
    template = tmp_path / "mine.j2"
    template.write_text("Do this: {{ mission }} in {{ max_steps }} steps")
    env = build(prompt_template=str(template))
    env.reset()
    assert env.instruction_prompt == "Do this: go to the green key in 64 steps"


@pytest.mark.parametrize("goal", MIXED_GOALS)
def test_mixed_missions_never_name_what_is_held_out_and_generation_is_silent(goal: str, capfd: Any) -> None:
    env = build(goal, num_dists=8)
    for seed in range(60):
        env.seed = seed
        env.reset()
        assert not any(name in env.mission for name in HELD_OUT)
    assert capfd.readouterr().out == ""


def test_the_expert_plays_the_recorded_expert_games() -> None:
    for episode in load_recording("babyai_bot.json.gz")["episodes"]:
        env = build(episode["task"], episode["seed"])
        env.reset()
        for step in episode["steps"]:
            assert babyai.expert_action(env) == step["a"]
            env.step(step["a"])


@pytest.mark.parametrize("stray", [0.0, 0.3], ids=["followed", "ignored_at_times"])
@pytest.mark.parametrize("goal", MIXED_GOALS)
def test_the_expert_wins_even_if_its_advice_is_not_always_taken(goal: str, stray: float) -> None:
    wins = 0.0
    for seed in range(20):
        env, rng, done = build(goal, seed), random.Random(seed), False
        env.reset()
        while not done:
            advice = babyai.expert_action(env)
            _, done, info = env.step(rng.choice(list(babyai.ACTIONS)) if rng.random() < stray else advice)
        wins += info["progression"]
    # An opened box is gone, so a stray toggle may make a mission impossible.
    assert wins == 20 if stray == 0 else wins >= 18


@pytest.mark.parametrize("level", ["BossLevel", "UnlockToUnlock", "PutNextS5N2Carrying", "MoveTwoAcrossS5N2"])
def test_the_expert_solves_hard_levels_asked_only_from_mid_episode_on(level: str) -> None:
    env, rng = build(level, seed=1), random.Random(0)
    env.reset()
    for _ in range(10):
        env.step(rng.choice(["turn left", "turn right", "go forward", "pick up", "drop"]))
    done = False
    while not done:
        _, done, info = env.step(babyai.expert_action(env))
    assert info["progression"] == 1.0


def test_the_expert_never_fails_even_where_no_plan_exists() -> None:
    env, done = build("pickup", seed=0, max_steps=60), False
    env.reset()
    for thing in env.game.instrs.desc.obj_set:
        env.game.grid.set(*thing.cur_pos, None)
    while not done:
        _, done, _ = env.step(babyai.expert_action(env))
