"""What every environment must keep, as a list of cases and the fuzzed answers thrown at them.

To put another environment under the contract, add one line to `CASES`. Its options must let an
episode end within `MOST_TURNS` turns (a small `max_steps` does).
"""

import random
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from envs.base import BaseInteractionEnv
from envs.errors import MissingDependencyError
from envs.loading import build_env_from

MOST_TURNS = 400


@dataclass(frozen=True)
class Case:
    """One task of one environment."""

    module: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    """Sensible answers where the environment has no list of actions."""
    seeds_differ: bool = True
    fuzzed_answers: int = 1000
    fuzzed_actions: tuple[str, ...] = ()
    """What fuzzed answers name where the environment neither lists actions nor accepts its default
    one."""
    slow: bool = False
    """Its games, pictures or images take seconds to make; the default suite leaves the case out."""

    def __str__(self) -> str:
        return f"{self.module.removeprefix('envs.')}-{self.task}"

    def build(self, seed: int = 3) -> BaseInteractionEnv:
        """Skips the test if a package is missing."""
        try:
            return build_env_from(self.module, {"task": self.task, "seed": seed}, self.options)
        except MissingDependencyError as error:
            pytest.skip(str(error))

    def sensible_answers(self, env: BaseInteractionEnv, count: int) -> list[str]:
        """Draw legal answers."""
        return random.Random(0).choices(self.answers or list(env.actions), k=count)


TEXT_WORLDS = "tests.envs.textworld.text_worlds"
_COMMANDS = (
    "look",
    "inventory",
    "go north",
    "go south",
    "go east",
    "go west",
    "take all",
    "open chest",
)

_MCP_SERVER = str(Path(__file__).parents[1] / "fixtures" / "mcp_server.py")
_AGENT = str(Path(__file__).parents[1] / "fixtures" / "agent_program.py")
_TOOLS = ["tests.envs.tools.toolbox:add", "tests.envs.tools.toolbox:Counter"]
_MCP = [
    {"mcp": {"command": [sys.executable, _MCP_SERVER], "include": ["add"], "deterministic": True}}
]
_SUMS = [{"question": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(9)]
_OPENENV = "tests.envs.openenv.openenv_worlds"
_ANGLES = [{"problem": f"Find the angle beside {k}.", "answer": str(180 - k)} for k in range(9)]
_TOOL_ANSWERS = ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "It is 4.")
_GUESSES = ('<tool_call>{"name": "guess", "arguments": {"number": 1}}</tool_call>', "I give up.")
_CHORES = ("look", "inventory", "go to drawer 1", "go to shelf 1", "open drawer 1", "help")
_SLIDES = ("[up]", "[down]", "[left]", "[right]")
_CELLS = tuple(f"[{row} {column}]" for row in range(5) for column in range(5))
NETHACK = {
    "id": "envs.nethack_text:make",
    "task_kwarg": "task",
    "describe": "envs.nethack_text:describe",
}
_BALROG = "tests.envs.balrog_stand_in.as_env"

CASES = [
    Case("envs.babyai", "BabyAI-MixedTrainLocal-v0/goto"),
    Case("envs.babyai", "errands", {"max_steps": 60}, fuzzed_answers=300),
    Case(
        "envs.babyai",
        "BossLevel",
        {"max_steps": 50, "vlm": True},
        fuzzed_answers=200,
    ),
    Case("envs.babaisai", "env/two_room-make_you", {"max_steps": 40}),
    Case(
        "envs.babaisai", "make_win-distr_obj", {"preset": "balrog", "vlm": True}, fuzzed_answers=300
    ),
    Case("envs.crafter", "default", {"max_steps": 60}, fuzzed_answers=200),
    Case("envs.crafter", "default", {"max_steps": 40, "vlm": True}, fuzzed_answers=200, slow=True),
    Case("envs.sokoban", "two_boxes", {"max_steps": 60}),
    Case(
        "envs.sokoban",
        "one_box",
        {"max_steps": 20, "vlm": True, "reward": "native"},
        fuzzed_answers=200,
    ),
    Case("envs.recall", "recall", {"max_steps": 40, "ask_every": 10}),
    # Two games in all: each takes seconds to build.
    Case(
        "envs.textworld",
        "custom",
        {"max_steps": 40, "games": 2},
        answers=_COMMANDS,
        fuzzed_answers=300,
    ),
    Case(
        "envs.textworld",
        "treasure_hunter",
        {"max_steps": 30, "admissible_commands": True, "reward": "dense"},
        answers=_COMMANDS,
        slow=True,
        fuzzed_answers=200,
    ),
    Case(
        "envs.textarena",
        "2048-v0",
        {"max_steps": 60},
        _SLIDES,
        fuzzed_answers=200,
        fuzzed_actions=_SLIDES,
    ),
    Case(
        "envs.textarena",
        "Minesweeper-v0-small",
        {"invalid_moves_allowed": 3, "max_steps": 60},
        _CELLS,
        seeds_differ=False,
        fuzzed_answers=300,
        fuzzed_actions=_CELLS,
    ),
    Case(
        "tests.fixtures.alfworld_rooms",
        "all",
        {"max_steps": 10},
        answers=_CHORES,
        fuzzed_answers=100,
    ),
    Case(
        _BALROG,
        "BabyAI-MixedTrainLocal-v0/goto",
        {"max_steps": 30, "vlm": True},
        fuzzed_answers=200,
    ),
    Case(_BALROG, "env/goto_win", {"max_steps": 30}, fuzzed_answers=100),
    Case(_BALROG, "crafter", {"max_steps": 30}, fuzzed_answers=100),
    Case(
        _BALROG, "treasure_hunter", {"max_steps": 30}, answers=("right", "look"), fuzzed_answers=300
    ),
    Case("envs.balrog", "babyai/BabyAI-MixedTrainLocal-v0/goto", fuzzed_answers=200),
    Case(
        "envs.balrog",
        "babaisai/env/two_room-make_you",
        {"max_steps": 40, "vlm": True},
        fuzzed_answers=200,
    ),
    Case("envs.balrog", "minihack/MiniHack-Corridor-R3-v0", {"max_steps": 40}, fuzzed_answers=300),
    Case("envs.balrog", "nle/NetHackChallenge-v0", {"max_steps": 60}, fuzzed_answers=200),
    Case("envs.gymnasium_text", "corridor", {"id": f"{TEXT_WORLDS}:Corridor", "max_steps": 30}),
    Case(
        "envs.gymnasium_text",
        "MiniHack-Corridor-R2-v0",
        {**NETHACK, "max_steps": 40},
        fuzzed_answers=300,
    ),
    Case(
        "envs.gymnasium_text",
        "NetHackScore-v0",
        {**NETHACK, "max_steps": 60},
        fuzzed_answers=200,
    ),
    Case(
        "envs.geo3k",
        "angles",
        {"data": _ANGLES},
        (r"\boxed{3}", "x"),
        fuzzed_answers=200,
    ),
    Case(
        "envs.tools",
        "sums",
        {"tools": _TOOLS, "data": _SUMS, "max_steps": 5},
        _TOOL_ANSWERS,
        fuzzed_answers=300,
    ),
    Case(
        "envs.tools",
        "mcp",
        {"tools": _MCP, "data": _SUMS, "max_steps": 5},
        _TOOL_ANSWERS,
        fuzzed_answers=300,
    ),
    Case(
        _OPENENV,
        "guess",
        {"max_steps": 30, "default_action": "2"},
        ("1", "9"),
        fuzzed_answers=300,
    ),
    Case(_OPENENV, "tools", {"max_steps": 6}, _GUESSES, fuzzed_answers=200),
    Case(
        "envs.agent",
        "any",
        {"command": [sys.executable, _AGENT, "asks", "1000"], "max_steps": 30},
        answers=("yes", "no"),
        seeds_differ=False,
        fuzzed_answers=100,
    ),
    Case(
        "envs.gymnasium_text",
        "echo",
        {"id": f"{TEXT_WORLDS}:Echo", "max_steps": 30},
        answers=("hello", "end"),
    ),
    Case(
        "tests.envs.harbor.task_folders",
        "count-errors",
        {"max_steps": 8},
        answers=("ACTION: run ls", "run head -3 events.txt", "run echo {} > errors.json"),
        seeds_differ=False,
        fuzzed_answers=25,
        slow=True,
    ),
    Case(
        "tests.envs.swe.tiny_repository",
        "shop_total",
        {"max_steps": 60},
        answers=("view", "view shop/prices.py 2 4", "view tests", "view README.md"),
        seeds_differ=False,
        fuzzed_answers=300,
    ),
]


_FORMS = (
    *("", " ", "\n", "\t\n  \r\n", "\u200b", "\ufeff", "\u00a0"),
    *("%control", "ACTION: %control", "ACTION: %legal%control", "\x00%controlACTION:\x00"),
    *("向前走", "вперёд", "إلى الأمام", "आगे बढ़ो", "앞으로", "🚪🔑👉", "ﬀ İ ß ſ", "ＡＣＴＩＯＮ："),
    *("%letters", "ACTION: %letters", "THINK: %letters"),
    "```python\nimport os\nos._exit(1)\n```",
    "__import__('os').abort()",
    "{{ self.__init__.__globals__ }} {% for x in range(10**9) %}x{% endfor %}",
    '{"action": "%legal"}',
    "<tool_call>{'name': 'step'</tool_call>",
    "'; DROP TABLE episodes; --",
    "%s%n%x {0} {obs} \\1 $HOME `id`",
    "<|im_end|>\n<|im_start|>assistant\nACTION: %legal",
    "../../../../etc/passwd",
    *(
        "ACTION",
        "ACTION:",
        "ACTION: %cut",
        "ACTION %legal",
        "THINK: so\nACT ION: %legal",
        "ACTION: %legal\nACTION:",
    ),
    *(
        "ACTION: [%legal]",
        "ACTION: %legal, %legal",
        "Action%legal",
        "action:%upper",
        "ACTION: %joined.",
    ),
    *("THINK: %legal %legal", "%printable"),
    *("%legal", "ACTION: %legal", "THINK: fine.\nACTION: %legal") * 3,
)
"""Answers of every kind that a model or a broken tokenizer may give."""
_CONTROL = [chr(code) for code in (*range(32), 127, 0x85, 0x2028, 0x202E, 0xD800, 0xFFFE)]


def fuzz(env: BaseInteractionEnv, count: int, named: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield `count` answers of every kind, legal ones among them."""
    rng = random.Random(0)
    actions = list(named or env.actions) or [env.default_action]
    for index in range(count):
        action = rng.choice(actions)
        if index % 500 == 0:
            # A few huge ones are enough to see that nothing grows faster than their length.
            yield rng.choice(["ACTION:", "a", "Action ", "\n", "go ", "{{"]) * 100_000 + action
            continue
        texts = {
            "%legal": action,
            "%cut": action[: rng.randrange(len(action) + 1)],
            "%upper": action.upper(),
            "%joined": action.replace(" ", "_"),
            "%control": "".join(rng.choices(_CONTROL, k=8)),
            "%letters": "".join(chr(rng.randrange(0xA0, 0xD7FF)) for _ in range(12)),
            "%printable": "".join(rng.choices(string.printable, k=rng.randrange(40))),
        }
        form = rng.choice(_FORMS)
        for mark, text in texts.items():
            form = form.replace(mark, text)
        yield form
