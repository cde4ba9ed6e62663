"""Records that describe an episode and its environment; worker processes import them without
torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from envs.base import BaseInteractionEnv
from envs.call_form import CallForm
from slime_verlog import ConfigError

CHARS_PER_TOKEN = 4
"""Of English text, about; whether something fits is estimated with it where no tokenizer is
loaded."""
DEFAULT_MAX_TURNS = 1000
"""Turns after which a held-out episode ends if neither the YAML nor the environment limits it."""


@dataclass(frozen=True)
class ObservationLimits:
    """Limits of one observation; notes about what was left out do not count towards `chars`."""

    chars: int
    images: int


@dataclass(frozen=True)
class EnvSpec:
    """Everything needed to build an environment, picklable; with the responses, also to replay an
    episode."""

    env_path: str
    metadata: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    prompt: Any = None
    multimodal_inputs: Any = None
    max_turns: int | None = None
    limits: ObservationLimits | None = None
    """Size limits of observations, set by the pool; None: unlimited."""
    call_form: CallForm | None = None
    """How the policy's template writes calls, set by the pool."""

    def build(self) -> BaseInteractionEnv:
        """Call the environment module's `build_env`, with copies of the run's data, which episodes
        share."""
        from envs.loading import call_build_env

        sample = SimpleNamespace(
            metadata=copy.deepcopy(dict(self.metadata)),
            label=self.label,
            prompt=self.prompt,
            multimodal_inputs=self.multimodal_inputs,
        )
        args = SimpleNamespace(env=copy.deepcopy(dict(self.options)), max_turns=self.max_turns)
        env = call_build_env(self.env_path, sample, args)
        env.call_form = self.call_form
        return env


class Replay(NamedTuple):
    """What was played of an episode; with its spec, enough to play it again up to there."""

    answers: Sequence[Sequence[int]] = ()
    """Token ids of each response."""
    stepped: Sequence[bool] = ()
    """Whether the environment got each response; it does not get notes."""
    digests: Sequence[str] = ()
    """Digests of everything that the environment showed."""


@dataclass(frozen=True)
class Past:
    """The first turns of a recorded episode, which an evaluation plays again before it asks the
    player."""

    turns: Sequence[Mapping[str, Any]]
    """As `rollout.play.transcript.Transcript` records them: with `response`, and `token_ids` if
    they are known."""
    digests: Sequence[str]
    """Digests of everything that the environment showed before the first new turn."""
    name: str
    """What errors call the recorded episode."""

    def check(self, shown: Sequence[str], deterministic: bool = True) -> None:
        """Compare with the digests of what the environment has shown so far.

        Raises ConfigError, with the turn, if they differ, or if the environment says that it cannot
        be replayed.
        """
        if not deterministic:
            raise ConfigError(
                f"{self.name} cannot be replayed: the environment says that it is not deterministic"
            )
        stepped = [number for number, turn in enumerate(self.turns, 1) if "summary" not in turn]
        for before, now, recorded in zip([0, *stepped], shown, self.digests, strict=False):
            if now != recorded:
                reason = "the environment, or a package that it uses, changed since, or is not deterministic"
                raise ConfigError(
                    f"the replay of {self.name} shows something else in turn {before + 1}: {reason}"
                )

    def check_notes(self, turn: int, writes_notes: bool) -> None:
        """Raise ConfigError unless the prompt of a recorded turn, counted from 0, asks for notes as
        it did then."""
        if writes_notes is not ("summary" in self.turns[turn]):
            reason = "the memory asks for notes in other turns than when it was recorded"
            raise ConfigError(f"the replay of {self.name} differs in turn {turn + 1}: {reason}")


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode: its id, its task's name for the metrics, and its environment."""

    episode_id: int
    name: str
    env: EnvSpec
    session_id: str | None = None
    """Key by which the router keeps the episode's requests on one engine; None to use the episode's
    id."""
    past: Past | None = None
    """The beginning of an evaluation's episode; training does not read it."""

    @property
    def routing_key(self) -> str:
        return self.session_id or session_of(self.episode_id)


def session_of(episode_id: int) -> str:
    """The routing key of an episode that slime did not hand out."""
    return f"episode-{episode_id}"
