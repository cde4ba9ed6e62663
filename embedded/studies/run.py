"""Run a study: every variant over several seeds, then a table, a plot and CSV files.

    python -m embedded.studies.run dual_discount                 outputs/ablations/dual_discount/, seeds 0 1 2
    python -m embedded.studies.run my_study.yaml --jobs 1        a study of your own, one run at a time (default:
                                                                 one per core)
    python -m embedded.studies.run memory --seeds 0 1 2 3 4 --updates 90
    python -m embedded.studies.run --list

Start the same command again to resume: finished runs are skipped, and an interrupted run continues from its last
checkpoint. For each seed, variants with the same warm start share one initial policy. `--dry-run` checks every variant
and prints the runs. A study's file is described in docs/studies.md.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from embedded.arguments import cores
from embedded.run.ending import MEASURES
from embedded.run.folder import CHECKPOINTS, DONE, claimed, rewind, saved_updates, write_text
from embedded.run.record import MetricsLog, Row, read_rows
from embedded.studies import study
from embedded.studies.study import ROWS, SAVE_INTERVAL, Plan, make_plan
from slime_verlog import (
    INTERRUPTED,
    ConfigError,
    MissingDependencyError,
    SlimeVerlogError,
    command,
    disk_problem,
    read_settings,
)

PATIENCE_S = 15.0
"""Seconds that interrupted jobs get to end."""
POLICIES = "policies"
"""Folder of the initial policies, which studies share."""


def run_one(plan: Plan, variant: str, seed: int) -> None:
    """Run one variant with one seed; writes `rows.jsonl`, and `done.json` at the end. Raises ConfigError."""
    folder, settings = plan.run_folder(variant, seed), plan.settings(variant, seed)
    (plan.out / POLICIES).mkdir(parents=True, exist_ok=True)
    with claimed(folder, settings):
        if not (folder / DONE).exists():
            _train(plan, variant, seed, settings)


def _train(plan: Plan, variant: str, seed: int, settings: Mapping[str, Any]) -> None:
    from embedded.arguments import EmbeddedFlags, make_args
    from embedded.pretraining import pretrain_critic, split_run
    from embedded.train import train
    from embedded.warmstart.imitation import read_imitation

    folder = plan.run_folder(variant, seed)
    path, checkpoints = folder / "run.yaml", folder / CHECKPOINTS
    pretraining, ppo = split_run(settings["keys"], settings["flags"], folder / "critic")
    write_text(path, yaml.safe_dump(dict(ppo.keys), sort_keys=False))
    saved = saved_updates(folder)
    rewind(folder / ROWS, saved)
    policy = _policy(path, seed, plan.out / POLICIES, settings)
    shared = {**read_imitation(policy).lengths(EmbeddedFlags(hf_checkpoint="")), "hf_checkpoint": str(policy)}
    turns = pretrain_critic(pretraining, shared) if pretraining else 0.0
    paths = {"save": str(checkpoints), "load": str(checkpoints) if saved >= 0 else None}
    args = make_args(path, **{**shared, **ppo.flags, **paths})
    source = policy if plan.keep_policies else None
    tracker = _Tracker(folder / ROWS, turns, plan.run_name(variant, seed), plan.study.measure, args.num_rollout, source)
    train(args, tracker, {int(row["update"]) for row in read_rows(folder / ROWS) if "eval/episodes" in row})
    write_text(folder / DONE, json.dumps({"updates": args.num_rollout, "turns": tracker.turns}))
    shutil.rmtree(checkpoints, ignore_errors=True)


class _Tracker(MetricsLog):
    """Also prints progress, and writes policies if there is a `source`."""

    def __init__(self, rows: Path, turns: float, name: str, measure: str, updates: int, source: Path | None) -> None:
        super().__init__(rows, turns)
        self._name, self._measure, self._updates, self._source = name, measure, updates, source
        if source is not None and not rows.with_name("policy_before").is_dir():
            shutil.copytree(source, rows.with_name("policy_before"))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        super().update(rollout_id, metrics)
        done = rollout_id + 1
        if done % SAVE_INTERVAL == 0:
            left = self.seconds / done * (self._updates - done) / 60
            reward = f"reward per turn {metrics.get('turn/reward', 0.0):.3f}"
            tqdm.write(f"{self._name}: {done} updates, {reward}; this run has about {left:.0f} min left")

    def evaluation(self, rollout_id: int, result: Any, weights: Any = None) -> Row:
        from embedded.engine.decoder import write_policy

        if self._source is not None and rollout_id:
            write_policy(self._source, weights, self.path.with_name("policy_after"))
        means = super().evaluation(rollout_id, result)  # last: the row says that the rest is there
        value = f"{MEASURES[self._measure]} {means[f'eval/{self._measure}']:.3f}"
        tqdm.write(f"{self._name}: {value} after {rollout_id} updates")
        return means


def _policy(config: Path, seed: int, policies: Path, settings: Mapping[str, Any]) -> Path:
    """Make the initial policy, unless it is there; variants with the same prompts and warm start share it."""
    from embedded.warmstart.imitation import IMITATION_FILE, WarmStart, make_policy
    from rollout.bridge.settings import load_settings

    keys, warm = settings["keys"], settings["warm"]
    # Rewards do not affect demonstrations.
    env = {**keys.get("env", {}), **warm.get("env", {})}
    env = {key: value for key, value in env.items() if key not in ("binary_reward", "shaping")}
    names = ("rollout_interaction_env_path", "tasks", "history", "memory", "max_turns")
    shown = {key: keys.get(key) for key in (*names, "chat_template_kwargs", "use_inference_chat_template")}
    content = json.dumps([IMITATION_FILE, env, shown, warm, seed], sort_keys=True)
    folder = policies / f"{hashlib.sha256(content.encode()).hexdigest()[:12]}-seed_{seed}"
    if not folder.is_dir():
        temporary = policies / f".{folder.name}.{os.getpid()}"
        demonstrated = load_settings(argparse.Namespace(custom_config_path=str(config)))
        make_policy(demonstrated, temporary, read_settings(WarmStart, warm, "warm."), seed)
        try:
            temporary.rename(folder)
        except OSError:  # another process made the same policy first
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)
    return folder


def run_study(plan: Plan, jobs: int | None = None) -> str:
    """Run what is left of a study, `jobs` runs at a time (default: one per core); write its report, return the table.

    Raises ConfigError for rejected settings, and SlimeVerlogError, after the report, if runs failed or were killed.
    """
    from embedded.studies.report import write_report

    left, failures = study.left_to_do(plan), []
    began, numbers = time.monotonic(), itertools.count(1)

    def say_when_done() -> None:
        done = next(numbers)
        seconds = (time.monotonic() - began) / done * (len(left) - done)
        if seconds:
            end = datetime.now() + timedelta(seconds=seconds)
            print(f"{done} of {len(left)} runs ended; the last one will at about {end:%H:%M}", flush=True)

    if (at_once := min(jobs or cores(), len(left))) > 1:
        named = {plan.run_name(*run): (plan, *run) for run in left}
        failures = run_processes(named, _run_in_process, at_once, say_when_done)
    else:
        for run in left:
            print(plan.run_name(*run), flush=True)
            run_one(plan, *run)
            say_when_done()
    text = write_report(plan.folder, plan.study)
    if failures:
        print(text)
        raise SlimeVerlogError(f"{'; '.join(failures)}; the same command continues what is left")
    return text


def _run_in_process(plan: Plan, variant: str, seed: int) -> None:
    from embedded.launch import set_up_process

    os.environ["TQDM_DISABLE"] = "1"  # the bars of several runs would overwrite each other
    set_up_process()
    run_one(plan, variant, seed)


def run_processes(
    jobs: Mapping[str, tuple[Any, ...]],
    target: Callable[..., None],
    at_once: int,
    ended: Callable[[], None] = lambda: None,
) -> list[str]:
    """Call `target` with each job's arguments, `at_once` jobs at a time; returns a sentence per job that failed.

    A failure does not stop the other jobs. If this process is interrupted or killed, the jobs are interrupted, too.
    """
    context = multiprocessing.get_context("spawn")
    waiting, failures = deque(jobs.items()), []
    running: dict[str, BaseProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, arguments = waiting.popleft()
                running[name] = context.Process(target=_job, args=(name, target, arguments))
                running[name].start()
            wait([process.sentinel for process in running.values()])
            for name in [name for name, process in running.items() if not process.is_alive()]:
                code = running.pop(name).exitcode
                print(f"{name}: {how_it_ended(code) if code else 'done'}", flush=True)
                failures += [f"{name} {how_it_ended(code)}"] if code else []
                ended()
    finally:
        for process in running.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + PATIENCE_S
        for process in running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
    return failures


def how_it_ended(code: int) -> str:
    """Put a process's exit code other than 0 in words."""
    if code > 0:
        return f"failed with exit code {code}"
    number = signal.Signals(-code)
    hint = " (often for lack of memory; fewer --jobs need less)" if number is signal.SIGKILL else ""
    return f"was killed by {number.name}{hint}"


def _job(name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, _interrupt)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(*arguments)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SlimeVerlogError as error:
        sys.exit(f"error: {name}: {error}")
    except OSError as error:
        if (sentence := disk_problem(error)) is None:
            raise
        sys.exit(f"error: {name}: {sentence}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)


def _interrupt(*_: object) -> None:
    # A terminal interrupts all processes, and the parent may repeat it; the second must not disturb the ending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"one of {', '.join(study.study_names())}, or a file"
    parser.add_argument("study", nargs="?", metavar="NAME|FILE.yaml", help=known)
    parser.add_argument("--list", action="store_true", help="print the studies and their questions")
    parser.add_argument("--dry-run", action="store_true", help="check the variants and print the runs")
    parser.add_argument("--variants", nargs="+", help="run only these variants")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one per core)")
    parser.add_argument("--keep-policies", action="store_true", help="keep each run's first and last policy")
    parser.add_argument("--out", type=Path, default=Path("outputs/ablations"), help="default: %(default)s")
    shared = parser.add_argument_group("in place of the values in the study's file")
    shared.add_argument("--seeds", type=int, nargs="+", help="each variant runs once per seed")
    shared.add_argument("--config", metavar="YAML", help="the YAML that the variants change")
    shared.add_argument("--updates", type=int, help="updates per run, critic warm-up included")
    shared.add_argument("--eval-episodes", type=int, help="held-out seeds per task")
    shared.add_argument("--eval-interval", type=int, help="updates between two evaluations")
    return parser


@command()
def main(argv: list[str] | None = None) -> None:
    """Run one study; the exit code is 1 if the actor of a finished run never trained."""
    from embedded.studies.report import faults_of
    from embedded.studies.results import read_runs

    given = _parser().parse_args(argv)
    if given.list:
        print("\n".join(f"{name:<20}{study.load_study(name).question}" for name in study.study_names()))
        return
    if given.study is None:
        raise ConfigError("name a study, or give its YAML file; --list prints the studies")
    if given.jobs is not None and given.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {given.jobs}")
    names = ("seeds", "config", "updates", "eval_episodes", "eval_interval")
    chosen = study.load_study(given.study, {key: value for key in names if (value := getattr(given, key)) is not None})
    if chosen.compares_time and (given.jobs or 1) > 1:
        raise ConfigError(f"{chosen.name} compares wall times, which runs side by side would change; use --jobs 1")
    plan = make_plan(chosen, given.out, given.variants, keep_policies=given.keep_policies)
    for name in ("megatron", "matplotlib", *(["scipy"] if chosen.contrasts else [])):
        if find_spec(name) is None:
            how = "install it with: pip install 'slime-verlog[embedded,studies]'"
            raise MissingDependencyError(f"a study needs the package {name}; {how}")
    if given.dry_run:
        print(study.overview(plan))
        return
    for sentence in study.plan_warnings(plan):
        print(sentence, flush=True)
    from embedded.launch import set_up_process

    set_up_process()
    try:
        print(run_study(plan, 1 if chosen.compares_time else given.jobs))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command resumes") from None
    if faults_of(read_runs(plan.folder, chosen)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
