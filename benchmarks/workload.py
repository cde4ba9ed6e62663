"""The rollouts' work: a text game whose prompts have about 1,400 tokens, and the tokens that answers are made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import COUNTING

RULES = Path(__file__).with_name("rules.j2")
WORDS = (
    "wall door key ball box red green blue grey step left right forward and the of at now next then see go turn carry "
    "open room before after because near far behind toward path closed first second again still goal"
)
ENDS = (".\nACTION: left", ".\nACTION: right")


MEAN_EPISODE = 16
"""Turns of an episode on average."""


def episode_length(seed: int) -> int:
    """Turns of an episode: log-normal, `MEAN_EPISODE` on average, at most 64. An assumption, for short games."""
    return min(64, max(2, round(random.Random(seed).lognormvariate(2.59, 0.6))))


def env_settings() -> dict[str, Any]:
    """The YAML's environment part: the tests' counting game with long rules and long observations."""
    options = {"length_of": "benchmarks.workload.episode_length", "prompt_template": str(RULES), "show": 1000}
    return {"rollout_interaction_env_path": COUNTING, "tasks": ["count"], "env": options}


def save_tokenizer(folder: Path) -> None:
    """The project's own small tokenizer, for machines that cannot get Qwen's."""
    chatml_tokenizer().save_pretrained(folder)


def save_vocabulary(checkpoint: Path, path: Path) -> None:
    """Write the tokens of answers for `benchmarks.engine_server`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    words = [(ids[0], f" {word}") for word in WORDS.split() if len(ids := encode(f" {word}")) == 1]
    ends = [([*encode(end), tokenizer.eos_token_id], end + tokenizer.eos_token) for end in ENDS]
    begin = encode("THINK:"), "THINK:"
    path.write_text(json.dumps({"begin": begin, "words": words, "ends": ends}), encoding="utf-8")
