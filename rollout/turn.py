"""Records of a turn, of an environment's reply and of an episode's turns in a batch, and the enums
of their states."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from envs.base import Observation, StepInfo


class _Word(enum.StrEnum):
    """A text that is pickled by its value. Python before 3.11.4 pickles a call of `getattr`, which
    torch rejects."""

    def __reduce_ex__(self, protocol: object) -> Any:
        return type(self), (self.value,)


class FinishReason(_Word):
    """Why the engine ended a response, as SGLang names it."""

    STOP = "stop"
    """The model ended the response."""
    LENGTH = "length"
    """The response reached `--rollout-max-response-len`."""
    ABORT = "abort"
    """The engine stopped, usually to load new weights; the turn is sent again."""


class StopReason(_Word):
    """Why a segment of an episode ended; each is logged as `rollout/stop/<value>`."""

    TERMINATED = "terminated"
    """The environment reached a final state: solved or lost."""
    TIME_LIMIT = "time_limit"
    """The environment's step limit."""
    MAX_TURNS = "max_turns"
    """The YAML's `max_turns`; in an evaluation, a default limit if the game has none."""
    CONTEXT = "context"
    """The next prompt would leave no room for a response."""
    ENCODING = "encoding"
    """The next prompt cannot be encoded, for example because of a broken image."""
    CUT = "cut"
    """The batch ended; the episode continues in the next one."""
    FAILED = "failed"
    """The environment was lost."""

    @property
    def is_end(self) -> bool:
        """Whether the episode itself ended, rather than the batch or its environment."""
        return self not in (StopReason.CUT, StopReason.FAILED)


class SampleKind(_Word):
    """The content of a training sample."""

    TURN = "turn"
    """A turn that the model played, or all turns of an episode in `history: full`."""
    BOOTSTRAP = "bootstrap"
    """The state after the last turn of a segment; it carries a value and no loss."""
    PADDING = "padding"
    """Padding for the optimizer step."""
    FAILED = "failed"
    """An episode whose environment was lost; nothing is trained on."""


class NotesEvent(_Word):
    """What a valid response did to the model's notes; each is logged as
    `turn/notes_<value>_ratio`."""

    WRITTEN = "written"
    """It has a line of notes with text."""
    EMPTY = "empty"
    """Its line of notes is empty, so the old notes stay."""
    CUT = "cut"
    """Its notes are longer than `memory.notes_chars`."""
    COPIED = "copied"
    """Its notes are the old ones, unchanged."""
    ACTION = "action"
    """Its notes contain `ACTION:`; harmless, because only responses are searched for actions."""


class ImageChain(Mapping[str, "torch.Tensor"]):
    """Training inputs of several images, in order: one tensor per key, concatenated along dim 0 on
    each read.

    A turn's prompt holds only references to its images' tensors, so an episode's memory grows
    linearly.
    """

    def __init__(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self.parts = tuple(parts)

    def __getitem__(self, key: str) -> torch.Tensor:
        import torch

        return torch.cat([part[key] for part in self.parts])

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts[0])

    def __len__(self) -> int:
        return len(self.parts[0])

    def __add__(self, other: ImageChain) -> ImageChain:
        return ImageChain(self.parts + other.parts)


@dataclass(frozen=True, slots=True)
class Generation:
    """The engine's response to one prompt; `token_ids` and `log_probs` have one entry per token."""

    token_ids: Sequence[int]
    """A `TokenPrefix` from the engine: 4 bytes per token."""
    log_probs: Sequence[float]
    """A float32 `array` from the engine, likewise."""
    text: str
    finish_reason: FinishReason
    weight_versions: tuple[str, ...] = ()
    """Weight versions that produced the tokens, in order; more than one if the weights changed
    during the response."""
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    """SGLang's meta_info without the per-token lists, for slime's own bookkeeping."""
    trained: bool = True
    """False masks every token: the response was altered on arrival, so its log-probs are not its
    own, or the turn is older than `max_staleness`."""
    version_ends: tuple[int, ...] = ()
    """Of each of `weight_versions`, the number of tokens up to its last one; empty if the engine
    does not say."""
    stop_id: int | None = None
    """The token that ended the response; None if it was cut or a text ended it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn's input: token ids, and the images whose placeholders they contain, in order.

    `image_data` goes to the engine, `train_inputs` (pixel tensors and grids) to training.
    `engine_ids` is set if the engine needs unexpanded placeholders. `seen_tool` is true if the
    prompt shows a tool's result, because some chat templates open the first result differently.
    """

    token_ids: Sequence[int]
    """A `TokenPrefix` from the encoder: 4 bytes per token, shared by an episode's appended
    prompts."""
    image_data: list[str] = field(default_factory=list)
    train_inputs: ImageChain | None = None
    engine_ids: Sequence[int] | None = None
    seen_tool: bool = False


ENGINE = "engine"
"""Name of the spans of engine requests; their facts are SGLang's meta_info."""


@dataclass(frozen=True, slots=True)
class Span:
    """A period in which something worked on a turn, in seconds since the epoch."""

    name: str
    start_s: float
    end_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    inside: tuple[Span, ...] = ()
    """Periods inside this one, for example the tool calls of a step."""


@dataclass(frozen=True)
class EnvReply:
    """What an environment shows after `reset` (info is None) or `step`."""

    observation: Observation
    messages: Sequence[Mapping[str, Any]]
    """The observation in the form in which the environment puts it into the conversation."""
    instruction_prompt: str
    answer_format: str
    default_action: str
    deterministic: bool
    tools: Sequence[Mapping[str, Any]] = ()
    max_steps: int = 0
    """Steps after which the environment truncates the episode; 0 for no limit."""
    done: bool = False
    info: StepInfo | None = None
    seconds: float = 0.0
    """Time inside the environment."""
    parts: Sequence[tuple[str, float, float]] = ()
    """Tool calls and judges inside a step: name, start and end, in seconds since the step began."""
    whole_prompts: bool = False
    """Whether `messages` are the whole prompt."""
    continues: tuple[int, int] | None = None
    """The turn that the prompt continues, and the number of its first message after that turn's
    response."""
    facts: Sequence[str] = ()
    """What a good memory holds now, if the environment says so; see
    `envs.base.BaseInteractionEnv`."""
    was_cut: bool = False
    """Whether text or images were left out because the observation exceeded its limits."""

    @property
    def shows_images(self) -> bool:
        """Whether the observation has an image."""
        return any((self.observation.get("multi_modal_data") or {}).values())

    @cached_property
    def digest(self) -> str:
        """Hash of what the agent sees and is paid; a replay with other digests played another
        episode.

        It is kept, and pickled with the reply, once it is computed.
        """
        hasher = hashlib.blake2b(digest_size=16)
        text = self.observation["text"]
        parts = [
            text["long_term_context"],
            text["short_term_context"],
            self.observation["obs_str"],
            str(self.done),
        ]
        if self.info is not None:
            parts.append(repr(float(self.info["reward"])))
        for part in parts:
            hasher.update(part.encode("utf-8", "surrogatepass") + b"\0")
        for images in (self.observation.get("multi_modal_data") or {}).values():
            for image in images:
                hasher.update(image.tobytes())
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: the prompt, the response, and the environment's reply."""

    episode_id: int
    index: int
    """Turn index in the episode, from 0."""
    prompt: Prompt
    generation: Generation
    action: str | None = None
    valid: bool = True
    executed_action: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    action_span: tuple[int, int] | None = None
    """[start, end) of the action inside the response tokens."""
    progression: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    engine_s: float = 0.0
    env_s: float = 0.0
    notes: str | None = None
    """The model's notes after this turn; None if the turn was not asked for notes."""
    notes_events: Sequence[str] = ()
    """Values of `NotesEvent`; empty after a summary."""
    summary: Mapping[str, float] | None = None
    """Measures of the notes, each logged as `summary/<name>`, if the model wrote them in this
    turn."""
    moves: bool = True
    """Whether the environment moved after the response, so that the discounts of a step apply."""
    baseline: float = 0.0
    """Mean return of continuations from before the turn, with `group_estimator: branches`."""
    spans: tuple[Span, ...] = ()
    """Requests to the engine, then the environment's step; empty unless
    `rollout.bridge.trace.is_traced`."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def without_loss(self) -> Turn:
        """Return the turn with no token trained; it keeps its place in its episode."""
        return replace(self, generation=replace(self.generation, trained=False))

    @property
    def stepped(self) -> bool:
        """Whether the environment got the response; not if the model wrote its notes in a separate
        turn."""
        return self.summary is None


@dataclass(frozen=True)
class Segment:
    """An episode's turns inside one batch."""

    task_name: str
    turns: tuple[Turn, ...]
    bootstrap: Prompt | None
    """The prompt after the last turn, whose value stands in for the rest of the episode; None if it
    counts as 0."""
    stop: StopReason
    episode_return: float = 0.0
    """Sum of the episode's rewards so far, earlier batches included."""
    episode_turns: int = 0
    """Number of the environment's turns so far, earlier batches included."""


@dataclass
class Batch:
    """What was played for one rollout, in slot order."""

    segments: list[Segment]
    metrics: dict[str, float] = field(default_factory=dict)
    slots: list[Mapping[str, Any]] = field(default_factory=list)
    """The slots' state after the batch; empty unless the slots kept playing after it was cut."""
    staleness: Sequence[int] | None = None
    """Actor updates between playing and training each turn, -1 where unknown; None for kept turns
    of the warm-up."""
    waited_s: float = 0.0
    """Seconds for which it had enough turns and waited for turns that would have become too old."""
    masked: int = 0
    """Turns that are too old and therefore have no loss."""


def discounted_return(turns: Sequence[tuple[float, bool]], gamma: float) -> float:
    """Sum the rewards of turns, each given as reward and `moves`, discounted by the environment's
    moves before it."""
    total = 0.0
    for reward, moves in reversed(turns):
        total = reward + (gamma if moves else 1.0) * total
    return total
