"""Calls each tool of an environment once and grades the reference answer, for `slime-verlog
check`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from envs.calls import Call
from envs.json_text import short
from envs.tools.env import ToolEnv
from envs.tools.results import ToolSpec
from envs.tools.schema import Parameters

WRONG = "I do not know"
"""An answer that should not be paid."""


class Tried(NamedTuple):
    """What a tool or the grader did, and whether it was what training needs."""

    name: str
    worked: bool
    detail: str


def try_tools(env: ToolEnv) -> Iterator[Tried]:
    """Yield what each tool and the grader do, after a reset; raises EnvironmentFault if a machine
    or grader breaks."""
    for spec in env.offered:
        yield _try_tool(env, spec)
    reference = env.question.answer
    if env.grades and reference is not None:
        yield _try_grader(
            env, reference[0] if isinstance(reference, list | tuple) and reference else reference
        )


def _try_tool(env: ToolEnv, spec: ToolSpec) -> Tried:
    arguments = example_arguments(spec.schema["function"]["parameters"])
    advice = "if other arguments suit it better, give them in its schema as `examples`"
    if wrong := spec.check(arguments):
        detail = f"no arguments could be made from the schema ({wrong}); {advice}"
        return Tried(f"tool {spec.name}", False, detail)
    result = env.call_once(Call(spec.name, arguments))
    call = f"{spec.name}({json.dumps(arguments, ensure_ascii=False)})"
    if result.failed:
        return Tried(f"tool {spec.name}", False, f"{call} failed: {result.text[:200]}; {advice}")
    pictures = f" and {len(result.images)} pictures" if result.images else ""
    paid = f", paid {result.reward:g}" if result.reward else ""
    return Tried(f"tool {spec.name}", True, f"{call} gave {short(result.text)}{pictures}{paid}")


def _try_grader(env: ToolEnv, reference: object) -> Tried:
    right, wrong = (env.score(str(answer))[0] for answer in (reference, WRONG))
    detail = f"the reference answer {short(reference)} is paid {right:g}, {WRONG!r} {wrong:g}"
    if right >= 1 > wrong:
        return Tried("grader", True, detail)
    return Tried("grader", False, f"{detail}; a right answer should be paid 1 and a wrong one less")


_OF_TYPE = {"object": {}, "array": [], "integer": 1, "number": 1, "boolean": True, "null": None}


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the required arguments of a tool, from `examples`, `default`, `const`, `enum` or the
    type of each."""
    parameters = Parameters(schema)
    described = parameters.properties()
    required = [name for part in parameters.reached(schema) for name in part.get("required", ())]
    return {name: _example(described.get(name, [])) for name in required}


def _example(options: Sequence[Mapping[str, Any]]) -> Any:
    for option in options:
        for values in (option.get("examples"), option.get("enum")):
            if values:
                return values[0]
        for key in ("default", "const", "minimum"):
            if key in option:
                return option[key]
    kind = next((option["type"] for option in options if "type" in option), "string")
    return _OF_TYPE.get(kind if isinstance(kind, str) else kind[0], "text")
