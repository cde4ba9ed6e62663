"""What makes a tool: a plain typed function, or a class with state for each episode; and how a YAML names them.

Every contract violation is refused while the tools are read, with the function's name and the fix.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from envs.errors import ConfigError, ToolError
from envs.loading import load_attribute, load_module
from envs.options import read_options
from envs.tools.calls import decode, short
from envs.tools.schema import ArgumentCheck, Schema, check_schema, infer_schema

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__slime_verlog_tool__"


@dataclass(frozen=True)
class ToolEpisode:
    """What a stateful tool is told when an episode begins. `shared` is one dict for all tools of the episode."""

    task: str
    seed: int
    question: str = ""
    answer: Any = None
    """The data set's label; the model never sees it."""
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class Tool(abc.ABC):
    """A tool with state: one instance an episode, made with the `config` mapping of its YAML entry.

    The schema is inferred from `execute`'s type hints and docstring unless `schema` gives it. `create`, `execute`,
    `calc_reward` and `release` may be `async`.
    """

    name: ClassVar[str] = ""
    """What the model calls it; the class's name in snake_case if empty."""
    schema: ClassVar[Mapping[str, Any] | None] = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def create(self, episode: ToolEpisode) -> Any:
        """Begin the episode. A result other than None is shown with the question."""
        return None

    @abc.abstractmethod
    def execute(self, **arguments: Any) -> Any:
        """Serve one call; subclasses name their arguments. May return whatever `results.read_result` takes."""

    def calc_reward(self) -> float:
        """What the episode was worth to this tool; added to the reward of its last turn."""
        return 0.0

    def release(self) -> None:  # noqa: B027 - optional hook
        """Free what `create` took; called once an episode, also after a failure."""


@dataclass(frozen=True)
class ToolSpec:
    """One offered tool: what the model sees, how its arguments are checked, what runs."""

    name: str
    schema: Schema
    check: ArgumentCheck
    target: Any
    """A function, or a subclass of `Tool`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def stateful(self) -> bool:
        return inspect.isclass(self.target)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One entry of a YAML's `tools:` list; a bare string is its `path`."""

    path: str
    name: str | None = None
    schema: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ConfigError(f"timeout_s of {self.path} must be above 0, got {self.timeout_s}")


def tool(function: F | None = None, *, name: str | None = None, schema: Mapping[str, Any] | None = None) -> Any:
    """Mark a function as a tool, so that naming its module or file is enough: `@tool` or `@tool(name=...)`.

    Raises:
        ToolError: its schema cannot be inferred; see `infer_schema`.
    """
    if function is None:
        return lambda f: tool(f, name=name, schema=schema)
    setattr(function, _MARK, make_tool(function, name=name, schema=schema))
    return function


def make_tool(
    target: Any,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
) -> ToolSpec:
    """A tool from a function or a `Tool` class.

    Raises:
        ToolError: it is neither, or its schema cannot be inferred or is not well formed.
    """
    if inspect.isclass(target):
        _check_class(target)
        name, schema = name or target.name or _snake_case(target.__name__), schema or target.schema
    elif not callable(target):
        raise ToolError(f"a tool is a function or a subclass of envs.tools.Tool, got {target!r}")
    function = target.execute if inspect.isclass(target) else target
    name = name or getattr(function, "__name__", "")
    where = f"the tool {name} ({getattr(target, '__module__', '?')})"
    checked = check_schema(schema or infer_schema(function, name), where)
    checked["function"]["name"] = name
    checked = check_schema(checked, where)
    return ToolSpec(name, checked, ArgumentCheck(checked), target, dict(config or {}), timeout_s)


def _check_class(target: type) -> None:
    if not issubclass(target, Tool):
        raise ToolError(f"{target.__module__}.{target.__qualname__} is a class but no subclass of envs.tools.Tool")
    if inspect.isabstract(target):
        raise ToolError(f"{target.__module__}.{target.__qualname__} has no execute method")


def load_tools(source: str | Sequence[Any], where: str = "env.tools") -> tuple[ToolSpec, ...]:
    """The tools that a YAML offers, in order.

    `source` is a list of entries, or the path of a YAML file whose `tools:` holds one, or a single entry. An entry
    is a path or `{path, name, schema, config, timeout_s}`; a path names a function or class
    (`package.module:name`, `file.py:name`) or a whole module or file, which offers what it marks with `@tool` and
    its `Tool` classes.

    Raises:
        ConfigError: a path leads nowhere, a file cannot be read, or an entry has an unknown key.
        ToolError: a tool violates its contract, or two have the same name.
    """
    if isinstance(source, str) and source.endswith((".yaml", ".yml")):
        source = _read_list(source, where)
    entries = [source] if isinstance(source, str | Mapping) else list(source)
    specs: dict[str, ToolSpec] = {}
    for number, raw in enumerate(entries):
        key = f"{where}[{number}]"
        for spec in _load_entry(read_options(_Entry, {"path": raw} if isinstance(raw, str) else raw, f"{key}."), key):
            if spec.name in specs:
                raise ToolError(
                    f"{key}: two tools are called {spec.name!r} ({_origin(specs[spec.name])} and {_origin(spec)}); "
                    "give one of them another name"
                )
            specs[spec.name] = spec
    return tuple(specs.values())


def select_tools(
    specs: Sequence[ToolSpec], chosen: Sequence[Any] | str | None, ignore: Collection[str] = ()
) -> tuple[ToolSpec, ...]:
    """The tools that one sample asks for, in its order; all of `specs` for None.

    `chosen` is what slime's `--tool-key` reads: a list of schemas in OpenAI's form, or its JSON. A bare name keeps
    tool's own schema; a schema replaces it. Entries that name one of `ignore` are skipped.

    Raises:
        ConfigError: it is not such a list, or names a tool that `specs` lacks or that it named before.
        ToolError: a schema is not well formed.
    """
    if chosen is None:
        return tuple(specs)
    if isinstance(chosen, str):
        chosen = _read_json(chosen)
    if not isinstance(chosen, list | tuple):
        raise ConfigError(f"a sample's tools must be a list of schemas or names, got {short(chosen)}")
    known = {spec.name: spec for spec in specs}
    selected: dict[str, ToolSpec] = {}
    for entry in chosen:
        name = _name_of(entry)
        if name in ignore:
            continue
        if name not in known:
            offered = ", ".join(known) or "none"
            raise ConfigError(
                f"the sample asks for the tool {short(name)}, which env.tools does not offer; it offers {offered}"
            )
        if name in selected:
            raise ConfigError(f"the sample asks for the tool {name!r} twice")
        selected[name] = known[name] if isinstance(entry, str) else _with_schema(known[name], entry)
    return tuple(selected.values())


def _read_json(text: str) -> Any:
    value, end, error = decode(text)
    if error or text[end:].strip():
        raise ConfigError(f"a sample's tools must be a list of schemas or names, got the text {short(text)}")
    return value


def _name_of(entry: Any) -> str:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else entry
    name = function.get("name") if isinstance(function, Mapping) else function
    if not isinstance(name, str):
        raise ConfigError(f"a sample's tools must be schemas or names, got {short(entry)}")
    return name


def _with_schema(spec: ToolSpec, schema: Mapping[str, Any]) -> ToolSpec:
    return make_tool(spec.target, name=spec.name, schema=schema, config=spec.config, timeout_s=spec.timeout_s)


def _load_entry(entry: _Entry, key: str) -> list[ToolSpec]:
    if ":" in entry.path:
        found = [load_attribute(entry.path, f"{key}.path")]
    else:
        module = load_module(entry.path, f"{key}.path")
        # A module may hold one tool under several names (`plus = add`).
        found = list({id(value): value for value in vars(module).values() if _is_offered(value, module)}.values())
        if not found:
            raise ConfigError(
                f"{key}: {entry.path} offers no tools; mark functions with @tool, derive classes from envs.tools.Tool, "
                f"or name one as {entry.path}:NAME"
            )
    if entry.name is not None and len(found) > 1:
        raise ConfigError(f"{key}: {entry.path} offers {len(found)} tools, so a single name does not fit; name one")
    return [_with_entry(target, entry) for target in found]


def _is_offered(value: Any, module: Any) -> bool:
    own = getattr(value, "__module__", None) == module.__name__
    if inspect.isclass(value):
        return own and issubclass(value, Tool) and not inspect.isabstract(value)
    return own and isinstance(_mark_of(value), ToolSpec)


def _mark_of(target: Any) -> Any:
    """What `@tool` left on this very object; a subclass does not inherit it."""
    return getattr(target, "__dict__", {}).get(_MARK)


def _with_entry(target: Any, entry: _Entry) -> ToolSpec:
    marked = _mark_of(target)
    if isinstance(marked, ToolSpec) and entry.name is None and entry.schema is None:
        return replace(marked, config=dict(entry.config), timeout_s=entry.timeout_s)
    name = entry.name or (marked.name if isinstance(marked, ToolSpec) else None)
    return make_tool(target, name=name, schema=entry.schema, config=entry.config, timeout_s=entry.timeout_s)


def _read_list(path: str, where: str) -> Sequence[Any]:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} is not valid YAML: {error}") from error
    if not isinstance(data, Mapping) or not isinstance(data.get("tools"), list) or set(data) != {"tools"}:
        raise ConfigError(f"{where}: {path} must hold one key, tools, with a list of tools")
    return data["tools"]


def _origin(spec: ToolSpec) -> str:
    return f"{spec.target.__module__}.{spec.target.__qualname__}"


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
