"""The recall game: its questions, what each answer pays, and that only a memory can carry the
fact."""

from envs.loading import build_env_from
from envs.recall import Recall


def game(seed: int = 3, **options: object) -> Recall:
    env = build_env_from("envs.recall", {"task": "recall", "seed": seed}, options)
    assert isinstance(env, Recall)
    return env


def test_the_expert_answers_every_question_and_only_them() -> None:
    env = game(max_steps=60, ask_every=25)
    observation, done, played, rewards = env.reset(), False, [], []
    assert observation["obs_str"] == f"The first light is {env.first}."
    while not done:
        played.append(env.advice())
        _, done, info = env.step(f"THINK: {env.explain()}\nACTION: {played[-1]}")
        rewards.append(info["reward"])
    assert (
        [k for k, action in enumerate(played) if action != "next"]
        == [24, 49]
        == [k for k, reward in enumerate(rewards) if reward == 1.0]
    )
    assert len(played) == 60 and sum(rewards) == 2.0
    assert info["terminated"] and info["progression"] == 1.0 and env.facts() == (env.first,)


def test_only_a_question_accepts_a_colour_so_actions_cannot_carry_the_fact() -> None:
    env = game(max_steps=4, ask_every=4)
    env.reset()
    for _ in range(3):
        _, _, info = env.step("red")
        assert (
            not info["valid_action"]
            and info["executed_action"] == "next"
            and info["reward"] == -0.1
        )
    wrong = next(colour for colour in env.actions if colour not in (env.first, "next"))
    _, done, info = env.step(wrong)
    assert done and info["valid_action"] and info["reward"] == info["progression"] == 0.0
