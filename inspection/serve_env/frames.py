"""What the frames of `slime-verlog serve-env` hold: checked requests, observations, and their JSON schemas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from envs.base import PICTURE_PLACE
from envs.openenv.protocol import ErrorCode, Reply, write_frame
from rollout.play.memory import Conversation
from rollout.tokens.image_files import data_uri, read_image
from rollout.workers.reply import EnvReply
from slime_verlog import Field, Settings


class ResetRequest(Settings):
    """Data of a `reset` frame."""

    seed: int | None = Field(default=None, ge=0)
    """Seed of the episode. Default: a seed that no other episode of this server has played."""
    task: str | None = None
    """Name of a task that the server offers. Default: drawn by the tasks' weights; the draw depends on the seed."""
    episode_id: str | None = Field(default=None, max_length=255)
    """A name for the episode, which `state` repeats."""


class Answer(Settings):
    """Data of a `step` frame: the action."""

    message: str
    """The model's whole answer, as text."""
    metadata: Mapping[str, Any] = Field(default={})
    """Ignored."""

    @field_validator("message", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Clients that read responses as JSON send a number where the model wrote one; it becomes its text again."""
        text = value if isinstance(value, str) else json.dumps(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("step.message holds half of a surrogate pair") from error
        return text


class _Shown(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ShownObservation(_Shown):
    """The observation of a frame."""

    text: str
    """What the environment shows, with the request for an answer."""
    images: list[str] = []
    """PNG pictures as data URIs. They come before the text, unless the text has one U+FFFC per picture."""
    instruction: str = ""
    """The system message: after `reset`, and again if it changes during the episode; otherwise empty."""
    tools: list[dict[str, Any]] = []
    """Tool schemas in OpenAI's format: after `reset`, if the environment has tools; otherwise empty."""


class ShownState(_Shown):
    """Data of a `state` frame."""

    episode_id: str | None
    step_count: int
    task: str | None
    seed: int | None
    done: bool
    """Whether the episode has ended."""


def schemas() -> dict[str, Any]:
    """Return JSON schemas of actions, observations and states, as OpenEnv's `/schema` returns them."""
    models: dict[str, type[BaseModel]] = {"action": Answer, "observation": ShownObservation, "state": ShownState}
    return {name: model.model_json_schema() for name, model in models.items()}


def shown(reply: EnvReply, known_instruction: str | None) -> ShownObservation:
    """Return an environment's reply as the model would read it.

    `known_instruction` is the last instruction that was shown; None at the start.
    """
    messages = Conversation(None).show(reply)
    instruction = reply.instruction_prompt
    texts, images = [], []
    for message in messages[1:] if instruction else messages:
        text, found = _text_and_images(message["content"])
        texts.append(text)
        images += found
    return ShownObservation(
        text="\n\n".join(texts),
        images=[data_uri(read_image(image)) for image in images],
        instruction="" if instruction == known_instruction else instruction,
        tools=[dict(tool) for tool in reply.tools] if known_instruction is None else [],
    )


def _text_and_images(content: str | Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
    """A message's text and images; images after some text are marked in it, and then all of them are."""
    if isinstance(content, str):
        return content, []
    marked = "".join(PICTURE_PLACE if part["type"] == "image" else part["text"] for part in content)
    images = [part["image"] for part in content if part["type"] == "image"]
    text = marked.lstrip(PICTURE_PLACE)
    return (text if PICTURE_PLACE not in text else marked), images


def observation_frame(
    observation: ShownObservation, reward: float | None, done: bool, details: Mapping[str, Any]
) -> str:
    """Return the reply to `reset` (`reward` is None) and `step`."""
    data = {"observation": observation.model_dump(), "reward": reward, "done": done, "metadata": details}
    return write_frame(Reply.OBSERVATION, data)


def error_frame(code: ErrorCode, message: str, **more: Any) -> str:
    """Return the reply to a request that failed."""
    return write_frame(Reply.ERROR, {"message": message, "code": code, **more})
