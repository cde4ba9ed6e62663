"""Run an ablation study: every variant over several seeds, then a table, a plot and a raw CSV.

    python -m embedded.studies.run dual_discount                 outputs/ablations/dual_discount/, seeds 0 1 2
    python -m embedded.studies.run memory --seeds 0 1 2 3 4 --updates 90

Start the same command again to resume: finished runs are skipped, and an interrupted run continues from its last
checkpoint. For each seed, variants with the same warm start share one initial policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from embedded.report import write_text
from embedded.studies.definitions import STUDIES, Variant
from rollout.bridge.sample import facts_of
from slime_verlog import ConfigError, Field, Settings, command, read_settings

CONFIG = "custom_configs/quickstart.yaml"
SAVE_INTERVAL = 10


class Budget(Settings):
    """What all runs of a study share."""

    config: str = CONFIG
    """The YAML that the variants change."""
    updates: int = Field(default=60, ge=1)
    """Updates per run, critic warm-up included."""
    eval_episodes: int = Field(default=128, ge=1)
    """Held-out seeds per task."""
    eval_interval: int = Field(default=20, ge=1)
    """Updates between two evaluations."""
    flags: Mapping[str, Any] = {}
    """slime's flags; those of a variant override them."""
    warm: Mapping[str, Any] = {}
    """Fields of `WarmStart`; those of a variant override them."""


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` updated with `above`; nested mappings are merged in the same way."""
    both = {key: merge(below[key], value) for key, value in above.items() if _nested(below.get(key), value)}
    return {**below, **above, **both}


def _nested(a: Any, b: Any) -> bool:
    return isinstance(a, Mapping) and isinstance(b, Mapping)


class RowTracker:
    """A `Tracker` of `embedded.train` that appends every number of a run to a JSON-lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turns = sum(row.get("rollout/turns", 0.0) for row in read_rows(path))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one update."""
        self.turns += metrics.get("rollout/turns", 0.0)
        self._write({"update": rollout_id + 1, "turns": self.turns, **metrics})

    def evaluation(self, rollout_id: int, result: Any) -> None:
        """Append the results of the held-out episodes, played after `rollout_id` updates."""
        episodes = [facts_of(sample) for group in result.data.values() for sample in group["samples"]]
        mean = lambda values: sum(values) / len(episodes)
        metrics = {
            "eval/success": mean(facts["success"] for facts in episodes),
            "eval/return": mean(facts["return"] for facts in episodes),
            "eval/turns": mean(facts["turns"] for facts in episodes),
            "eval/episodes": float(len(episodes)),
        }
        self._write({"update": rollout_id, "turns": self.turns, **metrics})

    def _write(self, row: Mapping[str, float]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows that a run has written so far."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_one(variant: Variant, seed: int, folder: Path, policies: Path, budget: Budget) -> None:
    """Run one variant with one seed; writes `rows.jsonl`, and `done.json` at the end.

    Raises:
        ConfigError: the folder holds a run with other settings, or the YAML or a flag is rejected.
    """
    from embedded.arguments import make_args
    from embedded.train import train

    settings = _settings(variant, seed, budget)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, settings)
    if (folder / "done.json").exists():
        return
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings["keys"], sort_keys=False), encoding="utf-8")
    checkpoints = folder / "checkpoints"
    resume = _rewind(folder / "rows.jsonl", checkpoints, settings["flags"]["num_rollout"])
    args = make_args(
        path,
        **settings["flags"],
        hf_checkpoint=str(_policy(path, seed, policies, settings)),
        save=str(checkpoints),
        load=str(checkpoints) if resume else None,
    )
    tracker = RowTracker(folder / "rows.jsonl")
    train(args, tracker)
    write_text(folder / "done.json", json.dumps({"updates": args.num_rollout, "turns": tracker.turns}))
    shutil.rmtree(checkpoints, ignore_errors=True)


def _settings(variant: Variant, seed: int, budget: Budget) -> dict[str, Any]:
    """Everything that determines a run, as plain data."""
    from embedded.arguments import read_keys

    flags = {
        "rollout_seed": seed,
        "num_rollout": max(1, round(budget.updates * variant.share)),
        "eval_interval": budget.eval_interval,
        "save_interval": SAVE_INTERVAL,
        **budget.flags,
        **variant.flags,
    }
    keys = merge(merge(read_keys(budget.config), {"eval": {"episodes": budget.eval_episodes}}), variant.keys)
    return json.loads(json.dumps({"keys": keys, "flags": flags, "warm": {**budget.warm, **variant.warm}}))


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make sure that a folder never mixes runs with different settings."""
    path = folder / "settings.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found != settings:
            part = next(key for key in settings if found.get(key) != settings[key])
            raise ConfigError(
                f"{folder} holds a run with other {part}: {found.get(part)} instead of {settings[part]}; "
                "choose another --out, or delete the folder"
            )
        return
    write_text(path, json.dumps(settings, indent=1))


def _rewind(rows: Path, checkpoints: Path, updates: int) -> bool:
    """Drop the rows after an interrupted run's last checkpoint; returns whether there is a checkpoint to resume."""
    latest = checkpoints / "latest.json"
    saved = json.loads(latest.read_text(encoding="utf-8"))["rollout_id"] + 1 if latest.exists() else -1
    if saved >= updates:
        # All updates are done, but perhaps not the last evaluation, which a resumed run would skip. Start again.
        shutil.rmtree(checkpoints)
        saved = -1
    kept = [row for row in read_rows(rows) if row["update"] <= saved]
    write_text(rows, "".join(json.dumps(row) + "\n" for row in kept))
    return saved >= 0


def _policy(config: Path, seed: int, policies: Path, settings: Mapping[str, Any]) -> Path:
    """The initial policy for this seed; variants with the same prompts and the same warm start share it."""
    from embedded.warmstart.imitation import WarmStart, make_policy
    from rollout.bridge.settings import load_settings

    keys, warm = settings["keys"], settings["warm"]
    # Rewards do not affect demonstrations.
    env = {key: value for key, value in keys.get("env", {}).items() if key not in ("binary_reward", "shaping")}
    shown = {key: keys.get(key) for key in ("rollout_interaction_env_path", "tasks", "history", "memory", "max_turns")}
    name = hashlib.sha256(json.dumps([env, shown, warm, seed], sort_keys=True).encode()).hexdigest()[:12]
    folder = policies / f"{name}-seed_{seed}"
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


def run_study(name: str, seeds: list[int], out: Path, budget: Budget, only: list[str] | None = None) -> str:
    """Run what is left of a study, then write its report; returns the table.

    Raises:
        ConfigError: the study or a variant is unknown, or a run's settings are rejected.
    """
    from embedded.studies.report import write_report

    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}; choose one of {', '.join(STUDIES)}")
    variants = {variant.name: variant for variant in STUDIES[name].variants}
    unknown = sorted(set(only or ()) - set(variants))
    if unknown:
        raise ConfigError(f"{name} has no variant {unknown[0]!r}; choose from {', '.join(variants)}")
    chosen = [variants[key] for key in (only or variants)]
    policies = out / "policies"
    policies.mkdir(parents=True, exist_ok=True)
    # Seeds are the outer loop, so that an interrupted study has complete comparisons for its first seeds.
    for seed in seeds:
        for variant in chosen:
            print(f"{name}: {variant.name}, seed {seed}", flush=True)
            run_one(variant, seed, out / name / variant.name / f"seed_{seed}", policies, budget)
    return write_report(out / name, STUDIES[name])


@command()
def main(argv: list[str] | None = None) -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", help="run only these variants")
    for key in ("config", "updates", "eval_episodes", "eval_interval"):
        field = Budget.model_fields[key]
        flag = "--" + key.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=field.description)
    parser.add_argument("--out", type=Path, default=Path("outputs/ablations"))
    given = parser.parse_args(argv)
    from embedded.quickstart import set_up_process

    set_up_process()
    shared = {key: getattr(given, key) for key in ("config", "updates", "eval_episodes", "eval_interval")}
    print(run_study(given.study, given.seeds, given.out, read_settings(Budget, shared), given.variants))


if __name__ == "__main__":
    main()
