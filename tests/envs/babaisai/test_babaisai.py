"""BabaIsAI against what BALROG and Verlog recorded, its options, its endings and its scripted player."""

from typing import Any

import pytest

from envs.babaisai import YOU_BROKEN, BabaIsAI, expert_action
from envs.loading import build_env_from


def make(task: str = "goto_win", seed: int = 0, **env: Any) -> BabaIsAI:
    return build_env_from("envs.babaisai", {"task": task, "seed": seed}, env)


def long_term(observation: Any) -> str:
    return observation["text"]["long_term_context"]


@pytest.mark.parametrize("seed", [2**32, 2**63])
def test_seeds_beyond_32_bits_are_legal(seed: int) -> None:
    assert long_term(make(seed=seed).reset()) == long_term(make(seed=seed % 2**32).reset())


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


def test_the_time_left_is_that_of_the_level_after_a_broken_you_rule() -> None:
    env = make(max_steps=5, show_time_left=True)
    env.reset()
    env.step("idle")
    shown = [break_you(env)[0], *(env.step("idle")[0] for _ in range(5))]
    times = [observation["text"]["short_term_context"] for observation in shown]
    assert times == [f"Time left: {left}%" for left in (100, 80, 60, 40, 20, 0)]


def test_the_scripted_player_idles_where_nothing_wins() -> None:
    env = make()
    env.reset()
    world = env.world
    for index, _, _ in world.interior:
        world.cells[index] = tuple(p for p in world.cells[index] if not (p.kind == "property" and p.name == "win"))
    world.reread()
    assert expert_action(env) == "idle"


def test_a_picture_is_drawn_only_when_asked_for_and_follows_the_world() -> None:
    plain, seeing = make(seed=1), make(seed=1, vlm=True)
    assert "multi_modal_data" not in plain.reset()
    images = [seeing.reset()["multi_modal_data"]["image"][0]]
    images += [seeing.step(action)[0]["multi_modal_data"]["image"][0] for action in ("up", "left", "right")]
    assert {(image.size, image.mode) for image in images} == {((256, 256), "RGB")}
    assert len({image.tobytes() for image in images}) > 1
