"""verl-agent's protocol for ALFWorld: prompts from the user's checkout, and what an answer means.

The templates are read from the checkout's source and never run. Everything else is restated here;
docs/games.md names the place in verl-agent of each rule.
"""

import ast
import functools
import re
import string
from collections.abc import Sequence
from pathlib import Path

from envs.errors import ConfigError

PROMPTS = "agent_system/environments/prompts/alfworld.py"
FIRST = "ALFWORLD_TEMPLATE_NO_HIS"
LATER = "ALFWORLD_TEMPLATE"
_NOW = frozenset({"current_observation", "admissible_actions"})
_PAST = frozenset(
    {"task_description", "step_count", "history_length", "action_history", "current_step"}
)
PLACEHOLDERS = {FIRST: _NOW, LATER: _NOW | _PAST}
HISTORY = 2
"""Past steps that a prompt shows."""
WIN = 10.0
"""Reward of the step that wins."""
_TASK = "Your task is to: "
_CHINESE = re.compile("[\u4e00-\u9fff]")
_TAIL = 30


@functools.cache
def load_templates(checkout: Path) -> dict[str, str]:
    """Return the two templates of a checkout of verl-agent; raises ConfigError if one is missing or
    has changed."""
    path = checkout.expanduser() / PROMPTS
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        advice = "set it to the folder of a checkout of verl-agent"
        raise ConfigError(f"env.verl_agent: {path} cannot be read ({error}); {advice}") from error
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(template))):
                found[name] = template
    for name, wanted in PLACEHOLDERS.items():
        if name not in found:
            raise ConfigError(
                f"env.verl_agent: {path} assigns no text to {name}; use a checkout that does"
            )
        fields = (field for _, field, _, _ in string.Formatter().parse(found[name]))
        has = frozenset(field for field in fields if field is not None)
        if has != wanted:
            needed = ", ".join(sorted(wanted))
            present = ", ".join(sorted(has)) or "none"
            raise ConfigError(
                f"env.verl_agent: {name} in {path} must have the placeholders {needed}, but has "
                f"{present}; use a checkout whose template has them"
            )
    return {name: found[name] for name in PLACEHOLDERS}


def write_prompt(
    templates: dict[str, str],
    past: Sequence[tuple[str, str]],
    observation: str,
    commands: Sequence[str],
) -> str:
    """Return the whole prompt of a turn; `past` has the observation and the action of each turn
    before."""
    now = {
        "current_observation": observation,
        "admissible_actions": "\n ".join(
            f"'{command}'" for command in commands if command != "help"
        ),
    }
    if not past:
        return templates[FIRST].format(**now)
    lines = []
    for number, (seen, action) in list(enumerate(past, 1))[-HISTORY:]:
        lines.append(f"[Observation {number}: '{seen}', Action {number}: '{action}']")
    first_seen, _ = past[0]
    _, _, task = first_seen.partition(_TASK)
    return templates[LATER].format(
        **now,
        task_description=task.strip(),
        step_count=len(past),
        history_length=len(lines),
        action_history="\n".join(lines),
        current_step=len(past) + 1,
    )


def read_answer(response: str) -> tuple[str, bool, tuple[int, int] | None]:
    """Return the text that the game gets, whether the answer's form is valid, and the text's place
    in the response.

    The text is what the first pair of action tags holds, whatever the game makes of it, else the
    end of the response.
    """
    lowered = response.lower()
    start = lowered.find("<action>") + len("<action>")
    end = lowered.find("</action>")
    if end < 0 or start < len("<action>"):
        return lowered[-_TAIL:], False, None
    inner = lowered[start:end]
    action = inner.strip()
    first = start + len(inner) - len(inner.lstrip())
    # Lower case may have another length, and the tags may come in the wrong order.
    span = (first, first + len(action)) if action and len(lowered) == len(response) else None
    thinks = "<think>" in response and "</think>" in response
    return action, thinks and not _CHINESE.search(response), span
