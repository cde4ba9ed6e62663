"""Bases of games with one named action or one free command per turn: parsing, penalty and
bookkeeping.

Every response executes exactly one legal action. An invalid one executes the default action and
receives the format penalty instead of the game's reward. Of a free command, only the game can tell
whether it understood it; one that it does not understand does not change it.
"""

import abc
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, SupportsFloat

from pydantic import model_validator

from envs.base import (
    BaseInteractionEnv,
    Observation,
    StepInfo,
    describe_task,
    make_observation,
    read_env_settings,
)
from envs.calls import outside_thoughts
from envs.errors import ConfigError, EnvironmentFault, EpisodeOverError, place_of_method
from envs.loading import check_arguments, finish
from envs.templates import render_template
from slime_verlog import Field, Settings

ANSWER_FORMAT = (
    "Choose your next move. Answer in exactly this form:\n"
    "THINK: your reasoning, step by step\n"
    "ACTION: one allowed action"
)
COMMAND_FORMAT = (
    "Choose your next move. Answer in exactly this form:\n"
    "THINK: your reasoning, step by step\n"
    "ACTION: one command"
)
IMAGE_ONLY = "The picture shows what you see."
"""Text of every observation under `vlm: only`."""
MAX_CHARACTERS = 100
_COMMAND = re.compile(r"[a-z0-9][a-z0-9 '-]*", re.IGNORECASE)
_JOINING = frozenset({"and", "then"})
"""Text adventures read the words after these as a second command in the same turn."""
_MARKERS = tuple(
    re.compile(rf"{marker}[*\s]*")
    for marker in (r"ACTION[*\s]*:", r"(?i:action)[*\s]*:", r"\bAction\b\s*(?:[-–—=]\s)?")
)
"""What stands before the action, from the surest form on."""


class GameSettings(Settings):
    """Settings that all games share. The defaults are those of the preset `verlog`."""

    balrog: ClassVar[Mapping[str, Any]] = {"binary_reward": False, "format_penalty": 0.0}
    """Values that the preset `balrog` puts in place of the defaults."""
    no_pictures: ClassVar[str] = ""
    """Sentence that refuses `vlm`, in games that cannot draw."""

    preset: Literal["verlog", "balrog"] = "verlog"
    """Defaults: `verlog` for training, `balrog` to measure as BALROG does. Keys that you set
    yourself win over both."""
    binary_reward: bool = False
    """Replace every positive reward by 1."""
    format_penalty: float = Field(0.1, ge=0)
    """Minus this number is the reward of a response without a legal action; with 0, it is the
    game's own reward."""
    max_steps: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated; null for the game's own limit."""
    vlm: bool | Literal["only"] = False
    """Add an image to every observation; `only` shows it instead of the text."""
    show_time_left: bool = False
    """Add the time left, in tenths of `max_steps`, to the short-term part of each observation.
    Returns of a game that ends at a limit depend on it, and a critic sees only the prompt."""
    prompt_template: str | None = None
    """Path of a Jinja file that replaces the built-in instruction."""
    shaping: float = Field(0.0, ge=0)
    """Weight of a potential-based reward for getting closer to the goal, in BabyAI, BabaIsAI,
    Sokoban and ALFWorld."""
    shaping_gamma: float = Field(0.99, ge=0, le=1)
    """Discount of the shaping reward per turn; set it to the run's `gamma_step`."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("preset") == "balrog":
            return {**cls.balrog, **data}
        return data

    @model_validator(mode="after")
    def _check_shown(self) -> Self:
        if self.vlm and self.no_pictures:
            raise ConfigError(f"env.vlm: {self.no_pictures}; set it to false")
        if self.vlm == "only" and self.show_time_left:
            raise ConfigError(
                "env.show_time_left adds text, which vlm: only hides; use vlm: true, or leave it "
                "out"
            )
        return self


@dataclass(frozen=True)
class Frame:
    """One state of a game, as its wrapper reports it; `reward` is the game's own."""

    long_term: str
    short_term: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    progression: float = 0.0
    image: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {
            "long_term": str,
            "short_term": str,
            "reward": (float, SupportsFloat),
            "metrics": (dict, Mapping),
        }
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                wanted = Frame.__annotations__[name].__name__
                raise TypeError(f"{name} of a Frame must be {wanted}, got {reprlib.repr(value)}")


class TextGame(BaseInteractionEnv):
    """A game with a fixed list of actions. Subclasses implement `start`, `play` and `translate`."""

    answer_format = ANSWER_FORMAT
    template_path: ClassVar[Path]
    settings_model: ClassVar[type[GameSettings]] = GameSettings
    _plays = "play"  # the method that makes the frames of a step

    @classmethod
    def from_sample(cls, sample: Any, args: Any) -> Self:
        """Build the episode of `sample.metadata` and `args.env`; the class must take (task, seed,
        settings)."""
        make: Any = cls
        return make(*describe_task(sample), read_env_settings(cls.settings_model, args))

    def __init__(self, settings: GameSettings) -> None:
        if settings.shaping and type(self).distance_left is TextGame.distance_left:
            raise ConfigError(
                f"env.shaping: {type(self).__name__} cannot measure how far its goal is; set it to "
                "0"
            )
        check_arguments(self.start, "start(self)")
        check_arguments(self.play, "play(self, action)", "")
        check_arguments(self.translate, "translate(self, candidate)", "")
        self.settings = settings
        self.max_steps = settings.max_steps or self.max_steps
        self._running = False
        self._potential = 0.0
        self._turns = 0
        """Turns of the episode so far; while one is played, it is among them."""

    @abc.abstractmethod
    def start(self) -> Frame:
        """Begin the episode of this seed."""

    @abc.abstractmethod
    def play(self, action: str) -> Frame:
        """Execute one of `actions`."""

    def translate(self, candidate: str) -> str | None:
        """Map the candidate text to one of `actions`; None if it names none of them."""
        return candidate if candidate in self.actions else None

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        """Play the action that the candidate names, else the default action; return (action or
        None, frame)."""
        action = self.translate(candidate)
        return action, finish(self.play(self.default_action if action is None else action))

    def distance_left(self) -> float:
        """Remaining distance to the goal, about 1 at the start and 0 at the goal; called only for
        shaping."""
        raise NotImplementedError

    def reset(self) -> Observation:
        self._turns = 0
        frame = self._checked(finish(self.start()), "start")
        self.max_steps = self.settings.max_steps or self.max_steps
        if self.settings.show_time_left and not self.max_steps:
            raise ConfigError("env.show_time_left: this game ends at no step; set env.max_steps")
        self._running = True
        self._potential = -self.distance_left() if self.settings.shaping else 0.0
        self.instruction_prompt = self.render_prompt()
        return self._observe(frame)

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if not self._running:
            raise EpisodeOverError(
                "step was called before reset or after the episode's end; call reset first"
            )
        self._turns += 1
        candidate, span = find_action(response_text)
        action, frame = self.attempt(candidate)
        frame = self._checked(frame, self._plays)
        if self.max_steps and self._turns >= self.max_steps and not frame.terminated:
            frame = replace(frame, truncated=True)
        valid = action is not None
        self._running = not (frame.terminated or frame.truncated)
        info: StepInfo = {
            "reward": self._pay(frame.reward, valid) + self._shaping(),
            "terminated": frame.terminated,
            "truncated": frame.truncated,
            "valid_action": valid,
            "executed_action": action if action is not None else self.default_action,
            "progression": frame.progression,
            "action": candidate,
            "action_span": span,
            "metrics": dict(frame.metrics),
        }
        return self._observe(frame), not self._running, info

    def _checked(self, frame: Any, method: str) -> Frame:
        """Return what the method returned; raises EnvironmentFault, with its place, unless it is a
        Frame."""
        if isinstance(frame, Frame):
            return frame
        said = "None" if frame is None else f"a {type(frame).__name__}"
        raise EnvironmentFault(
            f"`{method}` returned {said}; return a Frame ({place_of_method(self, method)})"
        )

    def _pay(self, reward: float, valid: bool) -> float:
        if not valid and self.settings.format_penalty:
            return -self.settings.format_penalty
        return 1.0 if self.settings.binary_reward and reward > 0 else float(reward)

    def _shaping(self) -> float:
        """gamma * potential(after) - potential(before), with potential 0 at the end (Ng, Harada and
        Russell 1999).

        Discounted with `shaping_gamma`, the payments of an episode add up to minus its first
        potential whatever was played, so the best policy does not change. This also holds if the
        potential depends on time or history (Devlin and Kudenko 2012). The time limit counts as an
        end, as `bootstrap_on_time_limit: false` assumes.
        """
        if not self.settings.shaping:
            return 0.0
        before, self._potential = self._potential, -self.distance_left() if self._running else 0.0
        return self.settings.shaping * (self.settings.shaping_gamma * self._potential - before)

    def _observe(self, frame: Frame) -> Observation:
        images = [frame.image] if frame.image is not None else []
        if images and self.settings.vlm == "only":
            return make_observation(IMAGE_ONLY, images=images)
        short_term = frame.short_term
        if self.settings.show_time_left:
            tenths = -(-10 * (self.max_steps - self._turns) // self.max_steps)  # rounded up
            short_term = f"{short_term}\nTime left: {10 * tenths}%".strip()
        return make_observation(frame.long_term, short_term, images)

    def prompt_variables(self) -> dict[str, Any]:
        """Variables for the prompt template."""
        return {
            "mission": self.mission,
            "actions": dict(self.actions)
            if isinstance(self.actions, Mapping)
            else list(self.actions),
            "max_steps": self.max_steps,
        }

    def render_prompt(self) -> str:
        return render_template(
            self.settings.prompt_template or self.template_path, self.prompt_variables()
        )


class PlannedGame(TextGame):
    """A game whose scripted player plans its way to the goal; the length of the plan measures the
    distance."""

    _whole_way = 0

    @abc.abstractmethod
    def plan(self) -> Sequence[str]:
        """Return the actions that win from here; empty if the search finds none."""

    def advice(self) -> str:
        """Return the first action of the plan, or the default action without one."""
        plan = self.plan()
        return plan[0] if plan else self.default_action

    def reset(self) -> Observation:
        self._whole_way = 0
        return super().reset()

    def distance_left(self) -> float:
        """Return the plan's length, relative to the first one that was found; 1 without a plan."""
        length = len(self.plan())
        self._whole_way = self._whole_way or length
        return length / self._whole_way if length else 1.0


class CommandGame(TextGame):
    """A game with free commands. Subclasses implement `start` and `try_command`, and may restrict
    `translate`."""

    answer_format = COMMAND_FORMAT
    actions = ()
    default_action = "look"
    _plays = "try_command"

    @abc.abstractmethod
    def try_command(self, command: str) -> Frame | None:
        """Execute the command; None, without any change, if the game does not understand it."""

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        command = self.translate(candidate)
        frame = finish(self.try_command(command)) if command is not None else None
        if frame is None:
            return None, self.play(self.default_action)
        return command, frame

    def play(self, action: str) -> Frame:
        frame = finish(self.try_command(action))
        if frame is None:
            raise EnvironmentFault(
                f"the game does not understand its own default command {action!r}"
            )
        return frame

    def translate(self, candidate: str) -> str | None:
        return clean_command(candidate)


def text_parts(value: Any) -> tuple[str, str] | None:
    """Return the long-term and short-term text of a text or of BALROG's mapping; None for anything
    else."""
    match value:
        case str():
            return value, ""
        case {"long_term_context": str(long_term), "short_term_context": str(short_term)}:
            return long_term, short_term
        case {"long_term_context": str(long_term), **rest} if "short_term_context" not in rest:
            return long_term, ""
    return None


def find_action(response_text: str) -> tuple[str, tuple[int, int]]:
    """Return the text that names the action, and its [start, end) characters in the response.

    As in Verlog's `extract_action`, this is the text after the last `ACTION:`, else after the last
    `action:`, else after the last word `Action`, else the whole response. Thoughts are no part of
    it, whether they end or not.
    """
    start, end = outside_thoughts(response_text)
    for marker in _MARKERS:
        marks = list(marker.finditer(response_text, start, end))
        if marks:
            start = marks[-1].end()
            break
    candidate = response_text[start:end]
    if start:
        candidate = candidate.lstrip()
        start = end - len(candidate)
        candidate = candidate.rstrip()
    return candidate, (start, start + len(candidate))


def first_line(candidate: str) -> str:
    """Return the first line of a text, or of the lines after blank ones."""
    return candidate.strip().partition("\n")[0].strip()


def clean_command(candidate: str) -> str | None:
    """Read the first line as one command of plain words, without quotes and markup; None if it is
    not one."""
    command = " ".join(first_line(candidate).strip("\"'`*>. \t").split())
    if len(command) > MAX_CHARACTERS or not _COMMAND.fullmatch(command):
        return None
    return None if _JOINING & set(command.lower().split()) else command


def towards(direction: str) -> str:
    """Return the end of a sentence about a move: `up`, `to the left`."""
    return direction if direction in ("up", "down") else f"to the {direction}"


def offset_in_words(dx: int, dy: int, words: Sequence[str], joint: str = ", ") -> str:
    """Return how far something is away, such as `2 to the left, 1 up`.

    `words` stand for a negative dx, a positive dx, a negative dy and a positive dy.
    """
    across = f"{abs(dx)} {words[dx > 0]}" if dx else ""
    along = f"{abs(dy)} {words[2 + (dy > 0)]}" if dy else ""
    return joint.join(filter(None, (across, along)))


def list_commands(commands: Sequence[str]) -> str:
    """Return the line of the observation that lists the commands that would work now, if there are
    any."""
    return f"Commands that work now: {', '.join(commands)}." if commands else ""
