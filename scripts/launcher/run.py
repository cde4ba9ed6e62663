"""What all kinds of runs share: variables, options, folders, some flags, and the way to Ray."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from scripts.launcher.own_python import ROOT, ensure_packages, header

ensure_packages()

from rollout.bridge.settings import RolloutSettings, check_keys  # noqa: E402
from scripts.launcher.checks import check_without_slime  # noqa: E402
from scripts.launcher.cluster import end_dry_run, find_ray, preflight  # noqa: E402
from scripts.launcher.config import read_config  # noqa: E402
from scripts.launcher.gpus import layout  # noqa: E402
from scripts.launcher.job import GROUPS, Job, dry_run, flat  # noqa: E402
from scripts.launcher.models import find_shape, read_shape, reference_name  # noqa: E402
from scripts.launcher.resume import TRACKER  # noqa: E402
from scripts.launcher.variables import Variables, help_text, parser_of, read_variables  # noqa: E402
from slime_verlog import ConfigError, command, parse_yaml  # noqa: E402

V = TypeVar("V", bound=Variables)
PARALLEL = "--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size 1 --context-parallel-size 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MISC = """
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash
"""
TENSORBOARD = "--use-tensorboard --tb-project-name slime-verlog --tb-experiment-name {name}"
"""TENSORBOARD_DIR of the job's environment wins over these names, which whoever copies the flags
without it needs."""
WANDB = "--use-wandb --wandb-project {project} --wandb-group {name}"


def words(text: str, **values: object) -> list[str]:
    """Split flags at white space, and then fill in the values, which may contain white space."""
    return [word.format(**values) for word in text.split()]


class Run(Generic[V]):
    """What all kinds of runs share: variables, options, folders and some groups of flags."""

    variables: ClassVar[type[Variables]]
    refused: ClassVar[tuple[str, tuple[str, ...]]] = ("", ())
    """Why this kind cannot obey some variables of others, and their names."""
    sees: ClassVar[bool] = False
    """Whether this kind always trains with pictures."""

    def __init__(self, script: str, given: V, options: argparse.Namespace) -> None:
        self.script = script
        self.given = given
        self.options = options
        self.model = options.model or given.model
        self.images = self.sees or options.images
        self.name = f"{self.experiment}-{self.model}"
        self.engine_gpus = given.engine_gpus or 1
        self.slime = given.slime_path
        self.models = given.models
        self.run_dir = f"{given.output}/{self.name}"
        if options.flat:
            # Names of variables; no such folder exists, so the run counts as a new one.
            self.slime = "$SLIME_PATH"
            self.models = "$MODELS"
            self.run_dir = "$RUN_DIR"
        self.actor_dir = f"{self.run_dir}/actor"
        self.config_file = f"{self.run_dir}/config.yaml"
        self.hf_checkpoint = f"{self.models}/{self.model}"
        self.reference = (
            given.reference or f"{self.models}/{reference_name(self.model, self.images)}"
        )
        self.roles = ""
        self.warnings: list[str] = []
        """What preflight would warn about, as far as it can be told without slime."""

    @property
    def experiment(self) -> str:
        """What the run's folder is named after."""
        return self.given.experiment

    @cached_property
    def config(self) -> str:
        """The experiment's YAML as this run uses it; raises ConfigError if there is no such
        file."""
        return read_config(self.given.config, self.model)

    def settings(self) -> RolloutSettings:
        """Return the YAML's settings; raises ConfigError for a mistake in them."""
        return check_keys(parse_yaml(self.config, f"CONFIG={self.given.config}"))

    def groups(self) -> dict[str, list[str]]:
        """Return the flags of this kind of run by the names of `GROUPS`."""
        raise NotImplementedError

    def preparation(self) -> str:
        """Return what a script of `--flat` does before it submits the job, if anything."""
        return ""

    def missing(self, job: Job) -> list[str]:
        """Return what this machine lacks for the job, each with what to do."""
        found: list[str] = []
        if not Path(job.program).is_file():
            found.append(f"no {job.program}; set SLIME_PATH to a slime checkout")
        if self.reference != self.hf_checkpoint and not Path(self.reference, TRACKER).is_file():
            model = f"{self.model}{' --images' if self.images else ''}"
            repair = f"run: bash scripts/prepare_model.sh {model}"
            if self.given.reference:
                repair = "correct REFERENCE"
            found.append(f"{self.reference} holds no finished checkpoint; {repair}")
        if not job.groups["MODEL"]:
            found.append(
                f"{self.slime} does not describe {self.model}, so the flags MODEL_ARGS are missing"
            )
        return found

    def before(self) -> None:
        """Make what the job needs besides its YAML files; not in a dry run."""

    def after(self) -> None:
        """Say what can follow the finished job."""

    def build(self) -> Job:
        """Write the run's YAML files, unless `--flat` prints them, and return the job; raises
        ConfigError."""
        settings = self.settings()
        shape = find_shape(self.model, self.given.slime_path, self.images)
        arguments = [] if self.options.flat else read_shape(shape, self.slime, self.options.dry_run)
        tracking = words(TENSORBOARD, name=self.name)
        if self.given.wandb_project:
            tracking = words(WANDB, project=self.given.wandb_project, name=self.name)
        shared = {
            "MODEL": arguments,
            "TRACKING": tracking,
            "MISC": words(MISC),
            "EXTRA": self.options.extra,
        }
        groups = {**shared, **self.groups()}
        job = Job(
            script=self.script,
            purpose=header(self.script),
            program=f"{self.slime}/{self.given.train_script}",
            groups={name: groups.get(name, []) for name in GROUPS},
            model_lines=shape.lines,
            environment=self.environment(),
            address=self.given.ray_address,
            name=self.name,
            run_dir=self.run_dir,
            config=self.config,
            roles=self.roles,
            preparation=self.preparation(),
        )
        self.warnings = check_without_slime(job, settings)
        self.write("config.yaml", job.config)
        if job.roles:
            self.write("roles.yaml", job.roles)
        return job

    def write(self, name: str, text: str) -> None:
        """Write a file into the run's folder, unless `--flat` prints it; raises ConfigError if it
        cannot be written."""
        if self.options.flat:
            return
        path = Path(self.run_dir, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; set OUTPUT to a folder that you may write "
                "to, and that all nodes share"
            ) from error

    def environment(self) -> dict[str, str]:
        """Return the variables that every process of the job gets, and preflight too.

        Megatron reads CUDA_DEVICE_MAX_CONNECTIONS while it checks flags, slime's writers take
        TENSORBOARD_DIR before any flag. slime's own launcher sets four more, which are not needed
        here. NCCL_NVLS_ENABLE: NCCL looks for NVLink itself. MASTER_ADDR: slime's training
        processes set it. PYTHONUNBUFFERED: Ray sets it for train.py, and runs workers with -u.
        no_proxy: it would replace that of the nodes, and they know each other's addresses
        (docs/troubleshooting.md).
        """
        names = self.given.job_variables.split(",")
        paths = [str(ROOT), self.slime, self.given.megatron_path, os.environ.get("PYTHONPATH", "")]
        return {
            **{name: os.environ[name] for name in names if os.environ.get(name)},
            "PYTHONPATH": "$PATHS" if self.options.flat else ":".join(filter(None, paths)),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TENSORBOARD_DIR": f"{self.run_dir}/tensorboard",
        }

    def layout(self) -> list[str]:
        """Return the flags of nodes and GPUs; raises ConfigError for a number that does not divide
        them."""
        return layout(self.given, self.options.disaggregated, self.engine_gpus)

    def parallel(self) -> list[str]:
        """Return the flags of parallel and micro-batched training."""
        given = self.given
        tokens = given.max_tokens_per_gpu or 4 * (given.prompt_len + given.response_len)
        flags = words(f"{PARALLEL} {RECOMPUTE}", tensor=given.tensor_parallel)
        flags += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(tokens)]
        return [*flags, "--sequence-parallel"] if given.tensor_parallel > 1 else flags


def submit(run: Run[Any], job: Job) -> int:
    """Check the whole command line, so that a mistake costs seconds and no GPU; then hand the job
    to Ray.

    Returns the exit status. Raises ConfigError if slime, the reference or the Ray cluster is
    missing.
    """
    given = run.given
    if missing := run.missing(job):
        raise ConfigError(missing[0])
    if status := preflight(job, given.train_script):
        return status
    find_ray(given)
    if "--use-tensorboard" in job.words:
        print(
            f"metrics: tensorboard --logdir {run.run_dir}/tensorboard --reload_multifile=true",
            flush=True,
        )
    return subprocess.run(job.submission()).returncode


def read_run(
    kind: type[Run[Any]], script: str, defaults: Mapping[str, str], given: list[str]
) -> Run[Any]:
    """Return the run that a script's user asked for; raises ConfigError for an option or a variable
    it cannot obey."""
    end = given.index("--") if "--" in given else len(given)
    parser = parser_of(script)
    options, unknown = parser.parse_known_args(given[:end])
    if unknown:
        print(parser.format_usage(), end="", file=sys.stderr)
        raise ConfigError(f"unknown option {unknown[0]}; slime's own flags come after --")
    options.extra = given[end + 1 :]
    reason, names = kind.refused
    for name in names:
        if os.environ.get(name):
            raise ConfigError(f"{name}={os.environ[name]} has no meaning here: {reason}")
    page = (
        f"run_{os.environ.get('RUN') or 'babyai'}.sh" if os.environ.get("PRETRAINING") else script
    )
    named = {
        "EXPERIMENT": experiment_of(page, defaults["CONFIG"], os.environ.get("CONFIG")),
        **defaults,
    }
    return kind(script, read_variables(kind.variables, named, os.environ), options)


def experiment_of(script: str, own_config: str, config: str | None) -> str:
    """Name a run after its script and, unless that is the script's own, its YAML, so that no two
    share a folder."""
    name = script.removeprefix("run_").removesuffix(".sh")
    return name if config in (None, "", own_config) else f"{name}-{Path(config).stem}"


def launch(kind: type[Run[Any]], script: str, defaults: Mapping[str, str], given: list[str]) -> int:
    """Do what a script was asked for, and return its exit status; raises ConfigError for what it
    cannot do."""
    run = read_run(kind, script, defaults, given)
    if run.options.help:
        print(help_text(script, run.given, run.images))
        return 0
    job = run.build()
    if run.options.flat:
        print(flat(job, run.given), flush=True)
        for warning in run.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return 0
    if run.options.dry_run:
        print(dry_run(job), flush=True)
        return end_dry_run(
            job, run.given.train_script, run.hf_checkpoint, [*run.warnings, *run.missing(job)]
        )
    run.before()
    status = submit(run, job)
    if status == 0:
        run.after()
    return status


def exit_with(program: Callable[..., int], *arguments: Any) -> NoReturn:
    """Run a script's program in the repository, and exit with its status: 2 after a refusal, which
    is one sentence."""
    os.chdir(ROOT)
    with command():
        try:
            status = program(*arguments)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    raise SystemExit(status)


def main(kind: type[Run[Any]]) -> NoReturn:
    """Read the command line that a script gives: its name, its variables, `--`, and the words of
    its user."""
    start = sys.argv.index("--")
    defaults = dict(word.split("=", 1) for word in sys.argv[2:start])
    script = Path(os.environ.get("PRETRAINING") or sys.argv[1]).name
    exit_with(launch, kind, script, defaults, sys.argv[start + 1 :])
