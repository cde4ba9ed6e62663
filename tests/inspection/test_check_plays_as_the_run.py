"""`slime-verlog check` plays where the run plays, and tries what a random player never reaches:
tools and graders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.loading import build_env_from
from envs.tools.tryout import try_tools
from tests.fixtures.command import slime_verlog
from tests.inspection.test_check import found_in

ALARM = """
import asyncio
import signal
from envs.text_game import Frame, TextGame

class Alarm(TextGame):
    actions, default_action = ("a", "b"), "a"

    def __init__(self, task, seed, settings):
        super().__init__(settings)
        self.seed, self.max_steps = seed, 3

    def start(self):
        return Frame(f"Seed {self.seed}.")

    def play(self, action):
        NEEDS
        return Frame("Step.", reward=float(action == "b"))

    def render(self):
        DRAWS

    def render_prompt(self):
        return "Play."

build_env = Alarm.from_sample
"""
NEEDS = {
    "signal": "signal.signal(signal.SIGALRM, signal.SIG_DFL)",
    "loop": "asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))",
    "endless": "[None for _ in iter(int, 1)]",
}
GRADER = """
import signal

def grade(answer, question):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return float(answer == question.answer)
    except Exception:
        return 0.0

def stingy(answer, question):
    return 0.5
"""
TOOLS = """
from typing import Literal
from envs.tools import tool

@tool
def add(a: int, unit: Literal["m", "ft"], b: int = 0) -> str:
    \"\"\"Add.

    Args:
        a: One.
        unit: Unit.
        b: Two.
    \"\"\"
    return f"{a + b} {unit}"

@tool
def broken() -> str:
    \"\"\"Always fails.\"\"\"
    raise OSError("no such service")

def never(**arguments): return ""
S = {"type": "string"}
never = tool(schema={"name": "never", "description": "N.", "parameters":
    {"type": "object", "properties": {"a": S}, "required": ["a"], "not": {"required": ["a"]}}})(never)
"""


Check = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    """Check `t.yaml` among these files; return the exit code and the rows by name."""
    monkeypatch.chdir(tmp_path)

    def check_files(**files: str) -> tuple[int, dict[str, str]]:
        for name, text in files.items():
            Path(name.replace("__", ".")).write_text(text)
        return slime_verlog("check", "t.yaml"), found_in(capsys.readouterr().out)

    return check_files


def game(
    needs: str, draws: str = "return None", backend: str = "inline", **keys: Any
) -> dict[str, str]:
    lines = [f"{key}: {value}" for key, value in keys.items()]
    config = (
        f"rollout_interaction_env_path: game.py\ntasks: [t]\nenv_backend: {backend}\n"
        + "\n".join(lines)
    )
    return {
        "game__py": ALARM.replace("NEEDS", NEEDS[needs]).replace("DRAWS", draws),
        "t__yaml": config,
    }


def test_what_needs_the_main_thread_is_refused_under_inline_with_the_backend_that_works(
    check: Check,
) -> None:
    code, rows = check(**game("signal"))
    assert code == 1 and rows["contract"].endswith("main thread; set env_backend: process")
    code, rows = check(**game("signal", backend="process"))
    assert code == 0 and rows["contract"].startswith("ok ")


def test_an_event_loop_is_there_under_inline_and_a_bad_drawing_is_named(check: Check) -> None:
    code, rows = check(**game("loop"))
    assert code == 0 and rows["contract"].startswith("ok ")
    assert rows["render"].startswith("warning") and "render returned None" in rows["render"]


def test_a_step_that_hangs_in_a_thread_is_found(check: Check) -> None:
    code, rows = check(**game("endless", env_step_timeout_s=0.5))
    assert code == 1 and "game.py" in rows["contract"]
    assert "took longer than 0.5 s; end the loop there" in rows["contract"]


def test_vlm_without_a_picture_is_refused(check: Check) -> None:
    with pytest.raises(SystemExit, match="env.vlm is set, but game.py shows no picture"):
        check(**game("loop", env="{vlm: only}"))


def test_each_tool_is_called_and_the_reference_answer_is_graded(check: Check) -> None:
    config = (
        "rollout_interaction_env_path: envs.tools\ntasks: [train]\nenv:\n  tools: [my_tools.py]\n"
        "  grader: grader.py:NAME\n  data: [{question: '10 + 2?', answer: '12'}]\n"
    )
    files = {
        "grader__py": GRADER,
        "my_tools__py": TOOLS,
        "t__yaml": config.replace("NAME", "grade"),
    }
    code, rows = check(**files)
    assert code == 0
    assert rows["tool add"].startswith("ok ") and rows["tool add"].endswith("gave '1 m'")
    assert rows["tool broken"].startswith("warning ") and "no such service" in rows["tool broken"]
    assert (
        rows["tool never"].startswith("warning ")
        and "no arguments could be made" in rows["tool never"]
    )
    assert rows["grader"].startswith("ok "), (
        "signals work, since graders run in the worker's main thread"
    )
    assert rows["seeds"].startswith("warning ")
    options = {"grader": "grader.py:stingy", "data": [{"question": "10 + 2?", "answer": "12"}]}
    env = build_env_from("envs.tools", {"task": "train", "seed": 0}, options)
    env.reset()
    (graded,) = try_tools(env)
    assert not graded.worked and "is paid 0.5" in graded.detail


GYM = """
import gymnasium
from gymnasium import spaces

class Fixed(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}
    observation_space, action_space = spaces.Discrete(9), spaces.Discrete(2)
    action_names = ["left", "right"]

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=5)
        self.n = 0
        return int(self.np_random.integers(9)), {}

    def step(self, action):
        self.n += 1
        return RETURNS

    def render(self):
        return DRAWS
"""
RETURNS = "0, 0.5, False, self.n >= 4, {}"
PRINTS = 'f"turn {self.n}"'


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((RETURNS, "None"), "render returned None, not text that the model could see"),
        ((RETURNS.replace("0.5", "None"), PRINTS), "step paid the reward None"),
        (("1 / 0", PRINTS), "ZeroDivisionError: division by zero at"),
    ],
)
def test_a_gymnasium_games_own_faults_are_named_with_the_games_line(
    check: Check, changes: tuple[str, str], words: str
) -> None:
    env = "env: {id: 'fixed.py:Fixed', default_action: left}"
    config = f"rollout_interaction_env_path: envs.gymnasium_text\ntasks: [default]\n{env}\n"
    code = GYM
    for name, change in zip(("RETURNS", "DRAWS"), changes, strict=True):
        code = code.replace(name, change)
    _, rows = check(fixed__py=code, t__yaml=config)
    found = rows["contract"]
    assert not found.startswith("ok ") and words in found
    assert "fixed.py:" in found and "gymnasium_text" not in found


SLIMES = """
class BaseInteractionEnv:
    def reset(self):
        raise NotImplementedError

    def close(self):
        pass

class Guess(BaseInteractionEnv):
    def __init__(self, seed):
        self.seed = seed

    ASYNC def reset(self):
        self.n = 0
        return {"obs_str": f"Guess a number below {self.seed + 10}."}, {"ground_truth_available": True}

    ASYNC def step(self, response_text):
        self.n += 1
        observation = {"obs_str": "no", "role": "tool"}
        return observation, self.n >= 3, {"reward": float(response_text == "42"), "tool_executed": False}

def build_env(sample=None, args=None, **_):
    return Guess(sample.metadata["seed"])
"""


@pytest.mark.parametrize("is_async", ["", "async "])
@pytest.mark.parametrize("backend", ["inline", "process"])
def test_an_environment_of_slimes_interface_plays_also_if_it_is_async(
    check: Check, is_async: str, backend: str
) -> None:
    config = f"rollout_interaction_env_path: guess.py\ntasks: [t]\nenv_backend: {backend}\n"
    files = {"guess__py": SLIMES.replace("ASYNC ", is_async), "t__yaml": config}
    code, rows = check(**files)
    assert code == 0 and "3 turns" in rows["random"] and rows["seeds"].startswith("ok ")
    assert (
        slime_verlog("evaluate", "t.yaml", "--player", "random", "--episodes", "3", "--out", "out")
        == 0
    )
