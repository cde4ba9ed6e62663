"""Writes docs/reference/configuration.md, docs/reference/commands.md and
custom_configs/schema.json.

It also names the schema in the first line of each YAML file in custom_configs/ that lacks this
line. Run it after a change to a settings model, an option or a YAML file: python
scripts/write_reference.py
"""

import argparse
import importlib
import json
import pkgutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402
from pydantic.json_schema import models_json_schema  # noqa: E402

import envs  # noqa: E402
from advantage.settings import AdvantageSettings  # noqa: E402
from envs.mixture import TaskSettings  # noqa: E402
from inspection.command import PARTS as COMMAND_PARTS  # noqa: E402
from inspection.command import module_of  # noqa: E402
from rollout.bridge.settings import RolloutSettings  # noqa: E402
from slime_verlog import Settings  # noqa: E402

COMMANDS = ROOT / "docs" / "reference" / "commands.md"
REFERENCE = ROOT / "docs" / "reference" / "configuration.md"
SCHEMA = ROOT / "custom_configs" / "schema.json"
SCHEMA_LINE = "# yaml-language-server: $schema=schema.json\n"
COMMAND = "python scripts/write_reference.py"

PARTS = {
    "rollout_interaction_env_path": "What is played",
    "history": "What a prompt shows",
    "n_env": "How a batch is played",
    "env_backend": "Environments, engine and checkpoints",
}
"""The first key of each part of the rollout's settings, and the part's heading."""

INTRODUCTION = f"""\
# Configuration reference

Written by `{COMMAND}` from the settings models; do not edit this page by hand.

The file that `--custom-config-path` names is a YAML mapping with the keys below. Nested keys are written with a dot:
`memory.n` is the key `n` in the mapping `memory`. Everything else (batch sizes, token limits, learning rates, save
folders) is set with slime's own command-line flags; [docs/slime.md](../slime.md) has them.

- Keys without a default are **required**. A default of `null` means that the key may be left out.
- An unknown key, a value of the wrong type and a number out of range are refused at start-up. The error names the key,
  the value and the nearest known key.
- `custom_configs/schema.json` holds the same information for editors. A YAML file that begins with
  `# yaml-language-server: $schema=schema.json` gets completion and checks in editors that use yaml-language-server.
"""

ENVIRONMENTS = """\
## Options of environments

The keys of the mapping `env`, for each value of `rollout_interaction_env_path`. An environment of your own checks its
own options.
"""

COMMANDS_INTRODUCTION = f"""\
# Commands

Written by `{COMMAND}` from the commands' own options; do not edit this page by hand.

`slime-verlog PART` looks at environments, models and runs before, during and after training. `python -m inspection
PART` does the same. `slime-verlog PART --help` prints what is below. The exit code is 0 only if all went well.
"""


def main() -> None:
    """Write all files that are out of date."""
    for path, text in outputs().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def outputs() -> dict[Path, str]:
    """Build the text of each file, by path."""
    environments = environment_models()
    configs = {path: path.read_text(encoding="utf-8") for path in SCHEMA.parent.glob("*.yaml")}
    configs = {path: SCHEMA_LINE + text.removeprefix(SCHEMA_LINE) for path, text in configs.items()}
    commands = "\n".join([COMMANDS_INTRODUCTION, *map(_command, COMMAND_PARTS)])
    return {
        COMMANDS: commands,
        REFERENCE: reference(environments),
        SCHEMA: schema(environments),
        **configs,
    }


def environment_models() -> dict[str, type[Settings]]:
    """Find the settings model of each environment module that has one, by module name."""
    names = [f"envs.{module.name}" for module in pkgutil.iter_modules(envs.__path__)]
    models = {name: getattr(importlib.import_module(name), "SETTINGS", None) for name in names}
    return {name: model for name, model in models.items() if model is not None}


def _command(name: str) -> str:
    """A section with the usage of a part of `slime-verlog` and a table of its arguments."""
    module = module_of(name)
    parser = argparse.ArgumentParser(prog=f"slime-verlog {name}", add_help=False)
    module.add_arguments(parser)
    usage = textwrap.fill(" ".join(parser.format_usage().removeprefix("usage: ").split()), 100)
    rows: list[str] = []
    for action in parser._actions:
        spelling = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.nargs != 0 and action.option_strings:
            shown = action.metavar or action.dest.upper()
            spelling += f" {shown if isinstance(shown, str) else ' '.join(shown)}"
        meaning = ((action.help or "") % {**vars(action), "prog": "slime-verlog"}).replace(
            "|", "\\|"
        )
        rows.append(f"| `{spelling}` | {meaning} |")
    head = f"## {name}\n\n{(module.__doc__ or '').strip()}\n\n```text\n{usage}\n```\n\n"
    return head + "| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def schema(environments: Mapping[str, type[Settings]]) -> str:
    """Build the JSON schema of a custom YAML; `env:` is checked by the model of the environment
    that the file names."""
    models = [RolloutSettings, *environments.values(), TaskSettings]
    references, definitions = models_json_schema([(m, "validation") for m in dict.fromkeys(models)])
    definitions = _tidy(definitions["$defs"])
    # A section whose keys are all commented out reads as null, which the models take for an empty
    # mapping.
    for properties in [definition.get("properties", {}) for definition in definitions.values()]:
        for key, node in properties.items():
            if definitions.get(node.get("$ref", "").rpartition("/")[2], {}).get("type") == "object":
                section = {"anyOf": [{"$ref": node["$ref"]}, {"type": "null"}]}
                properties[key] = {**section, **{k: v for k, v in node.items() if k != "$ref"}}
    reference_of = lambda model: references[(model, "validation")]["$ref"]
    root = definitions.pop(reference_of(RolloutSettings).rpartition("/")[2])
    items = {"anyOf": [{"type": "string"}, {"$ref": reference_of(TaskSettings)}]}
    for owner in (root, definitions["EvalSettings"]):
        owner["properties"]["tasks"]["items"] = items
    if_named = lambda name: {"properties": {"rollout_interaction_env_path": {"const": name}}}
    options_of = lambda model: {"properties": {"env": {"$ref": reference_of(model)}}}
    rules = [
        {"if": if_named(name), "then": options_of(model)} for name, model in environments.items()
    ]
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "slime-verlog configuration",
    }
    return (
        json.dumps(
            {**head, **root, "allOf": rules, "$defs": definitions}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def _tidy(node: Any) -> Any:
    """The node without pydantic's titles, and with every description on one line."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy = {
        key: _tidy(value)
        for key, value in node.items()
        if key != "title" or not isinstance(value, str)
    }
    if isinstance(tidy.get("description"), str):
        tidy["description"] = _line(tidy["description"])
    return tidy


def reference(environments: Mapping[str, type[Settings]]) -> str:
    """Build the reference as Markdown."""
    parts: list[dict[str, FieldInfo]] = []
    for name, field in own_fields(RolloutSettings).items():
        if name in PARTS:
            parts.append({})
        parts[-1][name] = field
    if len(parts) < len(PARTS):
        raise KeyError(
            f"PARTS names {PARTS.keys() - own_fields(RolloutSettings).keys()}, which "
            "RolloutSettings lacks"
        )
    sections = [INTRODUCTION]
    for heading, part in zip(PARTS.values(), parts, strict=True):
        sections += _section(heading, RolloutSettings, "", part, text="")
    sections += _section("Advantages", AdvantageSettings, "")
    sections += _section("Entries of tasks", TaskSettings, "tasks[].")
    sections.append(ENVIRONMENTS)
    for name, model in environments.items():
        sections += _section(f"`{name}`", model, "env.", level=3)
    return "\n".join(sections)


def _section(
    heading: str,
    model: type[Settings],
    prefix: str,
    fields: Mapping[str, FieldInfo] | None = None,
    text: str | None = None,
    level: int = 2,
) -> Iterator[str]:
    """A heading, the model's docstring or `text`, and a table of its keys; then a section for each
    nested model."""
    fields = model.model_fields if fields is None else fields
    text = _line(model.__doc__) if text is None else text
    lines = [f"{'#' * level} {heading}", *(["", text] if text else [])]
    if fields:
        lines += ["", "| key | value | default | meaning |", "|---|---|---|---|"]
        lines += [_row(model, prefix, name, field) for name, field in fields.items()]
    yield "\n".join(lines) + "\n"
    for name, field in fields.items():
        for nested in _nested(field.annotation):
            inner = f"{prefix}{field.alias or name}" + "[]" * (
                typing.get_origin(field.annotation) is tuple
            )
            yield from _section(f"`{inner}`", nested, f"{inner}.", level=min(level + 1, 4))


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields that the model itself declares."""
    own = vars(model).get("__annotations__", {})
    return {name: field for name, field in model.model_fields.items() if name in own}


def _row(model: type[Settings], prefix: str, name: str, field: FieldInfo) -> str:
    """A row of a table; the meaning is the docstring of the field, of the one it overrides or of
    its model."""
    bases = [
        base for base in model.__mro__ if issubclass(base, Settings) and name in base.model_fields
    ]
    texts = [base.model_fields[name].description for base in bases]
    texts += [nested.__doc__ for nested in _nested(field.annotation)]
    meaning = _line(next(filter(None, texts), "")).replace("|", "\\|")
    default = "**required**"
    if not field.is_required():
        value = field.get_default(call_default_factory=True)
        shown = value if isinstance(value, str) and value else json.dumps(value, default=str)
        default = "see below" if isinstance(value, BaseModel) else f"`{shown}`"
    values = _describe(model.model_json_schema(by_alias=False)["properties"][name])
    return f"| `{prefix}{field.alias or name}` | {values} | {default} | {meaning} |"


def _describe(node: Mapping[str, Any]) -> str:
    if options := node.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_describe, options)))
    if "$ref" in node:
        return "mapping"
    if "enum" in node or "const" in node:
        return ", ".join(f"`{value}`" for value in node.get("enum", [node.get("const")]))
    name = {
        "integer": "integer",
        "number": "number",
        "boolean": "`true`, `false`",
        "string": "text",
    }
    name |= {"array": "list", "object": "mapping", "null": "`null`"}
    return name.get(str(node.get("type")), "any") + _range(node)


def _range(node: Mapping[str, Any]) -> str:
    if "minimum" in node and "maximum" in node:
        return f", {node['minimum']:g} to {node['maximum']:g}"
    signs = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return "".join(f", {sign} {node[key]:g}" for key, sign in signs.items() if key in node)


def _nested(annotation: Any) -> list[type[Settings]]:
    """The settings models that a field holds, directly or as one alternative."""
    options = [annotation, *typing.get_args(annotation)]
    return [
        option for option in options if isinstance(option, type) and issubclass(option, Settings)
    ]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    main()
