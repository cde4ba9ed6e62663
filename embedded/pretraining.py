"""Value pretraining before PPO on one machine: the same policy collects turns, frozen, and PPO
starts from its critic.

On a cluster these are two jobs (`scripts/run_value_pretraining.sh`). Here,
`value_pretraining.batches` in the YAML asks for both.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from advantage.settings import ValuePretrainingSettings
from rollout.bridge.settings import set_key
from slime_verlog import ConfigError, read_settings

_LIMIT = "least_explained_variance"


@dataclass(frozen=True)
class Stage:
    """The YAML's keys and slime's flags of one of the two runs."""

    keys: Mapping[str, Any]
    flags: Mapping[str, Any]


def split_run(
    keys: Mapping[str, Any], flags: Mapping[str, Any], folder: Path
) -> tuple[Stage | None, Stage]:
    """Split a run into the pretraining that the YAML asks for, if any, which saves its critic in
    `folder`, and PPO.

    The pretraining plays one held-out episode, because its policy does not change.
    """
    batches = read_settings(
        ValuePretrainingSettings, keys.get("value_pretraining"), "value_pretraining."
    ).batches
    if not batches:
        return None, Stage(keys, flags)
    kept = {
        key: value
        for key, value in keys.items()
        if key not in ("value_pretraining", "critic_warmup")
    }
    asked = keys["value_pretraining"]
    once = set_key({**kept, "value_pretraining": asked}, "eval.episodes", 1)
    if _LIMIT in asked:  # PPO compares the critic's score with it again
        kept["value_pretraining"] = {_LIMIT: asked[_LIMIT]}
    own = {
        "num_rollout": batches,
        "num_critic_only_steps": batches,
        "load": None,
        "save": str(folder),
        "save_interval": None,
    }
    ppo = {"num_critic_only_steps": 0, "critic_load": str(folder)}
    return Stage(once, {**flags, **own}), Stage(kept, {**flags, **ppo})


def check_stages(stages: Iterable[Stage | None]) -> Namespace:
    """Try the settings, hooks and tasks of each stage as its first update will, and return slime's
    `args` of the last; raises ConfigError."""
    from advantage.saved_critic import keys_taken_over
    from embedded.arguments import HOOKS, build_args, embedded_flags
    from embedded.trainer.checkpoint import critic_record, is_checkpoint
    from envs.loading import load_attribute
    from rollout.bridge.checks import BATCHES, check_fixed_turn
    from rollout.data_source import EpisodeSource

    args = Namespace()
    for stage in filter(None, stages):
        args = build_args(stage.keys, **stage.flags)
        flags = embedded_flags(args)
        for name in HOOKS:
            if path := getattr(flags, name):
                load_attribute(path, name)
        settings = EpisodeSource(args).settings
        if settings.value_pretraining.batches and settings.group_estimator:
            raise ConfigError(
                "value_pretraining trains a critic, but group_estimator: "
                f"{settings.group_estimator} has none; leave one of them out"
            )
        if flags.rollout_function_path in BATCHES:
            check_fixed_turn(args, settings)
        if flags.critic_load and is_checkpoint(flags.critic_load):
            keys_taken_over(settings, critic_record(flags.critic_load), flags.critic_load)
    return args


def pretrain_critic(stage: Stage, flags: Mapping[str, Any]) -> float:
    """Run the pretraining, unless its critic is there already; returns the turns that were
    collected for it.

    `flags` are those that both runs share, among them the policy; the stage's flags win. Raises
    PretrainingError if the critic explains nothing of the held-out returns.
    """
    from embedded.arguments import make_args
    from embedded.run.record import MetricsLog, read_rows
    from embedded.train import train
    from embedded.trainer.checkpoint import is_checkpoint

    folder = Path(stage.flags["save"])
    rows = folder / "metrics.jsonl"
    if not is_checkpoint(folder):
        folder.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)
        (folder / "config.yaml").write_text(
            yaml.safe_dump(dict(stage.keys), sort_keys=False), encoding="utf-8"
        )
        train(make_args(folder / "config.yaml", **{**flags, **stage.flags}), MetricsLog(rows))
    last = [row for row in read_rows(rows) if "critic/held_out_explained_variance" in row][-1]
    explained = last["critic/held_out_explained_variance"]
    passes = last["critic/passes"]
    reached = f"held-out explained variance {explained:.2f} after {passes:.0f} passes; the critic is in {folder}/"
    print(f"value pretraining: {last['turns']:.0f} turns, {reached}", flush=True)
    return last["turns"]
