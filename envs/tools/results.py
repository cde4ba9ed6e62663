"""Defines tools with state, the record of a tool on offer, and results: text, images, reward and
metrics."""

import abc
import functools
import inspect
import json
import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from envs.errors import ToolError
from envs.images import ImageError, is_image, open_image
from envs.json_text import short
from envs.tools.schema import ArgumentCheck, Schema
from envs.tools.settings import ToolSettings

MAX_IMAGES = 4
"""Images in one result."""
MAX_PIXELS = 2048 * 2048
"""Pixels of the largest image in a result."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
"""In the text of an object that has none of its own."""


@dataclass(frozen=True)
class ToolEpisode:
    """What a stateful tool learns at the start of an episode."""

    task: str
    seed: int
    question: str = ""
    answer: Any = None
    """The reference answer; the model never sees it."""
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """One dict for all tools of the episode."""


class Tool(abc.ABC):
    """A tool with state: one instance per episode, made with the `config` mapping of its YAML
    entry.

    The schema is inferred from the type hints and docstring of `execute`, unless `schema` is set.
    `create`, `execute`, `calc_reward` and `release` may be `async`.
    """

    name: ClassVar[str] = ""
    """The name that the model uses; by default the class's name in snake_case."""
    schema: ClassVar[Mapping[str, Any] | None] = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def create(self, episode: ToolEpisode) -> Any:
        """Begin the episode. A result other than None is shown with the question."""
        return None

    @abc.abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call; subclasses name their arguments. May return whatever `read_result`
        accepts."""

    def calc_reward(self) -> Any:
        """This tool's reward for the episode, a number; added to the reward of the last turn."""
        return 0.0

    def release(self) -> Any:  # noqa: B027 - optional hook
        """Free what `create` took; called once per episode, also after a failure."""


@dataclass(frozen=True)
class ToolSpec:
    """One tool that is offered to the model."""

    schema: Schema
    target: Any
    """A function, or a subclass of `Tool`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    create_timeout_s: float | None = None
    """Seconds that `create` may take; `timeout_s` by default."""
    deterministic: bool = True
    """Whether the same calls always give the same results."""
    source: str = ""

    @functools.cached_property
    def check(self) -> ArgumentCheck:
        """Checks the arguments of calls against the schema."""
        return ArgumentCheck(self.schema)

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @property
    def stateful(self) -> bool:
        return inspect.isclass(self.target)

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether a method of a stateful tool is async."""
        methods = (
            getattr(self.target, name, None)
            for name in ("create", "execute", "calc_reward", "release")
        )
        return self.stateful and any(map(inspect.iscoroutinefunction, methods))

    @property
    def origin(self) -> str:
        """Return where the tool comes from, for error messages: `source`, or the name of
        `target`."""
        return self.source or f"{self.target.__module__}.{self.target.__qualname__}"


@dataclass(frozen=True)
class ToolResult:
    """One result. `failed` marks an error message that the model sees instead of a result."""

    text: str = ""
    images: tuple[Any, ...] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False


def read_result(value: Any, settings: ToolSettings) -> ToolResult:
    """Read what a tool returned.

    Text is shown unchanged, None as empty text, an image or a list of images as images, and a
    mapping with `image` or `images` as its images and its `text`. Everything else is shown as JSON,
    or as `str` where JSON fails. verl's form `(response, reward, metrics)`, with a mapping at the
    end, adds a reward and numbers for the logs; other tuples are data.

    Raises:
        ToolError: a reward or metric that is not a finite number, too many images, or a value that
            has no text.
        ImageError: an image cannot be read or is too large, and there is no text that could be
            shown without it.
    """
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[2], Mapping):
        return _bounded(_response(value), settings)
    response, paid, metrics = value
    result = _response(response)
    reward = 0.0 if paid is None else finite(paid, "reward")
    metrics = {**result.metrics, **_numbers(metrics)}
    result = replace(result, reward=result.reward + reward, metrics=metrics)
    return _bounded(result, settings)


def _response(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return _checked(value)
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    if is_image(value):
        return ToolResult(images=(value,))
    if isinstance(value, list) and value and all(map(is_image, value)):
        return ToolResult(images=tuple(value))
    if (
        isinstance(value, Mapping)
        and {"image", "images"} & set(value)
        and set(value) <= {"text", "image", "images"}
    ):
        given = value.get("images", value.get("image"))
        if given is not None and not isinstance(given, list | tuple):
            given = [given]
        return ToolResult(_text_of(value.get("text") or ""), tuple(given or ()))
    try:
        return ToolResult(json.dumps(value, ensure_ascii=False, default=_listed))
    except Exception:  # whatever a type of the tool's own raises
        return ToolResult(_text_of(value))


def _checked(result: ToolResult) -> ToolResult:
    """What a tool's author filled in, with plain floats."""
    for name, kinds in (("text", str), ("images", list | tuple), ("metrics", Mapping)):
        value = getattr(result, name)
        if not isinstance(value, kinds):
            raise ToolError(f"{name} of a ToolResult must not be {short(value)}")
    return replace(result, reward=finite(result.reward, "reward"), metrics=_numbers(result.metrics))


def _numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    return {str(key): finite(number, f"metric {key}") for key, number in metrics.items()}


def _text_of(value: Any) -> str:
    advice = "return text, numbers or lists"
    what = f"the tool returned a {type(value).__name__}"
    try:
        text = str(value)
    except Exception as error:
        raise ToolError(f"{what} that cannot become text ({error}); {advice}") from error
    if _ADDRESS.search(text):
        raise ToolError(f"{what}, which has no text; {advice}")
    return text


def _listed(value: Any) -> Any:
    """Return a list in place of an iterable that JSON does not know; a set in the order of its
    texts."""
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    if isinstance(value, bytes):
        raise TypeError
    return sorted(value, key=str) if isinstance(value, Set) else list(value)


def finite(value: Any, what: str) -> float:
    """Return a number as float, also one of NumPy's; raises ToolError for other values."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ToolError(f"a {what} must be a finite number, got {short(value)}")
    return float(value)


def _bounded(result: ToolResult, settings: ToolSettings) -> ToolResult:
    if len(result.images) > MAX_IMAGES:
        raise ToolError(
            f"the tool returned {len(result.images)} pictures; at most {MAX_IMAGES} are shown"
        )
    images = list[Any]()
    text = result.text
    for image in result.images:
        try:
            images.append(open_image(image, MAX_PIXELS))
        except ImageError as error:
            if not text:
                raise
            text += f"\n[{error}]"
    return replace(result, text=clip(encodable(text), settings.output_chars), images=tuple(images))


def encodable(text: str) -> str:
    """Return the text with halves of surrogate pairs, which tokenizers refuse, replaced by `?`."""
    return text.encode("utf-8", "replace").decode()


def clip(text: str, limit: int) -> str:
    """Cut the middle out of a text of more than `limit` characters, and say so there."""
    if len(text) <= limit:
        return text
    half = max((limit - 60) // 2, 1)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
