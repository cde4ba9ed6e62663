"""A language model as judge: reward and feedback around any environment."""

from envs.judge.env import SETTINGS, JudgedEnv, build_env
from envs.judge.rubric import Criterion, JudgedSettings, JudgeSettings, Rubric, Verdict, read_rubric, read_verdict

__all__ = [
    "SETTINGS",
    "Criterion",
    "JudgeSettings",
    "JudgedEnv",
    "JudgedSettings",
    "Rubric",
    "Verdict",
    "build_env",
    "read_rubric",
    "read_verdict",
]
