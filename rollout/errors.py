"""The error model: an error is named after the boundary that was crossed, and only code there
raises it.

An error that stops a batch names what reproduces it. A bad response of the model is data, never an
error.
"""

from envs.errors import ConfigError as ConfigError
from envs.errors import EnvironmentFault as EnvironmentFault
from envs.errors import EpisodeOverError as EpisodeOverError
from envs.errors import JudgeError as JudgeError
from envs.errors import MissingDependencyError as MissingDependencyError
from envs.errors import SlimeVerlogError as SlimeVerlogError
from envs.errors import ToolError as ToolError

PASSING = frozenset({"http_408", "http_409", "http_425", "http_429"})
"""Client errors that the same request may not meet again."""


class EngineError(SlimeVerlogError, RuntimeError):
    """The inference engine refused, disappeared or sent a malformed response; the turn may be sent
    again.

    `kind` is the name in the metrics: `refused`, `connection_lost`, `timeout`, `http_<status>`,
    `other_weights` or `bad_answer`.
    """

    def __init__(self, text: str, kind: str = "bad_answer", *, too_long: bool = False) -> None:
        """`too_long`: the prompt does not fit into the model's context."""
        super().__init__(text)
        self.kind = kind
        self.too_long = too_long
        self.retry_after_s = 0.0
        """Pause in seconds that the server asked for."""

    @property
    def is_final(self) -> bool:
        """Whether the same request would be refused again: HTTP 4xx, except for rate limits and
        timeouts."""
        return self.kind.startswith("http_4") and self.kind not in PASSING

    @property
    def concerns_prompt(self) -> bool:
        """Whether the engine refused this prompt, and may answer others."""
        return self.kind in ("http_400", "http_413", "http_422")


class TurnAbortedError(EngineError):
    """A turn was aborted, or spanned a weight update, more often than `max_turn_retries` allows."""


class WorkerFault(EnvironmentFault):
    """An error in an environment, in one sentence, as the worker that ran the environment tells
    it."""

    def __init__(self, sentence: str, kind: str = "EnvironmentFault", trace: str = "") -> None:
        """`kind` is the name of the error's class; `trace` is its traceback."""
        super().__init__(sentence)
        self.kind = kind
        self.trace = trace


class SlowTurnFault(EnvironmentFault):
    """New weights interrupted a turn more often than `max_turn_retries` allows, so its episode is
    given up."""


class EncodingError(SlimeVerlogError, ValueError):
    """A chat template or tokenizer does not support the chosen mode."""


class CheckpointError(SlimeVerlogError, RuntimeError):
    """A rollout checkpoint is damaged, of another version, or something else; nothing was
    loaded."""


class FailureBudgetError(SlimeVerlogError, RuntimeError):
    """More episodes failed than the configured budget allows; the text says how to reproduce the
    last failure."""


class PlayerError(SlimeVerlogError, RuntimeError):
    """A rollout process (`rollout_processes`) cannot be started, or rollout processes die again and
    again."""
