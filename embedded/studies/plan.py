"""The runs of a study: which there are, what determines each of them, and which are done."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedded.run.folder import claim, leaves
from embedded.run.log import read_rows
from embedded.studies.study import Study, check_study, run_keys
from slime_verlog import read_settings

SAVE_INTERVAL = 10  # updates between two checkpoints of a run
ROWS, DONE = "rows.jsonl", "done.json"
"""Files of a run beside its settings and checkpoints: its metrics, and that it is finished."""


@dataclass(frozen=True)
class Plan:
    """Which runs of a study to do, and where their files go."""

    study: Study
    out: Path
    variants: tuple[str, ...]
    keep_policies: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the study's results."""
        return self.out / self.study.name

    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of each run. Seeds come first, so that an interrupted study has complete comparisons."""
        return [(variant, seed) for seed in self.study.seeds for variant in self.variants]

    def run_folder(self, variant: str, seed: int) -> Path:
        """Folder of one run."""
        return self.folder / variant / f"seed_{seed}"

    def run_name(self, variant: str, seed: int) -> str:
        """Display name of a run."""
        return f"{self.study.name}: {variant}, seed {seed}"

    def settings(self, name: str, seed: int) -> dict[str, Any]:
        """Collect everything that determines a run, as plain data."""
        study, variant = self.study, self.study.variant(name)
        flags = {
            "rollout_seed": seed,
            "num_rollout": max(1, round(study.updates * variant.share)),
            "eval_interval": study.eval_interval,
            "save_interval": SAVE_INTERVAL,
            **variant.flags,
        }
        return json.loads(json.dumps({"keys": run_keys(study, variant), "flags": flags, "warm": dict(variant.warm)}))


def make_plan(study: Study, out: Path, only: Sequence[str] | None = None, *, keep_policies: bool = False) -> Plan:
    """Check every variant, and plan the chosen ones; raises ConfigError for an unknown or rejected one."""
    for name in only or ():
        study.variant(name)
    check_study(study)
    return Plan(study, out, tuple(only or study.variants), keep_policies)


def left_to_do(plan: Plan) -> list[tuple[str, int]]:
    """List the runs that are not finished; raises ConfigError if a folder holds a run with other settings."""
    left = []
    for variant, seed in plan.runs():
        folder = plan.run_folder(variant, seed)
        if folder.exists():
            claim(folder, plan.settings(variant, seed))
        if not (folder / DONE).exists():
            left.append((variant, seed))
    return left


def overview(plan: Plan) -> str:
    """List a study's variants and runs, with what is done already, warnings, and how long the rest takes."""
    lines = [plan.study.question]
    for name in plan.variants:
        variant = plan.study.variants[name]
        own = {**variant.keys, **variant.flags, **{f"warm.{key}": value for key, value in variant.warm.items()}}
        parts = [f"{key} {value}" for key, value in leaves(own)] if own else []
        parts += [f"{variant.share:g} of the updates"] if variant.share != 1 else []
        lines.append(f"  {name}: {', '.join(parts) or 'nothing is changed'}")
    for variant, seed in plan.runs():
        folder, updates = plan.run_folder(variant, seed), plan.settings(variant, seed)["flags"]["num_rollout"]
        state = "finished" if (folder / DONE).exists() else "begun" if folder.is_dir() else "to do"
        lines.append(f"  {variant}, seed {seed}: {updates} updates, {state}, {folder}/")
    flags = [plan.settings(*run)["flags"] for run in plan.runs() if not (plan.run_folder(*run) / DONE).exists()]
    ends = [rows[-1] for path in plan.out.glob(f"*/*/seed_*/{ROWS}") if (rows := read_rows(path))]
    turns, seconds = (sum(row[key] for row in ends) for key in ("turns", "seconds"))
    batch = lambda given: given.get("rollout_batch_size", 256) * given.get("n_samples_per_prompt", 1)
    left = sum(given["num_rollout"] * batch(given) for given in flags)
    pace = f"; no run in {plan.out}/ says yet how long that takes, the running study will"
    if turns:
        pace = f", about {seconds / turns * left / 60:.0f} min of training, one run after another"
    return "\n".join([*lines, *plan_warnings(plan), f"{left} turns to play{pace}"])


def plan_warnings(plan: Plan) -> list[str]:
    """Return a sentence for each variant in which hardly any update trains the actor."""
    from embedded.arguments import EmbeddedFlags
    from embedded.pretraining import split_run
    from embedded.run.alarms import warnings_of_plan

    found = []
    for variant in plan.variants:
        settings = plan.settings(variant, plan.study.seeds[0])
        _, ppo = split_run(settings["keys"], {"hf_checkpoint": "", **settings["flags"]}, Path())
        flags = read_settings(EmbeddedFlags, ppo.flags)
        found += [f"warning: {variant}: {sentence}" for sentence in warnings_of_plan(flags)]
    return found
