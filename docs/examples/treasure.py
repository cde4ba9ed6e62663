"""Treasure: walk to a treasure on an island."""

import random

from envs.base import describe_task, read_env_settings
from envs.text_game import Frame, GameSettings, TextGame

STEPS = {"go north": (0, 1), "go south": (0, -1), "go east": (1, 0), "go west": (-1, 0)}


class Treasure(TextGame):
    mission = "find the treasure"
    actions = list(STEPS)
    default_action = "go north"  # executed in place of an answer that names no action

    def __init__(self, seed, settings):
        super().__init__(settings)
        self.seed = seed
        self.max_steps = settings.max_steps or 20

    def start(self):
        rng = random.Random(self.seed)
        # The treasure's place, seen from here.
        self.east = rng.choice([-3, -2, 2, 3])
        self.north = rng.randint(-3, 3)
        self.turn = 0
        return self.look("You stand on a beach.")

    def play(self, action):
        (east, north) = STEPS[action]
        before = self.steps_left()
        self.east = self.east - east
        self.north = self.north - north
        self.turn = self.turn + 1
        if self.steps_left() == 0:
            return Frame("You found the treasure.", reward=1.0, terminated=True, progression=1.0)
        return self.look("You walk.", reward=0.1 * (before - self.steps_left()))

    def steps_left(self):
        return abs(self.east) + abs(self.north)

    def look(self, event, reward=0.0):
        sides = [
            ("east", self.east),
            ("west", -self.east),
            ("north", self.north),
            ("south", -self.north),
        ]
        way = " and ".join(name for name, distance in sides if distance > 0)
        text = f"{event}\nThe treasure is {way} of here."
        return Frame(text, reward=reward, truncated=self.turn >= self.max_steps)

    def render_prompt(self):
        return f"You are on an island. Goal: {self.mission}. Actions: {', '.join(self.actions)}."


def build_env(sample, args):
    _, seed = describe_task(sample)
    return Treasure(seed, read_env_settings(GameSettings, args))


def expert_action(env):  # for demonstrations, and as the upper line of evaluations
    if env.east:
        return "go east" if env.east > 0 else "go west"
    return "go north" if env.north > 0 else "go south"
