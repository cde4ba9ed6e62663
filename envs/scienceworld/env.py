"""The ScienceWorld episode: commands, observations, rewards and the scripted player.

A command is valid if the game's parser understands it. Any other command changes nothing, and `look around` is played
instead. The reward is the change of the game's score, which goes from 0 to 1 and drops to -1 when the task is failed.
"""

from pathlib import Path
from typing import Literal

from envs.command_game import CommandGame, list_commands
from envs.errors import ConfigError, did_you_mean
from envs.scienceworld import jvms
from envs.text_game import Frame, GameSettings
from slime_verlog import Field

_MAX_STEPS = 100
_MAX_CHARACTERS = 200
_UNKNOWN = "No known action matches"


class ScienceWorldSettings(GameSettings):
    """Settings of ScienceWorld."""

    no_pictures = "ScienceWorld has no pictures"

    split: Literal["train", "dev", "test"] = "train"
    """Part of a task's variations to play; the seed chooses one of them."""
    simplifications: str = ""
    """ScienceWorld's own simplifications, joined by commas, such as `openDoors,teleportAction`; `easy` for most."""
    admissible_commands: bool = False
    """List the commands that the game would accept with every observation: hundreds, and about 0.1 s per turn."""
    most_jvms: int = Field(16, ge=1)
    """Java processes that one worker process may run at a time, one for each of its live episodes."""


class ScienceWorld(CommandGame):
    """One ScienceWorld episode; it holds a JVM from `reset` to `close`."""

    settings: ScienceWorldSettings
    settings_model = ScienceWorldSettings
    template_path = Path(__file__).with_name("prompt.j2")
    default_action = "look around"

    def __init__(self, task: str, seed: int, settings: ScienceWorldSettings) -> None:
        super().__init__(settings)
        self.task, self.seed = task, seed
        self.deterministic = jvms.is_deterministic()
        known = jvms.load_library().constants.ID2TASK
        self._name = known.get(task, task)  # a task is given by name or by number, such as 4-3
        if self._name not in known.values():
            hint = did_you_mean(task, known.values(), f"there is {', '.join(list(known.values())[:3])}, ...")
            raise ConfigError(f"ScienceWorld has no task {task!r}; {hint}")
        self.max_steps = settings.max_steps or _MAX_STEPS
        self._world: jvms.World | None = None
        self._variation = 0
        self._score = 0.0
        self._history: list[str] = []

    def start(self) -> Frame:
        if self._world is None:
            self._world = jvms.lease(self.settings.most_jvms)
        world = self._world
        variations = world.variations(self._name, self.settings.split)
        self._variation = variations[self.seed % len(variations)]
        self.mission = world.load(self._name, self._variation, self.settings.simplifications)
        self._score, self._history = 0.0, []
        return self._frame(world.look())

    def try_command(self, command: str) -> Frame | None:
        moment = self._playing().send(command)
        if moment.text.startswith(_UNKNOWN):
            return None
        self._history.append(command)
        before, self._score = self._score, moment.score
        return self._frame(moment.text, moment.score - before, moment.over or moment.score < 0)

    def translate(self, candidate: str) -> str | None:
        line = " ".join(candidate.strip().splitlines()[:1]).strip("\"'`*>. \t").removeprefix("[").removesuffix("]")
        return line if line and len(line) <= _MAX_CHARACTERS and line.isascii() and line.isprintable() else None

    def advice(self) -> str:
        """Return the next command of ScienceWorld's own solution, or `look around` once play has left it."""
        known = jvms.solution(self._name, self._variation, self.settings.simplifications, self.settings.most_jvms)
        played = len(self._history)
        return known[played] if tuple(self._history) == known[:played] and played < len(known) else self.default_action

    def close(self) -> None:
        self._running = False
        if self._world is not None:
            world, self._world = self._world, None
            jvms.give_back(world)

    def _playing(self) -> jvms.World:
        assert self._world is not None  # `step` is refused before `reset`
        return self._world

    def _frame(self, text: str, reward: float = 0.0, over: bool = False) -> Frame:
        world = self._playing()
        surroundings = "" if text == (look := world.look()) else look
        shown = [surroundings, world.inventory()]
        if self.settings.admissible_commands and not over:
            shown.append(list_commands(world.commands()))
        late = len(self._history) >= self.max_steps and not over
        return Frame(
            long_term=text,
            short_term="\n\n".join(filter(None, shown)),
            reward=reward,
            terminated=over,
            truncated=late,
            progression=min(max(self._score, 0.0), 1.0),
            metrics={"score": self._score, "failed": float(self._score < 0)},
        )


SETTINGS = ScienceWorldSettings
DEFAULT_TASK = "find-plant"
build_env = ScienceWorld.from_sample
expert_action = ScienceWorld.advice
