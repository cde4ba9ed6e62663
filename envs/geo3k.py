"""Geometry problems with a picture (geometry3k): the answer is checked, and a wrong one may be corrected.

`check: answer` (the default) checks every answer in `\\boxed{}` and lets the model try again; `check: tool` gives it
a tool to check with before it answers for good, as slime's example of the same name does.

The problems come from slime's own data set (`--prompt-data`, `--input-key problem --label-key answer
--multimodal-keys '{"image": "images"}'`), or from the parquet files themselves (`env: {data: train.parquet}`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from envs.grading import find_answer, math
from envs.options import read_options
from envs.questions import Question, read_question
from envs.tools.env import ToolEnv, check_gradable
from envs.tools.registry import Tool, ToolEpisode, load_tools, select_tools
from envs.tools.settings import ToolOptions

INSTRUCTION = (
    "Solve the geometry problem that the user shows you; the picture holds what the text leaves out. Reason step by "
    "step, and simplify the result: a number, or an expression with roots and fractions, without unit."
)
_CHECKERS = ("calc_score", "calc_geo3k_reward")
"""Names under which published copies of the data set list a checking tool; `check` decides whether there is one."""


@dataclass(frozen=True, kw_only=True)
class Geo3kOptions(ToolOptions):
    """The tool environment's options, with the data set's column names and slime's three turns."""

    check: Literal["answer", "tool"] = "answer"
    question_key: str = "problem"
    instruction: str | None = INSTRUCTION
    grader: str | None = "math"
    answer_retries: int = 2
    max_steps: int = 3


class CalcScore(Tool):
    """Tells whether an answer is right, as often as it is asked."""

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
        words = "is right. Give it as the final answer." if right else "is wrong. Look for the mistake."
        return f"{given} {words}", 0.0, {"right": float(right)}


def build_env(sample: Any, args: Any) -> ToolEnv:
    """The environment of one problem.

    Raises:
        ConfigError: a bad option, no problem, or a problem without answer.
        MissingDependencyError: math-verify, or pyarrow for a parquet file, is not installed.
    """
    options = read_options(Geo3kOptions, dict(getattr(args, "env", None) or {}), "env.")
    question, task, seed = read_question(sample, options)
    check_gradable(question, options)
    specs = select_tools(load_tools(options.tools), question.tools, ignore=_CHECKERS)
    if options.check == "tool":
        options = replace(options, answer_retries=0)
        specs = (*load_tools(["envs.geo3k:CalcScore"]), *specs)
    return ToolEnv(replace(question, tools=None), specs, options, task, seed)
