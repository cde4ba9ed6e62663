"""Questions about one coloured shape in a small image (PyPI's easy-vqa): a VLM environment for a
laptop.

The tasks are `train` and `test`; the seed selects the question. A wrong answer may be corrected in
further turns.
"""

import functools
from collections.abc import Mapping
from typing import Any

from envs.base import describe_task, read_env_settings
from envs.errors import ConfigError, MissingDependencyError
from envs.questions import read_question
from envs.tools.env import ToolEnv
from envs.tools.registry import load_tools
from envs.tools.settings import ToolSettings
from slime_verlog import Field

INSTRUCTION = "Look at the picture and answer the question about it with one word: {}."


class EasyVQASettings(ToolSettings):
    """The settings of the tool environment. The questions come from the package easy-vqa, and
    `data` is ignored."""

    grader: str | None = "exact"
    """How the final answer is scored; see `envs.tools`."""
    answer_retries: int = Field(default=2, ge=0)
    """How often a wrong answer may be corrected."""
    max_steps: int = Field(default=3, ge=1)
    """Turns per episode."""


SETTINGS = EasyVQASettings
DEFAULT_TASK = "train"


def build_env(sample: Any, args: Any) -> ToolEnv:
    """Return the environment of one question."""
    settings = read_env_settings(EasyVQASettings, args)
    task, seed = describe_task(sample)
    if task not in ("train", "test"):
        raise ConfigError(f"easy-vqa has the tasks train and test, got {task!r}")
    rows, answers = _load(task)
    instruction = settings.instruction or INSTRUCTION.format(answers)
    settings = settings.model_copy(update={"data": rows, "instruction": instruction})
    question, _, _ = read_question(sample, settings)
    return ToolEnv(question, load_tools(settings.tools), settings, task, seed)


@functools.lru_cache(maxsize=2)
def _load(task: str) -> tuple[tuple[Mapping[str, Any], ...], str]:
    try:
        import easy_vqa
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "easy-vqa is not installed; install it with: pip install easy-vqa==1.0"
        ) from error
    questions = zip(*getattr(easy_vqa, f"get_{task}_questions")(), strict=True)
    paths = getattr(easy_vqa, f"get_{task}_image_paths")()
    rows = tuple(
        {"question": q, "answer": a, "images": [paths[image]]} for q, a, image in questions
    )
    return rows, ", ".join(sorted(easy_vqa.get_answers()))
