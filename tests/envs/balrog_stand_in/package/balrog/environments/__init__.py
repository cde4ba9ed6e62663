"""A package of BALROG's shape with a toy behind it: walk to a door in a corridor."""

import numpy as np
from PIL import Image


class Anything:
    """TextWorld's action space: every text is in it, and it cannot be listed."""

    def __contains__(self, text: object) -> bool:
        return True


class Corridor:
    """Draws the door's place the way each family takes its seed; `max_steps`, spaces and stats as
    BALROG has them."""

    max_steps = 20

    def __init__(self, family: str, config) -> None:
        self.family, self.config, self.resets = family, config, 0
        self.language_action_space = (
            Anything() if family == "textworld" else ["left", "right", "Wait", "68"]
        )
        self.default_action = "help" if family == "textworld" else "Wait"

    def reset(self, seed=None):
        self.resets += 1
        rng = {
            "babyai": np.random.RandomState(seed),
            "babaisai": np.random,
            "crafter": np.random.RandomState((self.config.envs.crafter_kwargs.seed, self.resets)),
            "textworld": np.random.RandomState(self.config.envs.env_kwargs.seed),
        }[self.family]
        self.door, self.place, self.score, self.steps = int(rng.randint(1, 1000)), 0, 0, 0
        return self.look(), {}

    def step(self, action):
        if self.family == "babaisai":
            self.door += int(np.random.randint(2))
        if action == "68":
            raise ValueError("Action '68' is not recognized or not supported for this environment")
        self.steps += 1
        self.place += {"right": 1, "left": -1}.get(action, 0)
        self.score += action == "right"
        done = self.place == 5
        reward = self.score if self.family == "textworld" else np.float64(done)
        return self.look(), reward, np.bool_(done), False, {}

    def look(self):
        text = {
            "long_term_context": f"at {self.place}, door {self.door}",
            "short_term_context": f"score {self.score}",
        }
        mission = {"mission": "find the door"} if self.family == "babyai" else {}
        return {"text": text, "image": Image.new("RGB", (4, 4)), **mission}

    def get_stats(self):
        # MiniHack's statistics are incomplete before the first step.
        return {"progression": self.place / 5} if self.steps else {}

    def close(self) -> None:
        self.door = None


class EnvWrapper:
    """The outer wrapper, which passes on only what BALROG's passes on."""

    def __init__(self, env: Corridor, family: str) -> None:
        self.env, self.family = env, family

    @property
    def max_steps(self) -> int:
        return self.env.max_steps

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)

    def step(self, action):
        return self.env.step(action)

    def get_instruction_prompt(self, instructions=None) -> str:
        return f"\nStand-in {self.family}: {instructions}\n"

    def get_stats(self):
        return self.env.get_stats()

    def close(self) -> None:
        self.env.close()


class NameNotFound(Exception):
    """What the old gym raises for an id that is not registered."""

    __module__ = "gym.error"


MINIHACK_ERRORS = {
    "MiniHack-Boxoban-Hard-v0": ModuleNotFoundError(
        "To use Boxoban environments, please download maps."
    ),
    "MiniHack-Quest-Hard-v0": RuntimeError("raqm_layout() failed."),
    "MiniHack-Corridor-R3-v0": RuntimeError("something else"),
}
"""As minihack raises them without Boxoban's maps and with Pillow 13."""


def make_env(env_name, task, config, render_mode=None):
    if env_name == "nle":
        raise ModuleNotFoundError("No module named 'nle'", name="nle")
    if env_name == "minihack":
        raise MINIHACK_ERRORS.get(task) or NameNotFound(f"Environment `{task}` doesn't exist.")
    if task not in config.tasks[f"{env_name}_tasks"]:
        raise KeyError(f"Task '{task}' not found")
    assert dict(**config.envs.textworld_kwargs)["max_episode_steps"] == 20
    return EnvWrapper(Corridor(env_name, config), env_name)
