"""Checks that a reply to `reset` or `step` keeps the environment contract, and cuts observations
that are too large.

Text is cut in the middle, with a note; of too many images the first are kept.
"""

import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, ValidationError

from envs.base import Observation
from envs.errors import ConfigError, EnvironmentFault
from rollout.spec import ObservationLimits
from rollout.turn import EnvReply
from slime_verlog import expected

MAX_NUMBER = 1e30
"""Sums of rewards and metrics stay finite, in float32 too."""
_Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)] | bool
_Text = Annotated[str, Field(max_length=1 << 40)]
"""With a limit, pydantic also refuses half of a surrogate pair, which a tokenizer cannot encode."""


_ALTERNATIVES = ("float", "constrained-float", "bool", "list[any]", "tuple[any, ...]")
"""What pydantic adds to the place of an error in a value that may have several types."""


class _Contract(BaseModel, strict=True, allow_inf_nan=False):
    """What a part of a reply must hold, beside what else it may hold."""


class _Parts(_Contract):
    long_term_context: _Text
    short_term_context: _Text


class _Observation(_Contract):
    obs_str: _Text
    text: _Parts
    multi_modal_data: dict[str, list[Any] | tuple[Any, ...]] | None = None


class _Info(_Contract):
    """As `envs.base.StepInfo`."""

    reward: _Number
    terminated: bool
    truncated: bool
    valid_action: bool
    executed_action: _Text
    progression: Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)] | bool  # sums of shares are rounded
    action: str | None = None
    action_span: tuple[int, int] | None = None
    moves: bool = True
    metrics: dict[str, _Number] | None = None


def check_reply(reply: EnvReply) -> None:
    """Raise EnvironmentFault, which names the field and its value, for anything but the observation
    that is wrong."""
    for name in ("instruction_prompt", "answer_format", "default_action"):
        _check_text(name, getattr(reply, name))
    enough = reply.messages or (reply.whole_prompts and reply.done)
    if not enough or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in reply.messages
    ):
        raise EnvironmentFault(
            f"messages must be mappings with a role, got {reprlib.repr(reply.messages)}"
        )
    _check_texts("messages", reply.messages)
    for message in reply.messages:
        content = message.get("content")
        is_list = isinstance(content, list | tuple) and all(map(_is_part, content))
        if not (
            isinstance(content, str) or is_list or (content is None and message.get("tool_calls"))
        ):
            raise EnvironmentFault(
                "a message's content must be a text or a list of parts such as {'type': 'text', "
                "'text': 'a'} and {'type': 'image', 'image': image}, got "
                f"{reprlib.repr(content)}"
            )
    if reply.info is None:  # tools do not change within an episode
        try:
            json.dumps([dict(tool) for tool in reply.tools])
        except (TypeError, ValueError) as error:
            said = f"tools must be a list of JSON schemas, got {reprlib.repr(reply.tools)}"
            raise EnvironmentFault(f"{said} ({error})") from error
    if not isinstance(reply.facts, list | tuple) or not all(
        isinstance(f, str) and f.strip() for f in reply.facts
    ):
        raise EnvironmentFault(
            f"facts() must return a list of texts, none blank, got {reprlib.repr(reply.facts)}"
        )
    if reply.info is not None:
        check_info(reply.info, reply.done)


def check_history(reply: EnvReply, history: str) -> None:
    """Raise ConfigError if the way in which prompts are built does not suit the environment."""
    if reply.whole_prompts and history == "full":
        raise ConfigError(
            "history: full appends to one conversation, but here every observation is a whole "
            "prompt, which need not begin with the one before it; leave history out of the YAML "
            "(with preset: glm52, give history: window)"
        )


def check_observation(observation: Any) -> None:
    """Raise EnvironmentFault for an observation that lacks a key, or has a value of the wrong
    type."""
    if not isinstance(observation, Mapping):
        hint = "; return the observation alone" if isinstance(observation, tuple) else ""
        raise EnvironmentFault(
            f"the observation must be a mapping such as envs.base.make_observation(text), got "
            f"{type(observation).__name__} {reprlib.repr(observation)}{hint}"
        )
    plain = dict(observation)
    for key in ("text", "multi_modal_data"):
        if isinstance(plain.get(key), Mapping):
            plain[key] = dict(plain[key])
    _check("observation", _Observation, plain, "; envs.base.make_observation(text) builds one")


def read_step(answer: Any) -> tuple[Any, bool, Any]:
    """Return observation, done and info of a `step`, with numpy's scalars as Python's bools and
    numbers.

    Raises:
        EnvironmentFault: it is not three values, `done` is not a bool, or info is not a mapping.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        came = f"{len(answer)} values" if isinstance(answer, tuple | list) else reprlib.repr(answer)
        hint = ""
        if isinstance(answer, tuple | list) and len(answer) in (4, 5):
            hint = "; unlike in Gymnasium, reward, terminated and truncated are keys of info"
        raise EnvironmentFault(f"step must return (observation, done, info), got {came}{hint}")
    observation, done, info = answer
    done = _plain(done)
    if not isinstance(done, bool | int) or done not in (0, 1):
        raise EnvironmentFault(f"done must be bool, got {reprlib.repr(done)}")
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"info must be a mapping, got {reprlib.repr(info)}")
    return observation, bool(done), _plain(info, 2)


def _plain(value: Any, inside: int = 0) -> Any:
    """Python's bool, number or string for a scalar of numpy or torch; `inside` levels of mappings
    and lists too.

    Of text, only the characters: an environment's own class cannot be unpickled in another process.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if inside and isinstance(value, Mapping):
        return {_plain(name): _plain(item, inside - 1) for name, item in value.items()}
    if inside and isinstance(value, list | tuple):
        return tuple(_plain(item, inside - 1) for item in value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def check_info(info: Mapping[str, Any], done: bool) -> None:
    """Raise EnvironmentFault for a value in `info` that is missing, wrong, not finite, or
    contradicts `done`."""
    _check("info", _Info, info)
    if done is not (info["terminated"] or info["truncated"]):
        raise EnvironmentFault(
            f"done is {done!r} but terminated is {info['terminated']} and truncated "
            f"{info['truncated']}"
        )


def _check(name: str, model: type[BaseModel], value: Mapping[str, Any], advice: str = "") -> None:
    """Raise EnvironmentFault, which names the first part of the mapping `name` that the model
    refuses."""
    try:
        model.model_validate(dict(value))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        *above, key = [part for part in wrong["loc"] if part not in _ALTERNATIVES]
        place = name + "".join(f"[{part!r}]" for part in above)
        if wrong["type"] != "missing":
            got = reprlib.repr(wrong["input"])
            raise EnvironmentFault(
                f"{place}[{key!r}] must be {expected(wrong)}, got {got}"
            ) from error
        keys = list(map(str, wrong["input"]))
        near = difflib.get_close_matches(str(key), set(keys) - set(model.model_fields), n=1)
        hint = f"rename '{near[0]}'" if near else f"its keys are {', '.join(keys) or 'none'}"
        raise EnvironmentFault(f"{place} has no key '{key}'; {hint}{advice}") from error


def _check_text(name: str, value: Any) -> None:
    """A tokenizer cannot encode half of a surrogate pair, so such text is refused here."""
    if not isinstance(value, str):
        raise EnvironmentFault(f"{name} must be a string, got {reprlib.repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(
            f"{name} holds half of a surrogate pair: {reprlib.repr(value)}"
        ) from error


def _check_texts(name: str, value: Any) -> None:
    if isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, Mapping):
        _check_texts(name, list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(name, item)


def cut_observation(observation: Observation, limits: ObservationLimits) -> Observation:
    """The same object if it is within the limits, otherwise a cut copy.

    The two parts of `text` share one limit. `obs_str` repeats them and has its own limit.
    """
    texts = observation["text"]
    multi_modal = observation.get("multi_modal_data") or {}
    images = sum(map(len, multi_modal.values()))
    share = _share(limits.chars, list(texts.values()))
    if share is None and len(observation["obs_str"]) <= limits.chars and images <= limits.images:
        return observation
    cut = {name: cut_text(text, share or limits.chars) for name, text in texts.items()}
    obs_str = cut_text(observation["obs_str"], limits.chars)
    left = iter(range(limits.images))
    shown = {
        name: [image for image, _ in zip(images, left, strict=False)]
        for name, images in multi_modal.items()
    }
    if images > limits.images:
        note = _images_note(images - limits.images)
        obs_str += note
        cut["long_term_context"] += note
    within = {**observation, "obs_str": obs_str, "text": cut}
    return cast(Observation, {**within, "multi_modal_data": shown} if shown else within)


def cut_messages(
    messages: Sequence[Mapping[str, Any]], limits: ObservationLimits
) -> Sequence[Mapping[str, Any]]:
    """The messages of one observation: the same object if together they are within the limits, else
    a cut copy."""
    parts = [part for message in messages for part in _content_parts(message)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    share = _share(limits.chars, texts)
    missing = len(parts) - len(texts) - limits.images
    if share is None and missing <= 0:
        return messages
    left = iter(range(limits.images))
    cut: list[dict[str, Any]] = []
    for message in messages:
        kept: list[Mapping[str, Any]] = []
        for part in _content_parts(message):
            if part["type"] == "text":
                kept.append({**part, "text": cut_text(part["text"], share or limits.chars)})
            elif next(left, None) is not None:
                kept.append(part)
        cut.append(
            {
                **message,
                "content": kept[0]["text"] if isinstance(message.get("content"), str) else kept,
            }
        )
    if missing > 0:
        cut[-1] = with_text(cut[-1], _images_note(missing))
    return cut


def _share(total: int, texts: Sequence[str]) -> int | None:
    """How many characters to keep of each text that is longer; None if together they have at most
    `total`."""
    return max(total // len(texts), 1) if sum(map(len, texts)) > total else None


def cut_text(text: str, chars: int) -> str:
    """The text, or its beginning and its end, `chars` characters in all, with a note between
    them."""
    if len(text) <= chars:
        return text
    tail = chars // 2
    note = f"\n[... {len(text) - chars:,} characters left out ...]\n"
    return text[: chars - tail] + note + text[len(text) - tail :]


def _images_note(missing: int) -> str:
    return f"\n[{missing:,} more pictures left out]"


def _content_parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or ()


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    return (
        part.get("image") is not None
        if part.get("type") == "image"
        else isinstance(part.get("text"), str)
    )


def with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the message with `text` appended to its content."""
    content = message["content"]
    added = (
        content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    )
    return {**message, "content": added}
