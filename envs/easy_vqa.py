"""Questions about one coloured shape in a small picture (PyPI's easy-vqa): a VLM environment for a laptop.

Tasks are `train` and `test`; the seed picks the question. A wrong answer may be corrected, which makes it multi-turn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.base import describe_task
from envs.errors import ConfigError, MissingDependencyError
from envs.options import read_options
from envs.questions import read_question
from envs.tools.env import ToolEnv
from envs.tools.registry import load_tools
from envs.tools.settings import ToolOptions

INSTRUCTION = "Look at the picture and answer the question about it with one word: {}."


@dataclass(frozen=True, kw_only=True)
class EasyVQAOptions(ToolOptions):
    """The tool environment's options; `data` is the package's own."""

    grader: str | None = "exact"
    answer_retries: int = 2
    max_steps: int = 3


def build_env(sample: Any, args: Any) -> ToolEnv:
    """The environment of one question.

    Raises:
        ConfigError: a bad option, or a task other than train and test.
        MissingDependencyError: easy-vqa or Pillow is not installed.
    """
    options = read_options(EasyVQAOptions, dict(getattr(args, "env", None) or {}), "env.")
    task, seed = describe_task(sample)
    if task not in ("train", "test"):
        raise ConfigError(f"easy-vqa has the tasks train and test, got {task!r}")
    rows, answers = _load(task)
    options = replace(options, data={task: rows}, instruction=options.instruction or INSTRUCTION.format(answers))
    question, _, _ = read_question(sample, options)
    return ToolEnv(question, load_tools(options.tools), options, task, seed)


@functools.lru_cache(maxsize=2)
def _load(task: str) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """All questions of a split, and the answers that there are."""
    try:
        import easy_vqa
    except ModuleNotFoundError as error:
        raise MissingDependencyError("easy-vqa is not installed; install it with: pip install easy-vqa==1.0") from error
    questions = zip(*getattr(easy_vqa, f"get_{task}_questions")(), strict=True)
    paths = getattr(easy_vqa, f"get_{task}_image_paths")()
    rows = tuple({"question": q, "answer": a, "images": [paths[image]]} for q, a, image in questions)
    return rows, ", ".join(sorted(easy_vqa.get_answers()))
