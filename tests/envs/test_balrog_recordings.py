"""BabyAI, BabaIsAI and Crafter play the episodes that BALROG and Verlog recorded, step by step."""

import re
from typing import Any

import pytest

from envs.babaisai import YOU_BROKEN
from tests.conftest import load_recording
from tests.envs.contract import Case

OPTIONS: dict[str, dict[str, Any]] = {
    "babaisai.json.gz": {},
    "babyai.json.gz": {},
    "babyai_bot.json.gz": {},
    "babyai_dists8.json.gz": {"num_dists": 8},
    "crafter.json.gz": {},
    "crafter_long.json.gz": {},
    "crafter_script.json.gz": {},
}


def build(episode: dict[str, Any], **options: Any) -> Any:
    return Case(f"envs.{episode['env']}", episode["task"], options).build(episode["seed"])


def as_recorded(text: str, recorded: str) -> bool:
    """Whether the text is the recorded one; where BALROG printed an object, whether it shows the
    level inside."""
    if "defaultdict" not in recorded:
        return text == recorded
    inside = re.search(r"'long_term_context': (['\"])(.*?)\1, 'short_term_context'", recorded)
    assert inside is not None
    return text == f"{YOU_BROKEN}\n\n" + inside.group(2).replace("\\n", "\n")


def state(env: Any) -> dict[str, Any]:
    """Crafter's own state."""
    player = env.world.player
    return {
        "ach": {name: count for name, count in player.achievements.items() if count},
        "inv": {name: count for name, count in player.inventory.items() if count},
        "face": list(player.facing),
        "pos": player.pos.tolist(),
        "sleep": player.sleeping,
        "light": round(env.world.daylight, 6),
    }


@pytest.mark.parametrize("file", OPTIONS)
def test_every_recorded_step_of_balrog_is_repeated(file: str) -> None:
    for episode in load_recording(file)["episodes"]:
        env = build(episode, preset="balrog", **OPTIONS[file])
        text = env.reset()["text"]
        long_term, short_term = episode["initial"]
        assert (
            as_recorded(text["long_term_context"], long_term)
            and text["short_term_context"] == short_term
        )
        assert (env.max_steps, env.mission) == (episode["max_steps"], episode["mission"] or "")
        assert (list(env.actions), env.default_action) == (
            episode["actions"],
            episode["default_action"],
        )
        for step in episode["steps"]:
            observation, done, info = env.step(step["a"])
            text = observation["text"]
            assert (
                as_recorded(text["long_term_context"], step["l"])
                and text["short_term_context"] == step["s"]
            )
            assert (info["reward"], info["progression"]) == (step["r"], step["p"])
            assert (info["terminated"], info["truncated"]) == (step["te"], step["tr"])
            assert done == (step["te"] or step["tr"])
            if "x" in step:
                assert state(env) == step["x"]


def test_answers_are_judged_and_paid_as_verlog_recorded() -> None:
    for episode in load_recording("verlog_prompts.json.gz")["episodes"]:
        env = build(episode)
        env.reset()
        for step in episode["steps"]:
            info = env.step(step["response"])[2]
            assert info["valid_action"] == step["is_valid"]
            # Verlog draws one of a diagonal's two directions, and plays random actions while the
            # player sleeps.
            if episode["env"] != "crafter" or "-" not in step["response"]:
                assert info["executed_action"] == step["executed"]
            if episode["env"] == "crafter":
                assert (info["reward"] == -0.1) == (step["reward"] == -0.1)
            else:
                assert (
                    info["reward"] == pytest.approx(step["reward"])
                    and info["terminated"] == step["te"]
                )
