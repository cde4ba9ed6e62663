"""Makes tools from typed functions and from classes with state per episode, and loads them from a
YAML's entries.

A tool that violates its contract is refused while it is loaded; the error names the function and
the fix.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic import model_validator

from envs.errors import ConfigError, ToolError
from envs.json_text import decode_whole, short
from envs.loading import load_attribute, load_module
from envs.tools.results import Tool, ToolSpec
from envs.tools.schema import check_schema, infer_schema
from envs.tools.settings import McpSettings
from slime_verlog import Field, Settings, read_settings

_MARK = "__slime_verlog_tool__"


class ToolEntry(Settings):
    """One entry of a YAML's `tools:` list. A plain string is its `path`."""

    path: str | None = None
    """A function or class (`module:name`, `file.py:name`), or a module or file with `@tool`
    functions and `Tool`s."""
    name: str | None = None
    """Name for the model, in place of the tool's own."""
    schema_: Mapping[str, Any] | None = Field(default=None, alias="schema")
    """Schema in OpenAI's form, in place of the inferred one."""
    config: Mapping[str, Any] = {}
    """Passed to a `Tool` class when an episode begins."""
    mcp: McpSettings | None = None
    """In place of `path`: a server that speaks the Model Context Protocol and offers tools."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that one call may take; `env.timeout_s` by default."""

    @model_validator(mode="after")
    def _path_or_mcp(self) -> Self:
        if (self.path is None) == (self.mcp is None):
            raise ConfigError("an entry of env.tools needs either path or mcp")
        if self.mcp is not None and (
            self.name is not None or self.schema_ is not None or self.config
        ):
            raise ConfigError(
                "an entry of env.tools with mcp takes no name, schema or config; the server gives "
                "them"
            )
        return self


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> Any:
    """Decorator `@tool` or `@tool(name=...)`: offers the function where a YAML lists its module;
    raises ToolError."""
    if function is None:
        return lambda f: tool(f, name=name, schema=schema)
    setattr(function, _MARK, make_tool(function, name=name, schema=schema))
    return function


def make_tool(
    target: Any,
    *,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> ToolSpec:
    """Make a tool from a function or a `Tool` class; raises ToolError for another object or a bad
    schema."""
    if not callable(target):
        raise ToolError(f"a tool is a function or a subclass of envs.tools.Tool, got {target!r}")
    function = target
    if inspect.isclass(target):
        label = f"{target.__module__}.{target.__qualname__}"
        if not issubclass(target, Tool):
            raise ToolError(f"{label} is a class but not a subclass of envs.tools.Tool")
        if inspect.isabstract(target):
            raise ToolError(f"{label} has no execute method")
        function = target.execute
        schema = schema or target.schema
        name = name or target.name or re.sub(r"(?<!^)(?=[A-Z])", "_", target.__name__).lower()
    name = name or str(getattr(function, "__name__", ""))
    where = f"the tool {name} ({getattr(target, '__module__', '?')})"
    described = schema or infer_schema(function, name)
    described = {**described.get("function", described), "name": name}
    return ToolSpec(check_schema(described, where), target)


def load_tools(source: str | Sequence[Any] | Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """Load the tools that the YAML's `env.tools` lists, in order; see `ToolSettings.tools` and
    `ToolEntry`.

    Raises:
        ConfigError: a path does not exist, a file cannot be read, or an entry has an unknown key.
        ToolError: a tool violates its contract, or two have the same name.
    """
    entries = [source] if isinstance(source, str | Mapping) else source
    specs: dict[str, ToolSpec] = {}
    for number, raw in enumerate(entries):
        key = f"env.tools[{number}]"
        entry = read_settings(ToolEntry, {"path": raw} if isinstance(raw, str) else raw, f"{key}.")
        for spec in _load_entry(entry, key):
            if spec.name in specs:
                raise ToolError(
                    f"{key}: two tools are called {spec.name!r} ({specs[spec.name].origin} and "
                    f"{spec.origin}); give one of them another name, or an MCP server a prefix"
                )
            specs[spec.name] = spec
    return tuple(specs.values())


def select_tools(
    specs: Sequence[ToolSpec], chosen: Sequence[Any] | str | None, ignore: Collection[str] = ()
) -> tuple[ToolSpec, ...]:
    """Return the tools that one sample asks for, in its order; all of `specs` for None.

    `chosen` is what slime's `--tool-key` reads: a list of schemas in OpenAI's form or of names, or
    its JSON. A schema replaces the tool's own one. Entries that name one of `ignore` are skipped.

    Raises:
        ConfigError: it is not such a list, or names a tool that is not in `specs`.
        ToolError: a schema is not well formed.
    """
    if chosen is None:
        return tuple(specs)
    listed = decode_whole(chosen)[0] if isinstance(chosen, str) else chosen
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"a sample's tools must be a list of schemas or names, got {short(chosen)}"
        )
    known = {spec.name: spec for spec in specs}
    selected: dict[str, ToolSpec] = {}
    for entry in listed:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else entry
        name = function.get("name") if isinstance(function, Mapping) else function
        if name in ignore:
            continue
        if not isinstance(name, str) or name not in known:
            offered = ", ".join(known) or "none"
            raise ConfigError(
                f"the sample asks for the tool {short(name)}, which env.tools does not offer; it "
                f"offers {offered}"
            )
        selected[name] = known[name]
        if not isinstance(entry, str):
            schema = check_schema(entry, f"the tool {name} of the sample")
            selected[name] = replace(known[name], schema=schema)
    return tuple(selected.values())


def _load_entry(entry: ToolEntry, key: str) -> Sequence[ToolSpec]:
    if entry.mcp is not None:
        from envs.tools.mcp.tools import mcp_tools  # makes tools, as this module does

        return [replace(spec, timeout_s=entry.timeout_s) for spec in mcp_tools(entry.mcp, key)]
    path = entry.path or ""
    if ":" in path:
        found = [load_attribute(path, f"{key}.path")]
    else:
        module = load_module(path, f"{key}.path")
        # The same tool may have several names in its module (`plus = add`).
        found = list(
            dict.fromkeys(value for value in vars(module).values() if _is_offered(value, module))
        )
        if not found:
            raise ConfigError(
                f"{key}: {path} offers no tools; mark functions with @tool, derive classes from "
                f"envs.tools.Tool, or name one as {path}:NAME"
            )
    if entry.name is not None and len(found) > 1:
        raise ConfigError(
            f"{key}: {path} offers {len(found)} tools, so a single name does not fit; name one"
        )
    specs = []
    for target in found:
        spec = _mark_of(target)
        if spec is None or entry.name or entry.schema_:
            name = entry.name or (spec.name if spec else None)
            spec = make_tool(target, name=name, schema=entry.schema_)
        specs.append(replace(spec, config=dict(entry.config), timeout_s=entry.timeout_s))
    return specs


def _is_offered(value: Any, module: Any) -> bool:
    if getattr(value, "__module__", None) != module.__name__:
        return False
    if inspect.isclass(value):
        return issubclass(value, Tool) and not inspect.isabstract(value)
    return _mark_of(value) is not None


def _mark_of(target: Any) -> ToolSpec | None:
    """Return the tool that `@tool` made of this object; subclasses do not inherit it."""
    return getattr(target, "__dict__", {}).get(_MARK)
