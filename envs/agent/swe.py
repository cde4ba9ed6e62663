"""SWE tasks for agents: `prepare` writes the repository into the folder, `grade` judges it as
`envs.swe` does.

`env.options` in the YAML are the settings of `envs.swe`; a task is an instance id.
"""

import shutil

from envs.agent import AgentRun
from envs.swe import SWEEnv, SWESettings, make_env
from envs.swe.verdict.evaluate import evaluate
from slime_verlog import read_settings


def prepare(run: AgentRun) -> str:
    """Copy the repository as the issue found it; the prompt is the issue."""
    env = _task(run)
    pristine, _ = env.prepare()  # slow the first time, then cached
    shutil.copytree(pristine, run.folder, symlinks=True, dirs_exist_ok=True)
    return env.mission


def grade(run: AgentRun) -> float:
    """Return 1 if the required tests pass in what the agent left, else 0; the share that passes
    with `dense_reward`."""
    env = _task(run)
    pristine, plan = env.prepare()
    return env.reward(evaluate(env.instance, pristine, run.folder, env.judge, plan))


def _task(run: AgentRun) -> SWEEnv:
    return make_env(run.task, read_settings(SWESettings, run.options, "env.options."))
