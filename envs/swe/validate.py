"""Checks SWE instances for `slime-verlog check`: the reference patch must be rewarded, and the
untouched tree not."""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator

from envs.errors import SlimeVerlogError
from envs.swe import SWEEnv, SWESettings, check_machine, make_env
from envs.swe.shell import Finding
from envs.swe.verdict.evaluate import evaluate, run_tests
from envs.swe.verdict.reports import NotCounted
from envs.swe.verdict.trees import build_reference, build_tree, pristine_tree, scratch_tree


def validate_instances(settings: SWESettings, tasks: Iterable[str]) -> Iterator[Finding]:
    """Check instances one by one. What is wrong with one of them is a finding, never an error."""
    for task in tasks:
        try:
            yield _validate(make_env(task, settings))
        except SlimeVerlogError as error:
            yield Finding(task, str(error).removeprefix(f"{task}: "))


def _validate(env: SWEEnv) -> Finding:
    instance = env.instance
    judge = env.judge
    check_machine(judge.python)
    pristine = pristine_tree(env.repository, instance.base_commit, env.settings.cache())
    green = frozenset[str]()
    with contextlib.suppress(NotCounted):  # the reference patch will fail as well
        build = functools.partial(build_tree, pristine=pristine, test_patch=instance.test_patch)
        green = run_tests(build, instance.required, judge).green
    if green.issuperset(instance.required):
        return Finding(
            instance.instance_id,
            "the untouched tree is paid: every required test passes without a change",
        )
    _, plan = env.prepare()
    with scratch_tree() as tree:
        build_reference(tree, pristine, instance)
        start = time.monotonic()
        verdict = evaluate(instance, pristine, tree, judge, plan)
    if not verdict.solved:
        return Finding(instance.instance_id, f"the reference patch is not paid: {verdict.reason}")
    early = [test for test in instance.fail_to_pass if test in green]
    note = f"verdict in {time.monotonic() - start:.1f} s; {plan.note}"
    note += f"; green without a change: {', '.join(early)}" if early else ""
    return Finding(instance.instance_id, note=note)
