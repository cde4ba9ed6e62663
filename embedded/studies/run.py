"""Ablations on this machine: every variant of a study over several seeds, resumable; then table, plot and raw CSV.

    python -m embedded.studies.run dual_discount                 outputs/ablations/dual_discount/, seeds 0 1 2
    python -m embedded.studies.run memory --seeds 0 1 2 3 4 --updates 90

A run that is finished is not run again, an interrupted one goes on from its last checkpoint; variants whose warm
start is the same start from the same policy, seed by seed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from embedded.studies.definitions import STUDIES, Variant
from rollout.errors import ConfigError, SlimeVerlogError

CONFIG = "custom_configs/quickstart.yaml"
SAVE_INTERVAL = 10


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every run of a study shares; `flags` and `warm` lie under those of the variants."""

    config: str = CONFIG
    updates: int = 60
    eval_episodes: int = 128
    eval_interval: int = 20
    flags: Mapping[str, Any] | None = None
    warm: Mapping[str, Any] | None = None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mappings inside merged alike."""
    both = {key: merge(below[key], value) for key, value in above.items() if _nested(below.get(key), value)}
    return {**below, **above, **both}


def _nested(a: Any, b: Any) -> bool:
    return isinstance(a, Mapping) and isinstance(b, Mapping)


class RowTracker:
    """A `Tracker` of `embedded.train` that appends every number of a run to one file, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.turns = sum(row.get("rollout/turns", 0.0) for row in read_rows(path))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """One update is done."""
        self.turns += metrics.get("rollout/turns", 0.0)
        self._write({"update": rollout_id + 1, "turns": self.turns, **metrics})

    def evaluation(self, rollout_id: int, result: Any) -> None:
        """The held-out episodes were played after `rollout_id` updates."""
        episodes = [sample for group in result.data.values() for sample in group["samples"]]
        mean = lambda values: sum(values) / len(episodes)
        facts = {
            "eval/success": mean(s.metadata["success"] for s in episodes),
            "eval/return": mean(s.reward or 0.0 for s in episodes),
            "eval/turns": mean(s.metadata["turns"] for s in episodes),
            "eval/episodes": float(len(episodes)),
        }
        self._write({"update": rollout_id, "turns": self.turns, **facts})

    def _write(self, row: Mapping[str, float]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows that a run has written so far, in order."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_one(variant: Variant, seed: int, folder: Path, policies: Path, budget: Budget) -> None:
    """One variant with one seed; leaves `rows.jsonl`, and `done.json` last.

    Raises:
        ConfigError: the folder holds a run of other settings, or the YAML or the flags are refused.
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
    _replace(folder / "done.json", json.dumps({"updates": args.num_rollout, "turns": tracker.turns}))
    shutil.rmtree(checkpoints, ignore_errors=True)


def _settings(variant: Variant, seed: int, budget: Budget) -> dict[str, Any]:
    """Everything that decides a run, as plain data."""
    shared = yaml.safe_load(Path(budget.config).read_text(encoding="utf-8"))
    flags = {
        "rollout_seed": seed,
        "num_rollout": max(1, round(budget.updates * variant.share)),
        "eval_interval": budget.eval_interval,
        "save_interval": SAVE_INTERVAL,
        **(budget.flags or {}),
        **variant.flags,
    }
    keys = merge(merge(shared, {"eval": {"episodes": budget.eval_episodes}}), variant.keys)
    return json.loads(json.dumps({"keys": keys, "flags": flags, "warm": {**(budget.warm or {}), **variant.warm}}))


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Never mix two settings in one folder."""
    path = folder / "settings.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found != settings:
            part = next(key for key in settings if found.get(key) != settings[key])
            raise ConfigError(
                f"{folder} holds a run with other {part}: {found.get(part)} and not {settings[part]}; "
                "give another --out, or delete the folder"
            )
        return
    _replace(path, json.dumps(settings, indent=1))


def _rewind(rows: Path, checkpoints: Path, updates: int) -> bool:
    """Drop what an interrupted run wrote after its last checkpoint; returns whether there is one to go on from."""
    latest = checkpoints / "latest.json"
    saved = json.loads(latest.read_text(encoding="utf-8"))["rollout_id"] + 1 if latest.exists() else -1
    if saved >= updates:
        # All updates are done, but perhaps not the evaluation after them, which a resumed run does not make up for.
        shutil.rmtree(checkpoints)
        saved = -1
    kept = [row for row in read_rows(rows) if row["update"] <= saved]
    _replace(rows, "".join(json.dumps(row) + "\n" for row in kept))
    return saved >= 0


def _policy(config: Path, seed: int, policies: Path, settings: Mapping[str, Any]) -> Path:
    """The warm-started policy for this seed; made once for all variants whose prompts and warm start agree."""
    from embedded.warmstart.imitation import WarmStart, make_policy
    from embedded.warmstart.policy import PolicySize
    from rollout.bridge.settings import load_settings

    keys, warm = settings["keys"], dict(settings["warm"])
    # What is paid changes nothing about what is demonstrated.
    env = {key: value for key, value in keys.get("env", {}).items() if key not in ("binary_reward", "shaping")}
    shown = {key: keys.get(key) for key in ("rollout_interaction_env_path", "tasks", "history", "memory", "max_turns")}
    name = hashlib.sha256(json.dumps([env, shown, warm, seed], sort_keys=True).encode()).hexdigest()[:12]
    folder = policies / f"{name}-seed_{seed}"
    if not folder.is_dir():
        temporary = policies / f".{folder.name}.{os.getpid()}"
        size = {"size": PolicySize(**warm.pop("size"))} if "size" in warm else {}
        demonstrated = load_settings(argparse.Namespace(custom_config_path=str(config)))
        make_policy(demonstrated, temporary, WarmStart(**warm, **size), seed)
        try:
            temporary.rename(folder)
        except OSError:  # another process, with another variant, was first
            if not folder.is_dir():
                raise
            shutil.rmtree(temporary)
    return folder


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run_study(name: str, seeds: list[int], out: Path, budget: Budget, only: list[str] | None = None) -> str:
    """All runs of a study that are not done yet, then its report; returns the table.

    Raises:
        ConfigError: an unknown study or variant, or a run's settings are refused.
    """
    from embedded.studies.report import write_report

    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; there are {', '.join(STUDIES)}")
    variants = {variant.name: variant for variant in STUDIES[name].variants}
    unknown = sorted(set(only or ()) - set(variants))
    if unknown:
        raise ConfigError(f"{name} has no variant {unknown[0]!r}; it has {', '.join(variants)}")
    chosen = [variants[key] for key in (only or variants)]
    policies = out / "policies"
    policies.mkdir(parents=True, exist_ok=True)
    # Seeds outside: an interrupted study then has complete comparisons for the first seeds.
    for seed in seeds:
        for variant in chosen:
            print(f"{name}: {variant.name}, seed {seed}", flush=True)
            run_one(variant, seed, out / name / variant.name / f"seed_{seed}", policies, budget)
    return write_report(out / name, STUDIES[name])


def main(argv: list[str] | None = None) -> None:
    """Run one study from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", help="only these")
    parser.add_argument("--updates", type=int, default=60, help="updates a run, critic warm-up included")
    parser.add_argument("--eval-episodes", type=int, default=128, help="held-out seeds a task")
    parser.add_argument("--eval-interval", type=int, default=20, help="updates between two evaluations")
    parser.add_argument("--config", default=CONFIG, help="the YAML that the variants change")
    parser.add_argument("--out", type=Path, default=Path("outputs/ablations"))
    given = parser.parse_args(argv)
    from embedded.quickstart import quiet

    quiet()
    budget = Budget(
        config=given.config,
        updates=given.updates,
        eval_episodes=given.eval_episodes,
        eval_interval=given.eval_interval,
    )
    try:
        print(run_study(given.study, given.seeds, given.out, budget, given.variants))
    except SlimeVerlogError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
