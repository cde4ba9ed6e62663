"""Calls each tool of an environment once and grades the reference answer, for `slime-verlog check`."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from envs.calls import Call
from envs.json_text import short
from envs.tools.env import ToolEnv
from envs.tools.examples import example_arguments
from envs.tools.results import ToolSpec

WRONG = "I do not know"
"""An answer that should not be paid."""


class Tried(NamedTuple):
    """What a tool or the grader did, and whether it was what training needs."""

    name: str
    worked: bool
    detail: str


def try_tools(env: ToolEnv) -> Iterator[Tried]:
    """Yield what each tool and the grader do, after a reset; raises EnvironmentFault if a machine or grader breaks."""
    for spec in env.offered:
        yield _try_tool(env, spec)
    reference = env.question.answer
    if env.grades and reference is not None:
        yield _try_grader(env, reference[0] if isinstance(reference, list | tuple) and reference else reference)


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
