"""Writes scripted play as a data set for slime's supervised training (`slime.rollout.sft_rollout`),
one row per turn.

    python -m inspection.demonstrations --config custom_configs/babyai.yaml --episodes 60 \\
        --out demonstrations.jsonl

The environment's module must have `expert_action(env)`; if it also has `explain_action(env)`, that
writes the thoughts. A row's `messages` are the prompt of a rollout at that turn, followed by the
expert's answer, even if `--random-share` made another action play. Only this answer is trained on:
`step_loss_mask` is 0 on the answers shown as memory, which have their own rows.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from embedded.warmstart.demonstrations import Demonstration, demonstrate, think
from envs.loading import checked_text
from inspection.records import Record, write_jsonl
from inspection.target import check_free, finite
from inspection.text import HelpFormatter
from rollout.bridge.settings import load_settings
from rollout.play.notes import asks_for_notes
from rollout.tasks import try_each_task
from slime_verlog import ConfigError, command


def explain(env: Any, observation: str, action: str) -> str:
    """Return the thought before the expert's action.

    It comes from `explain_action(env)` of the environment's module, if that exists. Otherwise it
    says where the mission's object is, if it is visible, and what the action does, if the
    environment describes its actions.
    """
    own = getattr(sys.modules.get(type(env).__module__), "explain_action", None)
    if own is not None:
        return checked_text(own(env), own)
    mission = env.mission.strip().rstrip(".")
    seen = think(mission, observation) if mission else ""
    effect = env.actions.get(action) if isinstance(env.actions, Mapping) else None
    parts = [
        f"I see {seen}." if seen and not seen.startswith("no ") else "",
        f"Next: {effect or action}.",
    ]
    return " ".join(part for part in parts if part)


def to_row(turn: Demonstration) -> Record:
    """Return one turn as a row, `messages` and `metadata`."""
    shown = [{"role": m["role"], "content": m["content"]} for m in turn.messages]
    shown = [
        {**message, "step_loss_mask": int(message["role"] != "assistant")} for message in shown
    ]
    answer = {"role": "assistant", "content": turn.response, "step_loss_mask": 1}
    metadata = {
        "task": turn.task,
        "seed": turn.seed,
        "turn": turn.turn,
        "progression": float(turn.progression),
    }
    metadata["notes"] = asks_for_notes(turn.messages)
    return {"messages": [*shown, answer], "metadata": metadata}


def write_rows(rows: Sequence[Record], path: Path) -> None:
    """Write the rows as `.jsonl`; raises ConfigError for another suffix or no rows."""
    if not rows:
        raise ConfigError(
            "no demonstration is left to write; lower --min-progression or raise --episodes"
        )
    if path.suffix != ".jsonl":
        raise ConfigError(f"--out must end in .jsonl, got {path}")
    write_jsonl(rows, path)


@command()
def main(arguments: Sequence[str] | None = None) -> None:
    """Play episodes, keep those with enough progression, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--config", required=True, help="custom YAML, as for --custom-config-path")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="selects episodes; never those of training or evaluation",
    )
    parser.add_argument(
        "--random-share",
        type=finite,
        default=0.0,
        help="of random moves, which are never trained on",
    )
    parser.add_argument(
        "--min-progression",
        type=finite,
        default=0.0,
        help="leave out episodes with less progression",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file in --out if it exists"
    )
    given = parser.parse_args(arguments)
    check_free(given.out, given.overwrite)
    config = load_settings(SimpleNamespace(custom_config_path=given.config))
    try_each_task(config)
    turns = demonstrate(
        config, given.episodes, given.random_share, given.seed, explain, expert_answers=True
    )
    kept = [turn for turn in turns if turn.progression >= given.min_progression]
    write_rows([to_row(turn) for turn in kept], given.out)
    ends = {(turn.task, turn.seed): turn.progression for turn in turns}.values()
    won = sum(end >= 1.0 for end in ends)
    mean = sum(ends) / len(ends)
    result = f"{won} won, mean progression {mean:.2f}"
    print(
        f"{len(kept)} of {len(turns)} turns from {len(ends)} episodes ({result}) written to "
        f"{given.out}"
    )


if __name__ == "__main__":
    main()
