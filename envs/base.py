"""The contract between the rollout and every environment, and helpers to implement it."""

import abc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NotRequired, TypedDict, TypeVar

from envs.call_form import CallForm
from envs.errors import ConfigError, MissingDependencyError
from slime_verlog import Settings, read_settings

PICTURE_PLACE = "\ufffc"
"""Unicode's object replacement character; in a short-term text it marks the place of an image."""

Part = tuple[str, float, float]
"""Name, start and end of a part of a step, in seconds of `time.perf_counter`."""
_parts: ContextVar[list[Part] | None] = ContextVar("parts of the current step", default=None)

S = TypeVar("S", bound=Settings)


class Observation(TypedDict):
    """What the agent sees after one step."""

    obs_str: str
    """The whole text, for prompts without a memory window."""
    text: dict[str, str]
    """BALROG's two parts: `long_term_context` stays in the history, `short_term_context` is shown
    only while the observation is the current one."""
    multi_modal_data: NotRequired[dict[str, list[Any]]]
    """PIL images or uint8 arrays: `image` lists those that stay in the history, `current_image`
    those shown only while the observation is the current one. If the short-term text contains one
    `PICTURE_PLACE` per entry of `current_image`, the images go there, otherwise before the text."""


class StepInfo(TypedDict):
    """The outcome of one step."""

    reward: float
    """The reward for training, after penalty and binary reward."""
    terminated: bool
    """The task ended; there is no value after this state."""
    truncated: bool
    """A time limit was reached. If `terminated` is set as well, the episode counts as
    terminated."""
    valid_action: bool
    """Whether the response named a legal action."""
    executed_action: str
    """What was executed, as text; the default action if the response named no legal one."""
    progression: float
    """BALROG's progress measure, 0 to 1."""
    action: NotRequired[str | None]
    """The part of the response that was read as the action; None if there was none."""
    action_span: NotRequired[tuple[int, int] | None]
    """Its [start, end) characters in the response."""
    moves: NotRequired[bool]
    """False if the step changed nothing, as when an agent only summarises its conversation: it is
    not discounted."""
    metrics: NotRequired[dict[str, float]]
    """Numbers for the logs."""


class BaseInteractionEnv(abc.ABC):
    """One episode. Each environment module has a `build_env(sample, args)` that makes one from
    `sample.metadata`.

    `build_env` raises `ConfigError` for an unknown task or a wrong setting, and
    `MissingDependencyError` if a package is not installed. A module may also offer
    `expert_action(env)`, the next action of a scripted player for demonstrations,
    `explain_action(env)`, the reasoning behind it, whose last sentence names the action, and
    `DEFAULT_TASK = "name"`, the task of commands that are given the module without a task.

    Task, seed and responses determine all observations and rewards. `reset` may be called again to
    replay the episode from the start. The class attributes describe the task; `reset` fills them.

    A method `render()`, as in Gymnasium, is optional: it draws the current state for people, as a
    uint8 array (height, width, 3), without changing the episode. The episode viewer replays
    episodes and shows these images.
    """

    mission: str = ""
    """The goal in words, if the task has one."""
    instruction_prompt: str = ""
    """The system message: goal, actions, tips. It may change during the episode."""
    answer_format: str = ""
    """Text appended to the current observation to ask for an answer; empty for none."""
    actions: Mapping[str, str] | Sequence[str] = ()
    """Legal actions, optionally with descriptions; empty if the answer is free text. They may
    change with each step."""
    default_action: str = ""
    """The action executed in place of an invalid answer."""
    max_steps: int = 0
    """Steps after which the environment truncates the episode; 0 for no limit."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool schemas for the chat template, in OpenAI's format; constant during an episode."""
    deterministic: bool = True
    """Whether seed and actions determine the episode, which allows a replay after a crash."""
    call_form: CallForm | None = None
    """How the policy's chat template writes tool calls, for `find_calls`; set before `reset`."""
    whole_prompts: bool = False
    """Whether the messages of each observation are the whole prompt, like the requests of an agent.
    Nothing is added to them, the memory does not apply, `tools` may change from turn to turn, and
    there are no messages after the end."""
    continues: tuple[int, int] | None = None
    """With `whole_prompts`, the turn that the observation continues, and the number of its first
    message after that turn's response: the response then keeps the model's own tokens, and both
    turns can share a training sample."""

    @abc.abstractmethod
    def reset(self) -> Observation:
        """Start the episode from its seed; return the first observation. Raises EnvironmentFault if
        it cannot begin."""

    @abc.abstractmethod
    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        """Execute the model's complete response, which may be any text; return (observation, done,
        info).

        Raises:
            EpisodeOverError: called before `reset`, or after `done`.
            EnvironmentFault: the environment broke; the response is not to blame.
        """

    def format_observation(self, observation: Observation) -> dict[str, Any] | list[dict[str, Any]]:
        """Turn an observation into one or several chat messages; images come first, as in slime's
        examples."""
        return {"role": "user", "content": content_of(observation, observation["obs_str"])}

    def facts(self) -> Sequence[str]:
        """Return short texts that a good memory holds now, to measure the notes that the model
        writes; never shown."""
        return ()

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources; may be called twice."""


def interleave(pieces: Sequence[str], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Alternate texts and images as content parts of one message, without empty texts."""
    parts = []
    for piece, image in itertools.zip_longest(pieces, images):
        if piece:
            parts.append({"type": "text", "text": piece})
        if image is not None:
            parts.append({"type": "image", "image": image})
    return parts


def content_of(
    observation: Observation, text: str, *, current: bool = True
) -> str | list[dict[str, Any]]:
    """Return an observation's images with `text` as a message's content; if `current`, short-term
    ones and text too."""
    multi_modal = observation.get("multi_modal_data") or {}
    own = multi_modal.get("image") or []
    only_now = (multi_modal.get("current_image") or []) if current else []
    if only_now and observation["text"]["short_term_context"].count(PICTURE_PLACE) == len(only_now):
        # The short-term text comes first, so the first marks in the text belong to it.
        return interleave([""] * len(own), own) + interleave(
            text.split(PICTURE_PLACE, len(only_now)), only_now
        )
    images = [{"type": "image", "image": image} for image in (*only_now, *own)]
    return [*images, {"type": "text", "text": text}] if images else text


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a chat message, without its images."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def make_observation(
    long_term: str, short_term: str = "", images: Sequence[Any] = ()
) -> Observation:
    """Build an observation from BALROG's two text parts; `obs_str` has the short-term part
    first."""
    observation: Observation = {
        "obs_str": "\n".join(part for part in (short_term, long_term) if part),
        "text": {"long_term_context": long_term, "short_term_context": short_term},
    }
    if images:
        observation["multi_modal_data"] = {"image": list(images)}
    return observation


def import_pillow() -> Any:
    """Return Pillow's module `PIL.Image`; raises MissingDependencyError without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "images need Pillow; install it with: pip install pillow"
        ) from error
    return Image


def make_image(pixels: Any) -> Any:
    """Convert a uint8 array (height, width, 3) to an RGB PIL image; raises as `import_pillow`."""
    return import_pillow().fromarray(pixels).convert("RGB")


def read_env_settings(model: type[S], args: Any) -> S:
    """Read `args.env`, the YAML's `env:` mapping, as `model`; raises ConfigError as
    `read_settings`."""
    return read_settings(model, getattr(args, "env", None), "env.")


def describe_task(sample: Any) -> tuple[str, int]:
    """Read `(task, seed)` from `sample.metadata`; raises ConfigError if one is missing or has the
    wrong type."""
    metadata = getattr(sample, "metadata", None) or {}
    task = metadata.get("task")
    seed = metadata.get("seed")
    if not isinstance(task, str) or not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(
            f"sample.metadata needs task (str) and seed (int, not negative), got task={task!r}, "
            f"seed={seed!r}; use --data-source-path rollout.data_source.EpisodeSource, or add both "
            "to the metadata of the data set"
        )
    return task, seed


@contextmanager
def closed_on_error(resource: Any) -> Iterator[None]:
    """Close an environment or a session if anything is raised."""
    try:
        yield
    except BaseException:
        resource.close()
        raise


def collect() -> list[Part]:
    """Return a new list, which gets what `timed` measures from now on in this thread; a worker
    sends it."""
    parts: list[Part] = []
    _parts.set(parts)
    return parts


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Measure a part of an environment's step, such as a tool call."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if (parts := _parts.get()) is not None:
            parts.append((name, began, time.perf_counter()))
