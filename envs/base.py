"""The contract between the rollout and every environment: text in, observation out, nothing hidden."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from envs.errors import ConfigError, MissingDependencyError

PICTURE_PLACE = "\ufffc"
"""Unicode's object replacement character: in a short-term text it marks where a picture stands."""


class Observation(TypedDict):
    """What the agent sees after one step.

    `obs_str` is what a prompt shows when no memory splits it; `text` holds BALROG's two parts
    (`long_term_context` stays in the history, `short_term_context` is shown only while current);
    `multi_modal_data` is present only where there are pictures: `image` lists the observation's PIL images, and
    `current_image`, like the short-term text, those that a window shows only while the observation is current.
    Where the short-term text holds `PICTURE_PLACE` once for each of `current_image`, they stand there, else first.
    """

    obs_str: str
    text: dict[str, str]
    multi_modal_data: NotRequired[dict[str, list[Any]]]


class StepInfo(TypedDict):
    """What a step was worth and what was really done.

    `reward` is what training sees (penalty and binary reward applied); `terminated` ends value,
    `truncated` is a time limit (both may be true at once: then the episode terminated); `progression` is
    BALROG's 0..1; `action` is the text that was taken for the action (None if none was found) and
    `action_span` its [start, end) characters in the response; `metrics` are numbers for the logs.
    """

    reward: float
    terminated: bool
    truncated: bool
    valid_action: bool
    executed_action: str
    progression: float
    action: NotRequired[str | None]
    action_span: NotRequired[tuple[int, int] | None]
    metrics: NotRequired[dict[str, float]]


class BaseInteractionEnv(abc.ABC):
    """One episode's world. `build_env(sample, args)` in each module makes one from `sample.metadata`.

    Same task and seed, same responses: same observations, rewards and ending. `reset` may be called again
    and replays the same episode. The class attributes describe the task and are filled by `reset`.
    """

    mission: str = ""
    """The goal in words, if the task has one."""
    instruction_prompt: str = ""
    """The system message: goal, actions, tips. It may change while the episode runs."""
    answer_format: str = ""
    """What is appended to the current observation to ask for an answer; empty for none."""
    actions: Mapping[str, str] | Sequence[str] = ()
    """Legal actions, with descriptions where there are any; empty when the answer is free text."""
    default_action: str = ""
    """What is executed in place of an invalid answer."""
    max_steps: int = 0
    """Steps after which the episode is truncated; 0 for no limit of its own."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the chat template shows the model, in OpenAI's form; fixed for an episode."""
    deterministic: bool = True
    """Whether seed and actions alone decide the episode, so that it may be replayed after a crash."""

    @abc.abstractmethod
    def reset(self) -> Observation:
        """Start the episode from its seed and return the first observation."""

    @abc.abstractmethod
    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        """Take the model's whole answer; return (observation, done, info).

        Any text is legal input. The last observation of an episode is the real final one.

        Raises:
            EpisodeOverError: before `reset`, or after `done`.
        """

    def format_observation(self, observation: Observation) -> dict[str, Any] | list[dict[str, Any]]:
        """Turn an observation into a chat message, or several; images come first, as slime's examples order them."""
        images = (observation.get("multi_modal_data") or {}).get("image") or []
        if not images:
            return {"role": "user", "content": observation["obs_str"]}
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": observation["obs_str"]})
        return {"role": "user", "content": content}

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release what the environment holds; calling it twice is fine."""


def interleave(pieces: Sequence[str], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Content parts of a message: text, picture, text and so on, without the empty texts."""
    parts = []
    for piece, image in itertools.zip_longest(pieces, images):
        parts += [{"type": "text", "text": piece}] if piece else []
        parts += [{"type": "image", "image": image}] if image is not None else []
    return parts


def make_observation(long_term: str, short_term: str = "", images: Sequence[Any] = ()) -> Observation:
    """Build an observation from BALROG's two text parts; `obs_str` shows the short-term part first."""
    observation: Observation = {
        "obs_str": "\n".join(part for part in (short_term, long_term) if part),
        "text": {"long_term_context": long_term, "short_term_context": short_term},
    }
    if images:
        observation["multi_modal_data"] = {"image": list(images)}
    return observation


def make_image(pixels: Any) -> Any:
    """Turn a uint8 array (height, width, 3) into an RGB PIL image.

    Raises:
        MissingDependencyError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MissingDependencyError("pictures (env.vlm) need Pillow; install it with: pip install pillow") from error
    return Image.fromarray(pixels).convert("RGB")


def describe_task(sample: Any) -> tuple[str, int]:
    """Read `(task, seed)` from `sample.metadata`.

    Raises:
        ConfigError: either is missing or of the wrong type; `EpisodeSource` fills both.
    """
    metadata = getattr(sample, "metadata", None) or {}
    task, seed = metadata.get("task"), metadata.get("seed")
    if not isinstance(task, str) or not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(
            f"sample.metadata needs task (str) and seed (int, not negative), got task={task!r}, seed={seed!r}; "
            "use --data-source-path rollout.data_source.EpisodeSource or put both into the data set's metadata"
        )
    return task, seed
