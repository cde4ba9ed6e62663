"""The runs of a study: which there are, what determines each of them, and which are done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedded.studies.study import Study, check_study, run_keys
from slime_verlog import ConfigError

SAVE_INTERVAL = 10
"""Updates between two checkpoints of a run."""
SETTINGS, ROWS, DONE = "settings.json", "rows.jsonl", "done.json"
"""Files of a run: what determines it, its metrics, and that it is finished."""


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

    @property
    def policies(self) -> Path:
        """Folder of the initial policies, which studies share."""
        return self.out / "policies"

    def runs(self) -> list[tuple[str, int]]:
        """Variant and seed of each run. Seeds come first, so that an interrupted study has complete comparisons."""
        return [(variant, seed) for seed in self.study.seeds for variant in self.variants]

    def run_folder(self, variant: str, seed: int) -> Path:
        """Folder of one run."""
        return self.folder / variant / f"seed_{seed}"

    def run_name(self, variant: str, seed: int) -> str:
        """One run, in messages."""
        return f"{self.study.name}: {variant}, seed {seed}"

    def settings(self, name: str, seed: int) -> dict[str, Any]:
        """Everything that determines a run, as plain data."""
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
    """Check every variant, and plan the chosen ones.

    Raises:
        ConfigError: a chosen variant does not exist, or a variant's settings are rejected.
    """
    for name in only or ():
        study.variant(name)
    check_study(study)
    return Plan(study, out, tuple(only or study.variants), keep_policies)


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write down the settings of a folder's run.

    Raises:
        ConfigError: the folder holds a run with other settings.
    """
    from embedded.report import write_text

    path = folder / SETTINGS
    if not path.exists():
        write_text(path, json.dumps(settings, indent=1))
        return
    found = _read_json(path)
    if found != settings:
        part = next(key for key in settings if found.get(key) != settings[key])
        raise ConfigError(
            f"{folder} holds a run with other {part}: {found.get(part)} instead of {settings[part]}; "
            "choose another --out, or delete the folder"
        )


def left_to_do(plan: Plan) -> list[tuple[str, int]]:
    """The runs that are not finished. Those that another study in the output folder has done are copied first.

    Raises:
        ConfigError: a folder holds a run with other settings.
    """
    return [run for run in plan.runs() if not (_is_finished(plan, *run) or _copy_from_other_study(plan, *run))]


def _is_finished(plan: Plan, variant: str, seed: int) -> bool:
    folder = plan.run_folder(variant, seed)
    if not folder.exists():
        return False
    claim(folder, plan.settings(variant, seed))
    return (folder / DONE).exists()


def _copy_from_other_study(plan: Plan, variant: str, seed: int) -> bool:
    """Whether another study had the same run.

    Runs of studies that compare time are not copied, because the machine was not the same for them.
    """
    target, settings = plan.run_folder(variant, seed), plan.settings(variant, seed)
    if plan.study.compares_time or plan.keep_policies or target.exists():
        return False
    for done in sorted(plan.out.glob(f"*/*/seed_{seed}/{DONE}")):
        if _read_json(done.with_name(SETTINGS)) == settings:
            target.mkdir(parents=True)
            for name in (SETTINGS, "run.yaml", ROWS, DONE):  # the last file makes the copy a finished run
                shutil.copyfile(done.with_name(name), target / name)
            print(f"{plan.run_name(variant, seed)}: copied from {done.parent}/", flush=True)
            return True
    return False


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def overview(plan: Plan) -> str:
    """The runs of a plan, one line each, with what is done already."""
    lines = [plan.study.question]
    for variant, seed in plan.runs():
        folder, updates = plan.run_folder(variant, seed), plan.settings(variant, seed)["flags"]["num_rollout"]
        state = "finished" if (folder / DONE).exists() else "begun" if folder.is_dir() else "to do"
        lines.append(f"  {variant}, seed {seed}: {updates} updates, {state}, {folder}/")
    return "\n".join(lines)
