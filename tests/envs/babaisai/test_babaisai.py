"""BabaIsAI against what BALROG and Verlog recorded, its options, its endings and its scripted
player."""

from typing import Any

from envs.babaisai import YOU_BROKEN, BabaIsAI, expert_action
from envs.loading import build_env_from


def make(task: str = "goto_win", seed: int = 0, **env: Any) -> BabaIsAI:
    return build_env_from("envs.babaisai", {"task": task, "seed": seed}, env)


def long_term(observation: Any) -> str:
    return observation["text"]["long_term_context"]


def break_you(env: BabaIsAI) -> tuple[Any, bool, Any]:
    """Take the IS out of the YOU rule by hand, then bump into it with any move."""
    world = env.world
    index = next(
        i
        for i, x, y in world.interior
        if (w := world.top(x, y)) and w.kind == "property" and w.name == "you"
    )
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


def test_the_scripted_player_idles_where_nothing_wins() -> None:
    env = make()
    env.reset()
    world = env.world
    for index, _, _ in world.interior:
        world.cells[index] = tuple(
            p for p in world.cells[index] if not (p.kind == "property" and p.name == "win")
        )
    world.reread()
    assert expert_action(env) == "idle"
