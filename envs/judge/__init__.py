"""A language model as judge: reward and feedback around any environment."""

from envs.judge.client import EndpointOptions, JudgeClient
from envs.judge.env import JudgedEnv, JudgeOptions, build_env
from envs.judge.rubric import Criterion, Rubric, Verdict, read_rubric, read_verdict

__all__ = [
    "Criterion",
    "EndpointOptions",
    "JudgeClient",
    "JudgeOptions",
    "JudgedEnv",
    "Rubric",
    "Verdict",
    "build_env",
    "read_rubric",
    "read_verdict",
]
