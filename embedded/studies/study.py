"""A study as its YAML file describes it, and its runs: what determines each of them, and which are
done.

A study is one question, the variants that answer it, and what all runs share. Keys, flags and
warm-start settings are given twice: for the whole study, and for a variant, whose values win.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from embedded.run.folder import DONE, SETTINGS, claim
from slime_verlog import ConfigError, Field, Settings, merge, read_settings, read_yaml

FOLDER = Path(__file__).with_name("definitions")
PLAYED = ("rollout_interaction_env_path", "env", "tasks", "eval", "max_turns")
"""Keys that decide which environments are built and how they are tried."""
SAVE_INTERVAL = 10
"""Updates between two checkpoints of a run."""
ROWS = "rows.jsonl"
"""The metrics of a run."""
RAW, VARIANTS = "raw.csv", "variants.json"
"""The metrics of all runs of a study, and the settings of its variants."""


class Variant(Settings):
    """One of the compared settings; it names only what differs from the study."""

    keys: Mapping[str, Any] = {}
    """Keys of the YAML in `config`, nested as in the file."""
    flags: Mapping[str, Any] = {}
    """slime's flags, as in `embedded/arguments.py`; `num_rollout` gives a variant other `updates`
    than the study's."""
    warm: Mapping[str, Any] = {}
    """Fields of `embedded.warmstart.imitation.WarmStart`."""


class Study(Variant):
    """A whole study."""

    question: str
    """What the study asks; the title of its table and plot."""
    note: str = ""
    """How to read the result."""
    name: str = ""
    """Name of the folder with the results; default: the file's name."""
    config: str = "custom_configs/quickstart.yaml"
    """The YAML that the variants change."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of imitation, training episodes and sampling; each variant runs once per seed."""
    updates: int = Field(default=40, ge=1)
    """Updates per run, critic warm-up included."""
    eval_episodes: int = Field(default=128, ge=1)
    """Held-out seeds per task."""
    eval_interval: int = Field(default=10, ge=1)
    """Updates between two evaluations."""
    measure: Literal["success", "progression", "return"] = "success"
    """What held-out episodes are compared by: win rate, BALROG's progression, or the sum of
    rewards."""
    scale: tuple[float, float] = (0.0, 1.0)
    """What random play and the expert reach on the held-out episodes; contrasts count from 0 to 1
    between them."""
    contrasts: Mapping[str, Mapping[str, float]] = {}
    """Planned comparisons by name, the primary one first: the sign of each variant's number."""
    compared: str | None = None
    """The metric whose mean over the last half of the updates is a variant's number in contrasts,
    such as critic/explained_variance; by default it is the area under the held-out curve."""
    variants: Mapping[str, Variant]
    """The compared settings by name."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not self.variants:
            raise ConfigError("variants is empty; name at least one")
        is_repeated = len({*self.seeds}) < len(self.seeds)
        if not self.seeds or min(self.seeds) < 0 or is_repeated:
            raise ConfigError(
                "seeds must be a list of different integers that are at least 0, got "
                f"{list(self.seeds)}"
            )
        for name in filter(None, (*self.variants, self.name)):
            if "/" in name or name.startswith("."):
                raise ConfigError(
                    f"{name!r} cannot be the name of a folder; leave out '/' and a leading '.'"
                )
        for name in (name for signs in self.contrasts.values() for name in signs):
            if name not in self.variants:
                raise ConfigError(f"contrasts name {name!r}, which is not one of the variants")
        if self.scale[0] >= self.scale[1]:
            raise ConfigError(
                f"scale must rise from random play to the expert, got {list(self.scale)}"
            )
        return self

    def score(self, value: float) -> float:
        """Scale a held-out result to 0 for random play and 1 for the expert."""
        low, high = self.scale
        return (value - low) / (high - low)

    def variant(self, name: str) -> Variant:
        """Return the variant of this name with what all variants share; raises ConfigError if there
        is none."""
        if name not in self.variants:
            raise ConfigError(
                f"{self.name} has no variant {name!r}; choose from {', '.join(self.variants)}"
            )
        own = self.variants[name]
        return Variant(
            keys=merge(self.keys, own.keys),
            flags=merge(self.flags, own.flags),
            warm=merge(self.warm, own.warm),
        )


def study_names() -> list[str]:
    """List the studies that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_study(name: str, overrides: Mapping[str, Any] | None = None) -> Study:
    """Load the study with this name, or in this YAML file; `overrides` replace fields of the file.

    Raises ConfigError, with the file's name, if the study does not exist or is invalid.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in study_names():
        raise ConfigError(
            f"unknown study {name!r}; choose one of {', '.join(study_names())}, or give a YAML file"
        )
    content = read_yaml(str(path), "study")
    named = {"name": path.stem, **content} if isinstance(content, Mapping) else content
    try:
        read_settings(Study, named)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return read_settings(Study, {**named, **(overrides or {})})


def check_study(study: Study) -> list[str]:
    """Try the settings of every variant and build its environments once; an error names the
    variant.

    Returns a sentence for each variant in which hardly any update trains the actor.
    """
    from embedded.arguments import check_run_keys, embedded_flags
    from embedded.pretraining import check_stages, split_run
    from embedded.run.alarms import warnings_of_plan
    from embedded.warmstart.imitation import WarmStart
    from rollout.tasks import try_each_task

    warnings = []
    built = []
    for name in study.variants:
        try:
            given = run_settings(study, name, study.seeds[0])
            settings = check_run_keys(given["keys"])
            stages = split_run(given["keys"], {"hf_checkpoint": "", **given["flags"]}, Path())
            args = check_stages(stages)
            read_settings(WarmStart, given["warm"], "warm.")
        except ConfigError as error:
            raise ConfigError(f"variant {name!r}: {error}") from error
        warnings += [
            f"warning: {name}: {sentence}" for sentence in warnings_of_plan(embedded_flags(args))
        ]
        played = [getattr(settings, field) for field in PLAYED]
        if played not in built:
            built.append(played)
            try_each_task(settings)
    return warnings


def run_settings(study: Study, name: str, seed: int) -> dict[str, Any]:
    """Collect everything that determines a run, as plain data."""
    from embedded.arguments import read_keys

    variant = study.variant(name)
    keys = merge(read_keys(study.config), {"eval": {"episodes": study.eval_episodes}})
    flags = {
        "rollout_seed": seed,
        "num_rollout": study.updates,
        "eval_interval": study.eval_interval,
        "save_interval": SAVE_INTERVAL,
        **variant.flags,
    }
    return json.loads(
        json.dumps({"keys": merge(keys, variant.keys), "flags": flags, "warm": dict(variant.warm)})
    )


def panels(study: Study) -> dict[str, list[str]]:
    """Hash the held-out episodes (`rollout.tasks.panel_hash`): the variants of each panel."""
    from embedded.arguments import check_run_keys
    from rollout.tasks import held_out_episodes, panel_hash, read_tasks

    found: dict[str, list[str]] = {}
    for name in study.variants:
        settings = check_run_keys(run_settings(study, name, study.seeds[0])["keys"])
        episodes = held_out_episodes(settings, read_tasks(settings, settings.eval))
        found.setdefault(panel_hash(episodes), []).append(name)
    return found


@dataclass(frozen=True)
class Plan:
    """Which runs of a study to do, and where their files go."""

    study: Study
    out: Path
    variants: tuple[str, ...]
    keep_policies: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Folder of the study's results."""
        return self.out / self.study.name

    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of each run. Seeds come first, so that an interrupted study has complete
        comparisons."""
        return [(variant, seed) for seed in self.study.seeds for variant in self.variants]

    def run_folder(self, variant: str, seed: int) -> Path:
        """Folder of one run."""
        return self.folder / variant / f"seed_{seed}"

    def run_name(self, variant: str, seed: int) -> str:
        """Display name of a run."""
        return f"{self.study.name}: {variant}, seed {seed}"

    def settings(self, variant: str, seed: int) -> dict[str, Any]:
        """Collect everything that determines a run, as plain data."""
        return run_settings(self.study, variant, seed)

    def is_done(self, variant: str, seed: int) -> bool:
        """Tell whether a run is finished."""
        return (self.run_folder(variant, seed) / DONE).exists()


def make_plan(
    study: Study, out: Path, only: Sequence[str] | None = None, *, keep_policies: bool = False
) -> Plan:
    """Check every variant, and plan the chosen ones; raises ConfigError for an unknown or rejected
    one."""
    for name in only or ():
        study.variant(name)
    warnings = check_study(study)
    return Plan(study, out, tuple(only or study.variants), keep_policies, tuple(warnings))


def files_by_seed(folder: Path, name: str) -> dict[int, Path]:
    """Find this file in the runs of a variant; other folders, such as `seed_0_old`, are no runs."""
    found = {}
    for path in folder.glob(f"seed_*/{name}"):
        seed = path.parent.name.removeprefix("seed_")
        if re.fullmatch(r"0|[1-9]\d*", seed):
            found[int(seed)] = path
    return found


def left_to_do(plan: Plan) -> list[tuple[str, int]]:
    """List the runs that are not finished; raises ConfigError if the table would have a run with
    other settings."""
    for variant in plan.study.variants:
        for seed, path in files_by_seed(plan.folder / variant, SETTINGS).items():
            claim(path.parent, plan.settings(variant, seed))
    return [run for run in plan.runs() if not plan.is_done(*run)]


def overview(plan: Plan, elsewhere: Collection[tuple[str, int]] = ()) -> str:
    """List a study's runs, with what is done already, here or `elsewhere`, and warnings."""
    lines = [plan.study.question]
    for run in plan.runs():
        folder = plan.run_folder(*run)
        state = "begun" if folder.is_dir() else "to do"
        if plan.is_done(*run) or run in elsewhere:
            state = "finished"
        updates = plan.settings(*run)["flags"]["num_rollout"]
        lines.append(f"  {folder}/: {updates} updates, {state}")
    return "\n".join([*lines, *plan.warnings])
