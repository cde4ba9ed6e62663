"""Games played by naming one action a turn: parsing, penalty and bookkeeping once, for all of them.

Invariant: every answer executes exactly one legal action; an invalid one executes the default action and is
paid the format penalty instead of the game's reward.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from envs.base import BaseInteractionEnv, Observation, StepInfo, make_observation
from envs.errors import ConfigError, EpisodeOverError
from envs.options import read_options

ANSWER_FORMAT = (
    "Choose your next move. Answer in exactly this form:\n"
    "THINK: your reasoning, step by step\n"
    "ACTION: one allowed action"
)


PICTURE_ONLY = "The picture shows what you see."
"""What an observation says where `vlm: only` leaves out its text."""


@dataclass(frozen=True, kw_only=True)
class GameOptions:
    """Options that every game shares; `preset` fills what is left at None.

    `verlog` trains (format penalty 0.1), `balrog` measures (no penalty, the game's own reward).
    """

    preset: Literal["verlog", "balrog"] = "verlog"
    binary_reward: bool | None = None
    format_penalty: float | None = None
    max_steps: int | None = None
    vlm: bool | Literal["only"] = False
    """Add a picture to every observation; `only` shows it in place of the text."""
    prompt_template: str | None = None
    shaping: float = 0.0
    """Weight of a potential-based reward for the way to the goal, in games that can tell how much of it is left."""
    shaping_gamma: float = 0.99
    """Should be the run's `gamma_step`."""

    def __post_init__(self) -> None:
        if self.format_penalty is not None and self.format_penalty < 0:
            raise ConfigError(f"env.format_penalty is subtracted, so it must be >= 0, got {self.format_penalty}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"env.max_steps must be at least 1, got {self.max_steps}")
        if self.shaping < 0 or not 0 <= self.shaping_gamma <= 1:
            raise ConfigError(
                "env.shaping must be >= 0 and env.shaping_gamma between 0 and 1, "
                f"got {self.shaping} and {self.shaping_gamma}"
            )


O = TypeVar("O", bound=GameOptions)  # noqa: E741


def read_game_options(cls: type[O], args: Any, presets: Mapping[str, Mapping[str, Any]]) -> O:
    """Read `args.env` into `cls`: dataclass defaults, then the preset's values, then what the user wrote."""
    given = dict(getattr(args, "env", None) or {})
    preset = given.get("preset", "verlog")
    if preset not in presets:
        raise ConfigError(f"env.preset must be one of {', '.join(presets)}, got {preset!r}")
    return read_options(cls, {**presets[preset], **given}, "env.")


@dataclass(frozen=True)
class Frame:
    """One state of a game as its wrapper sees it; `reward` is the game's own."""

    long_term: str
    short_term: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    progression: float = 0.0
    image: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class TextGame(BaseInteractionEnv):
    """A game with a fixed list of actions. Subclasses give `start`, `play` and `translate`."""

    answer_format = ANSWER_FORMAT
    template_path: ClassVar[Path]

    def __init__(self, options: GameOptions) -> None:
        if options.shaping and type(self).distance_left is TextGame.distance_left:
            raise ConfigError(f"env.shaping: {type(self).__name__} cannot tell how far its goal is; leave it at 0")
        self.options = options
        self._running = False
        self._potential = 0.0

    @abc.abstractmethod
    def start(self) -> Frame:
        """Begin the episode that the seed decides."""

    @abc.abstractmethod
    def play(self, action: str) -> Frame:
        """Execute one of `actions`."""

    def translate(self, candidate: str) -> str | None:
        """Map the candidate text to one of `actions`, or None if it names none."""
        return candidate if candidate in self.actions else None

    def attempt(self, candidate: str) -> tuple[str | None, Frame]:
        """Play what the candidate text names, or the default action; return (the action, None if invalid) and frame."""
        action = self.translate(candidate)
        return action, self.play(self.default_action if action is None else action)

    def distance_left(self) -> float:
        """How much of the way to the goal is left, about 1 at the start and 0 at the goal; asked for shaping alone."""
        raise NotImplementedError

    def reset(self) -> Observation:
        frame = self.start()
        self._running = True
        self._potential = -self.distance_left() if self.options.shaping else 0.0
        self.instruction_prompt = self.render_prompt()
        return self._observe(frame)

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if not self._running:
            raise EpisodeOverError("step was called before reset or after the episode's end; call reset first")
        candidate, span = find_action(response_text)
        action, frame = self.attempt(candidate)
        valid = action is not None
        executed = action if action is not None else self.default_action
        self._running = not (frame.terminated or frame.truncated)
        info: StepInfo = {
            "reward": self._pay(frame.reward, valid) + self._shaping(),
            "terminated": frame.terminated,
            "truncated": frame.truncated,
            "valid_action": valid,
            "executed_action": executed,
            "progression": frame.progression,
            "action": candidate,
            "action_span": span,
            "metrics": dict(frame.metrics),
        }
        return self._observe(frame), not self._running, info

    def _pay(self, reward: float, valid: bool) -> float:
        """Penalty in place of the reward, as Verlog pays it; binary reward turns any gain into 1."""
        if not valid and self.options.format_penalty:
            return -self.options.format_penalty
        return 1.0 if self.options.binary_reward and reward > 0 else float(reward)

    def _shaping(self) -> float:
        """gamma * potential(after) - potential(before), 0 after any end (Ng, Harada and Russell 1999).

        Discounted with `shaping_gamma` an episode's payments add up to minus its first potential, whatever was
        played, so the best policy stays what it was; also where the potential depends on time or history (Devlin and
        Kudenko 2012). The time limit counts as an end, as `bootstrap_on_time_limit: false` has it.
        """
        if not self.options.shaping:
            return 0.0
        before, self._potential = self._potential, -self.distance_left() if self._running else 0.0
        return self.options.shaping * (self.options.shaping_gamma * self._potential - before)

    def _observe(self, frame: Frame) -> Observation:
        images = [frame.image] if frame.image is not None else []
        if self.options.vlm == "only":
            return make_observation(PICTURE_ONLY, images=images)
        return make_observation(frame.long_term, frame.short_term, images)

    def prompt_variables(self) -> dict[str, Any]:
        """What the prompt template may name."""
        return {
            "mission": self.mission,
            "actions": dict(self.actions) if isinstance(self.actions, Mapping) else list(self.actions),
            "max_steps": self.max_steps,
        }

    def render_prompt(self) -> str:
        return render_template(self.options.prompt_template or self.template_path, self.prompt_variables())


def find_action(response_text: str) -> tuple[str, tuple[int, int]]:
    """Find the text that names the action: (candidate, its [start, end) characters in the response).

    The rule and its order are Verlog's `extract_action`: what follows the last `ACTION:`, else the last
    `action:`, else the last `Action`; without a marker the whole answer, so that a bare action is valid.
    """
    start = 0
    for marker in ("ACTION:", "action:", "Action"):
        position = response_text.rfind(marker)
        if position >= 0:
            start = position + len(marker)
            break
    tail = response_text[start:]
    candidate = tail.strip() if start else tail
    offset = start + (len(tail) - len(tail.lstrip()) if start else 0)
    return candidate, (offset, offset + len(candidate))


_templates: dict[tuple[Path, int], Any] = {}


def render_template(path: str | Path, variables: Mapping[str, Any]) -> str:
    """Render a Jinja file in Jinja's sandbox; observations reach it as values, never as template text.

    Raises:
        ConfigError: the file is missing, does not parse, or names an unknown variable.
    """
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    path = Path(path)
    try:
        key = (path, path.stat().st_mtime_ns)
        if key not in _templates:
            jinja = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
            _templates[key] = jinja.from_string(path.read_text(encoding="utf-8"))
        return _templates[key].render(variables).strip()
    except OSError as error:
        raise ConfigError(f"prompt template {path} cannot be read: {error.strerror}") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"prompt template {path}: {error}") from error
