"""SWE tasks for agents: `prepare` writes the repository into the folder, `grade` judges it as `envs.swe` does.

`env.options` in the YAML are the settings of `envs.swe`; a task is an instance id.
"""

import shutil

from envs.agent.env import AgentRun
from envs.swe.env import SWEEnv, SWESettings, make_env
from envs.swe.verdict.calibration import load_plan
from envs.swe.verdict.evaluate import evaluate
from envs.swe.verdict.trees import pristine_tree
from slime_verlog import read_settings


def prepare(run: AgentRun) -> str:
    """Copy the repository as the issue found it; the prompt is the issue."""
    env, settings = _task(run)
    pristine = pristine_tree(env.repository, env.instance.base_commit, settings.cache())
    load_plan(env.instance, pristine, settings.cache(), env.judge)  # slow the first time, then cached
    shutil.copytree(pristine, run.folder, symlinks=True, dirs_exist_ok=True)
    return env.mission


def grade(run: AgentRun) -> float:
    """Return 1 if the required tests pass in what the agent left, else 0; the share that passes with `dense_reward`."""
    env, settings = _task(run)
    pristine = pristine_tree(env.repository, env.instance.base_commit, settings.cache())
    plan = load_plan(env.instance, pristine, settings.cache(), env.judge)
    verdict = evaluate(env.instance, pristine, run.folder, env.judge, plan)
    return verdict.progression if settings.dense_reward else float(verdict.solved)


def _task(run: AgentRun) -> tuple[SWEEnv, SWESettings]:
    settings = read_settings(SWESettings, run.options, "env.options.")
    return make_env(run.task, settings), settings
