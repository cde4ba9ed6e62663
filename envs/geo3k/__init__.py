"""Geometry problems with images (geometry3k).

The problems come from slime's own data set (`--prompt-data`, `--input-key problem --label-key
answer --multimodal-keys '{"image": "images"}'`), or from the parquet files themselves (`env: {data:
train.parquet}`).
"""

from dataclasses import replace
from typing import Any, Literal

from envs.base import read_env_settings
from envs.questions import Question, read_question
from envs.questions.grading import find_answer, math
from envs.tools.env import ToolEnv
from envs.tools.registry import load_tools, make_tool, select_tools
from envs.tools.results import Tool, ToolEpisode
from envs.tools.settings import ToolSettings
from slime_verlog import Field

INSTRUCTION = (
    "Solve the geometry problem that the user shows you; the picture holds what the text leaves "
    "out. Reason step by step, and simplify the result: a number, or an expression with roots and "
    "fractions, without unit."
)
_CHECKERS = ("calc_score", "calc_geo3k_reward")
"""Names of the checking tool in published copies of the data set; ignored, because `check` decides
about it."""


class Geo3kSettings(ToolSettings):
    """The settings of the tool environment. The defaults are the data set's column names and three
    turns, as in slime's example."""

    check: Literal["answer", "tool"] = "answer"
    """`answer` checks every answer and lets the model correct a wrong one. `tool` offers a tool
    that checks answers, and the model then gives one final answer, as in slime's geo3k example."""
    question_key: str = "problem"
    """Column with the problem."""
    instruction: str | None = INSTRUCTION
    """First sentence of the system message."""
    grader: str | None = "math"
    """How the final answer is scored; see `envs.tools`."""
    answer_retries: int = Field(default=2, ge=0)
    """How often a wrong answer may be corrected, with `check: answer`."""
    max_steps: int = Field(default=3, ge=1)
    """Turns per episode."""


SETTINGS = Geo3kSettings


class CalcScore(Tool):
    """Tells the model whether an answer is right."""

    name = "calc_score"

    def create(self, episode: ToolEpisode) -> None:
        self._question = Question(episode.question, episode.answer)

    def execute(self, answer: str | float) -> tuple[str, float, dict[str, float]]:
        """Check an answer against the reference before giving it for good.

        Args:
            answer: The answer, a number or an expression in LaTeX.
        """
        given, _ = find_answer(str(answer))
        right = math(given, self._question) >= 1.0
        words = (
            "is right. Give it as the final answer." if right else "is wrong. Look for the mistake."
        )
        return f"{given} {words}", 0.0, {"right": float(right)}


def build_env(sample: Any, args: Any) -> ToolEnv:
    """Return the environment of one problem."""
    settings = read_env_settings(Geo3kSettings, args)
    question, task, seed = read_question(sample, settings)
    specs = select_tools(load_tools(settings.tools), question.tools, ignore=_CHECKERS)
    if settings.check == "tool":
        settings = settings.model_copy(update={"answer_retries": 0})
        specs = (make_tool(CalcScore), *specs)
    return ToolEnv(replace(question, tools=None), specs, settings, task, seed)
