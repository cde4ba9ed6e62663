"""Checks SWE instances before training: `python -m envs.swe.validate --config custom_configs/swe.yaml`.

The reference patch must be rewarded, and the untouched tree must not.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from envs.errors import SlimeVerlogError
from envs.swe import SWEEnv, SWESettings, check_machine, make_env
from envs.swe.shell import Finding
from envs.swe.small_tasks import SMALL_TASKS
from envs.swe.verdict.evaluate import evaluate, run_tests
from envs.swe.verdict.instances import load_instances
from envs.swe.verdict.trees import build_reference, build_tree, pristine_tree, scratch_tree
from slime_verlog import command, read_settings, read_yaml_mapping


def validate_instances(settings: SWESettings, tasks: Iterable[str]) -> Iterator[Finding]:
    """Check instances one by one. What is wrong with one of them is a finding, never an error."""
    for task in tasks:
        try:
            yield _validate(make_env(task, settings))
        except SlimeVerlogError as error:
            yield Finding(task, str(error).removeprefix(f"{task}: "))


def _validate(env: SWEEnv) -> Finding:
    instance, judge = env.instance, env.judge
    check_machine(judge.python)
    pristine = pristine_tree(env.repository, instance.base_commit, env.settings.cache())
    untouched = run_tests(lambda tree: build_tree(tree, pristine, instance.test_patch), instance.required, judge)
    if untouched.green.issuperset(instance.required):
        return Finding(instance.instance_id, "the untouched tree is paid: every required test passes without a change")
    _, plan = env.prepare()
    with scratch_tree() as tree:
        build_reference(tree, pristine, instance)
        start = time.monotonic()
        verdict = evaluate(instance, pristine, tree, judge, plan)
    if not verdict.solved:
        return Finding(instance.instance_id, f"the reference patch is not paid: {verdict.reason}")
    green = [test for test in instance.fail_to_pass if test in untouched.green]
    note = f"verdict in {time.monotonic() - start:.1f} s; {plan.note}"
    note += f"; green without a change: {', '.join(green)}" if green else ""
    return Finding(instance.instance_id, note=note)


def tasks_of(config: Mapping[str, Any], settings: SWESettings) -> Sequence[str]:
    """The tasks that a YAML plays in training and evaluation; all instances of its file if it names none."""
    listed = [*(config.get("tasks") or ()), *((config.get("eval") or {}).get("tasks") or ())]
    names = [entry.get("task", entry.get("name")) if isinstance(entry, Mapping) else entry for entry in listed]
    known = load_instances(settings.instances) if settings.instances else SMALL_TASKS
    return list(dict.fromkeys(str(name) for name in names if name)) or list(known)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per instance; the exit status is 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python -m envs.swe.validate", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML with the env: mapping and the tasks")
    parser.add_argument("tasks", nargs="*", help="instances to check instead of those that the YAML names")
    given = parser.parse_args(arguments)
    config = read_yaml_mapping(given.config, "--config")
    settings = read_settings(SWESettings, config.get("env"), "env.")
    failed = []
    for found in validate_instances(settings, given.tasks or tasks_of(config, settings)):
        print(f"{'FAILED' if found.problem else 'ok':<8}{found.task}: {found.problem or found.note}", flush=True)
        failed.append(bool(found.problem))
    print(f"{len(failed)} instances, {sum(failed)} failed")
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
