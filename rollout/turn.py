"""The record of one turn, and of what must be known to go on after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.tokens.images import ImageChain


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine returned for one prompt; `token_ids` and `log_probs` have one entry a token."""

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: tuple[str, ...] = ()
    """Weight versions that produced the tokens, in order; two or more mark a turn of mixed weights."""
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's meta_info without the per-token lists, for slime's own bookkeeping."""
    trained: bool = True
    """False masks every token: the answer was altered on arrival, so its log-probs are not those of its tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn's input: token ids, and the images whose placeholders stand in them, in order.

    `image_data` goes to the engine; `train_inputs` (pixel tensors and grids) to training. `engine_ids` is set
    where the engine wants unexpanded placeholders. `seen_tool`: a tool's result stands in it; some templates open
    the first one differently.
    """

    token_ids: Sequence[int]
    """A list, or a prefix of the buffer that an episode's appended prompts share."""
    image_data: list[str] = field(default_factory=list)
    train_inputs: ImageChain | None = None
    engine_ids: Sequence[int] | None = None
    seen_tool: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one episode: what the model saw, what it answered, what the environment made of it."""

    episode_id: int
    index: int
    """Turn index in the episode, from 0."""
    prompt: Prompt
    generation: Generation
    action: str | None
    valid: bool
    executed_action: str
    reward: float
    terminated: bool
    truncated: bool
    action_span: tuple[int, int] | None
    """[start, end) of the action inside the response tokens."""
    progression: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    engine_s: float = 0.0
    env_s: float = 0.0

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated
