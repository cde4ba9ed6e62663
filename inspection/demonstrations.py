"""Scripted play as a data set for slime's supervised training (`slime.rollout.sft_rollout`), one row a turn.

    python -m inspection.demonstrations --config custom_configs/babyai.yaml --episodes 60 --out demonstrations.jsonl

Any environment whose module offers `expert_action(env)` can be demonstrated; `explain_action(env)` beside it writes the
thoughts. A row's `messages` are what a rollout would show at that turn, then the expert's answer, also where
`--random-share` had something else played. Only that answer is trained on: `step_loss_mask` is 0 on the
answers shown as memory (they have rows of their own), and stands on every message, because parquet would fill a
missing one with null, which slime reads as 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from embedded.warmstart.demonstrations import Demonstration, demonstrate, think
from envs.errors import MissingDependencyError
from rollout.bridge.settings import load_settings
from rollout.errors import ConfigError, SlimeVerlogError


def explain(env: Any, observation: str, action: str) -> str:
    """The thought before the expert's action: what is seen of the goal, and why this action.

    The environment's own `explain_action`, if it has one; else where the mission's object is, if it is in sight, and
    what the action does, if that is known.
    """
    own = getattr(sys.modules.get(type(env).__module__), "explain_action", None)
    if own is not None:
        return own(env)
    mission = env.mission.strip().rstrip(".")
    seen = think(mission, observation) if mission else ""
    effect = env.actions.get(action) if isinstance(env.actions, Mapping) else None
    parts = [f"I see {seen}." if seen and not seen.startswith("no ") else "", f"Next: {effect or action}."]
    return " ".join(part for part in parts if part)


def to_row(turn: Demonstration) -> dict[str, Any]:
    """One turn as a row: `messages` for `--input-key messages`, and where it comes from under `metadata`.

    Raises:
        ConfigError: a message has pictures, which this format does not carry.
    """
    if any(not isinstance(message["content"], str) for message in turn.messages):
        raise ConfigError("demonstrations carry text only; leave env.vlm out of the YAML")
    shown = [
        {"role": m["role"], "content": m["content"], "step_loss_mask": int(m["role"] != "assistant")}
        for m in turn.messages
    ]
    answer = {"role": "assistant", "content": turn.answer, "step_loss_mask": 1}
    metadata = {"task": turn.task, "seed": turn.seed, "turn": turn.turn, "progression": float(turn.progression)}
    return {"messages": [*shown, answer], "metadata": metadata}


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write `.jsonl` or `.parquet`, whichever the name says.

    Raises:
        ConfigError: another suffix, or there are no rows.
        MissingDependencyError: parquet without pyarrow.
    """
    if not rows:
        raise ConfigError("no demonstration is left to write; lower --min-progression or play more --episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    if path.suffix != ".parquet":
        raise ConfigError(f"--out must end in .jsonl or .parquet, got {path}")
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingDependencyError("parquet needs pyarrow: pip install pyarrow; or write .jsonl") from error
    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, keep what is good enough, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="custom YAML, as for --custom-config-path")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl or .parquet file")
    parser.add_argument("--seed", type=int, default=0, help="which episodes; none of them is a training or eval seed")
    parser.add_argument(
        "--random-share", type=float, default=0.0, help="share of random moves, never trained on themselves"
    )
    parser.add_argument("--min-progression", type=float, default=0.0, help="leave out episodes that came less far")
    given = parser.parse_args(arguments)
    config = load_settings(SimpleNamespace(custom_config_path=given.config))
    turns = demonstrate(config, given.episodes, given.random_share, given.seed, explain, expert_answers=True)
    kept = [turn for turn in turns if turn.progression >= given.min_progression]
    write_rows([to_row(turn) for turn in kept], given.out)
    episodes = {(turn.task, turn.seed): turn.progression for turn in turns}
    won = sum(progression >= 1.0 for progression in episodes.values())
    print(
        f"{len(kept)} of {len(turns)} turns from {len(episodes)} episodes ({won} won, mean progression "
        f"{sum(episodes.values()) / len(episodes):.2f}) written to {given.out}"
    )


if __name__ == "__main__":
    try:
        main()
    except SlimeVerlogError as error:
        sys.exit(f"error: {error}")
