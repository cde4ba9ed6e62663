"""Run a study: every variant over several seeds, then a table, a plot and CSV files.

    python -m embedded.studies.run dual_discount             writes outputs/ablations/dual_discount/
    python -m embedded.studies.run my_study.yaml --jobs 1    your own study, one run at a time
    python -m embedded.studies.run memory --seeds 0 1 2 3 4 --updates 90
    python -m embedded.studies.run --list

Start the same command again to resume: finished runs are skipped, and an interrupted run continues
from its last checkpoint. On another machine, finished runs are skipped if the study's folder has
`raw.csv` and `variants.json`. For each seed, variants with the same warm start share one initial
policy. `--dry-run` checks every variant and prints the runs. A study's file is described in
docs/studies.md.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from embedded.run.folder import CHECKPOINTS, DONE, claim, claimed, rewind, saved_updates, write_text
from embedded.run.record import MetricsLog, Row, read_rows
from embedded.studies import study
from embedded.studies.study import RAW, ROWS, VARIANTS, Plan, make_plan
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
REWARDS = ("binary_reward", "shaping")
"""Options of environments that do not affect demonstrations."""
SHOWN = (
    "rollout_interaction_env_path",
    "tasks",
    "history",
    "memory",
    "max_turns",
    "chat_template_kwargs",
    "use_inference_chat_template",
)
"""Keys that decide what demonstrations show."""


def run_one(plan: Plan, variant: str, seed: int) -> None:
    """Run one variant with one seed; writes `rows.jsonl`, and `done.json` at the end. Raises
    ConfigError."""
    folder = plan.run_folder(variant, seed)
    settings = plan.settings(variant, seed)
    (plan.out / POLICIES).mkdir(parents=True, exist_ok=True)
    with claimed(folder, settings):
        if not plan.is_done(variant, seed):
            _train(plan, variant, seed, settings)


def _train(plan: Plan, variant: str, seed: int, settings: Mapping[str, Any]) -> None:
    from embedded.arguments import EmbeddedFlags, make_args
    from embedded.pretraining import pretrain_critic, split_run
    from embedded.train import train
    from embedded.warmstart.imitation import read_imitation

    folder = plan.run_folder(variant, seed)
    path = folder / "run.yaml"
    checkpoints = folder / CHECKPOINTS
    pretraining, ppo = split_run(settings["keys"], settings["flags"], folder / "critic")
    write_text(path, yaml.safe_dump(dict(ppo.keys), sort_keys=False))
    saved = saved_updates(folder)
    rewind(folder / ROWS, saved)
    policy = _policy(path, seed, plan.out / POLICIES, settings)
    shared = {
        **read_imitation(policy).lengths(EmbeddedFlags(hf_checkpoint="")),
        "hf_checkpoint": str(policy),
    }
    turns = pretrain_critic(pretraining, shared) if pretraining else 0.0
    paths = {"save": str(checkpoints), "load": str(checkpoints) if saved >= 0 else None}
    args = make_args(path, **{**shared, **ppo.flags, **paths})
    source = policy if plan.keep_policies else None
    tracker = _Tracker(
        folder / ROWS, turns, plan.run_name(variant, seed), plan.study.measure, source
    )
    evaluated = {int(row["update"]) for row in read_rows(folder / ROWS) if "eval/episodes" in row}
    train(args, tracker, evaluated)
    write_text(folder / DONE, json.dumps({"updates": args.num_rollout, "turns": tracker.turns}))
    shutil.rmtree(checkpoints, ignore_errors=True)


class _Tracker(MetricsLog):
    """Also prints evaluations, and writes policies if there is a `source`."""

    def __init__(
        self, rows: Path, turns: float, name: str, measure: str, source: Path | None
    ) -> None:
        super().__init__(rows, turns)
        self._name = name
        self._measure = measure
        self._source = source
        before = rows.with_name("policy_before")
        if source is not None and not before.is_dir():
            shutil.copytree(source, before)

    def evaluation(self, rollout_id: int, result: Any, weights: Any = None) -> Row:
        from embedded.engine.decoder import write_policy

        if self._source is not None and rollout_id:
            write_policy(self._source, weights, self.path.with_name("policy_after"))
        means = super().evaluation(rollout_id, result)  # last: the row says that the rest is there
        value = f"{MEASURES[self._measure]} {means[f'eval/{self._measure}']:.3f}"
        tqdm.write(f"{self._name}: {value} after {rollout_id} updates")
        return means


def _policy(config: Path, seed: int, policies: Path, settings: Mapping[str, Any]) -> Path:
    """Make the initial policy, unless it is there; variants with the same prompts and warm start
    share it."""
    from embedded.warmstart.imitation import IMITATION_FILE, WarmStart, make_policy
    from rollout.bridge.settings import load_settings

    keys = settings["keys"]
    warm = settings["warm"]
    env = {**keys.get("env", {}), **warm.get("env", {})}
    for name in REWARDS:
        env.pop(name, None)
    shown = {key: keys.get(key) for key in SHOWN}
    content = json.dumps([IMITATION_FILE, env, shown, warm, seed], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    folder = policies / f"{digest[:12]}-seed_{seed}"
    if folder.is_dir():
        return folder
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
    """Run what is left of a study, `jobs` runs at a time (default: one per core); write its report,
    return the table.

    Raises ConfigError for rejected settings, and SlimeVerlogError, after the report, if runs failed
    or were killed.
    """
    from embedded.studies.report import write_csv, write_report
    from embedded.studies.results import finished_elsewhere, read_runs

    for run in finished_elsewhere(plan):
        _restore(plan, run.variant, run.seed, run.rows)
    left = study.left_to_do(plan)
    failures = []
    plan.folder.mkdir(parents=True, exist_ok=True)
    settings = {variant: plan.settings(variant, 0) for variant in plan.study.variants}
    write_text(plan.folder / VARIANTS, json.dumps(settings, indent=1))
    at_once = min(jobs or cores(), len(left))
    if at_once > 1:
        named = {plan.run_name(*run): (plan, *run) for run in left}
        failures = run_processes(named, _run_in_process, at_once)
    else:
        for run in left:
            print(plan.run_name(*run), flush=True)
            run_one(plan, *run)
            write_csv(plan.folder / RAW, read_runs(plan.folder, plan.study))
    text = write_report(plan.folder, plan.study)
    if failures:
        print(text)
        raise SlimeVerlogError(f"{'; '.join(failures)}; the same command continues what is left")
    return text


def _restore(plan: Plan, variant: str, seed: int, rows: Sequence[Row]) -> None:
    """Write the folder of a run that was finished elsewhere."""
    folder = plan.run_folder(variant, seed)
    last = rows[-1]
    folder.mkdir(parents=True)
    claim(folder, plan.settings(variant, seed))
    write_text(folder / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / DONE, json.dumps({"updates": int(last["update"]), "turns": last["turns"]}))


def _run_in_process(plan: Plan, variant: str, seed: int) -> None:
    from embedded.launch import set_up_process

    os.environ["TQDM_DISABLE"] = "1"  # the bars of several runs would overwrite each other
    set_up_process()
    run_one(plan, variant, seed)


def run_processes(
    jobs: Mapping[str, tuple[Any, ...]], target: Callable[..., None], at_once: int
) -> list[str]:
    """Call `target` with each job's arguments, `at_once` jobs at a time; returns a sentence per job
    that failed.

    A failure does not stop the other jobs. If this process is interrupted or killed, the jobs are
    interrupted, too. After each job, it is printed when the last one will end.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(jobs.items())
    failures = []
    running: dict[str, BaseProcess] = {}
    began = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, arguments = waiting.popleft()
                running[name] = context.Process(target=_job, args=(name, target, arguments))
                running[name].start()
            wait([process.sentinel for process in running.values()])
            ended = [name for name, process in running.items() if not process.is_alive()]
            for name in ended:
                code = running.pop(name).exitcode
                how = how_it_ended(code) if code else "done"
                print(f"{name}: {how}", flush=True)
                if code:
                    failures.append(f"{name} {how}")
            left = len(waiting) + len(running)
            if ended and left:
                seconds = (time.monotonic() - began) / (len(jobs) - left) * left
                end = datetime.now() + timedelta(seconds=seconds)
                print(f"{left} runs are left, until about {end:%H:%M}", flush=True)
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
    # A terminal interrupts all processes, and the parent may repeat it; the second must not disturb
    # the ending.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"one of {', '.join(study.study_names())}, or a file"
    parser.add_argument("study", nargs="?", metavar="NAME|FILE.yaml", help=known)
    parser.add_argument("--list", action="store_true", help="print the studies and their questions")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the variants and print the runs"
    )
    parser.add_argument("--variants", nargs="+", help="run only these variants")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time (default: one per core)"
    )
    parser.add_argument(
        "--keep-policies", action="store_true", help="keep each run's first and last policy"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/ablations"), help="default: %(default)s"
    )
    shared = parser.add_argument_group("in place of the values in the study's file")
    shared.add_argument("--seeds", type=int, nargs="+", help="each variant runs once per seed")
    shared.add_argument("--updates", type=int, help="updates per run, critic warm-up included")
    return parser


@command()
def main(argv: list[str] | None = None) -> None:
    """Run one study; the exit code is 1 if the actor of a finished run never trained."""
    given = _parser().parse_args(argv)
    if given.list:
        print(
            "\n".join(
                f"{name:<20}{study.load_study(name).question}" for name in study.study_names()
            )
        )
        return
    if given.study is None:
        raise ConfigError("name a study, or give its YAML file; --list prints the studies")
    if given.jobs is not None and given.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {given.jobs}")
    overrides = {
        key: getattr(given, key) for key in ("seeds", "updates") if getattr(given, key) is not None
    }
    chosen = study.load_study(given.study, overrides)
    plan = make_plan(chosen, given.out, given.variants, keep_policies=given.keep_policies)
    for name in ("megatron", "matplotlib", "scipy"):
        if find_spec(name) is None:
            how = "install it with: pip install 'slime-verlog[embedded,studies]'"
            raise MissingDependencyError(f"a study needs the package {name}; {how}")
    from embedded.studies.results import finished_elsewhere

    if given.dry_run:
        print(study.overview(plan, [(run.variant, run.seed) for run in finished_elsewhere(plan)]))
        return
    for sentence in plan.warnings:
        print(sentence, flush=True)
    from embedded.launch import set_up_process

    set_up_process()
    try:
        print(run_study(plan, given.jobs))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command resumes") from None
    from embedded.studies.report import faults_of
    from embedded.studies.results import read_runs

    if faults_of(read_runs(plan.folder, chosen)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
