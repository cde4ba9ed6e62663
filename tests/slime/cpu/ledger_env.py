"""A game that keeps a ledger: every payment goes to a file of its own, past everything that is
under test.

`env: {ledger: FOLDER, longest: 9}`. Any answer is an action; what it pays follows from the seed,
the turn and the answer, or is always the same with `steady: true`. An episode of seed s ends by
itself or, for every third seed, by its time limit. With `slow: {seed: S, until: FILE, at_most_s:
T}`, the first step of seed S waits until the file exists.
"""

import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.base import BaseInteractionEnv, Observation, StepInfo, describe_task, make_observation


class LedgerGame(BaseInteractionEnv):
    """Pays a reward in sixteenths, so that float32 keeps it exactly."""

    instruction_prompt = "go on and on"
    actions = ()
    default_action = "wait"

    def __init__(
        self,
        seed: int,
        ledger: Path,
        longest: int,
        steady: bool = False,
        slow: Mapping[str, Any] | None = None,
    ) -> None:
        self.seed = seed
        self.ledger = ledger
        self.steady = steady
        self.slow = slow if slow is not None and slow["seed"] == seed else None
        draw = random.Random(seed)
        self.length = draw.randint(1, longest)
        self.times_out = draw.random() < 0.34
        self.mission = f"last {self.length} turns"
        self.turn = 0

    def reset(self) -> Observation:
        self.turn = 0
        return self._observe()

    def step(self, response_text: str) -> tuple[Observation, bool, StepInfo]:
        if self.slow is not None and self.turn == 0:
            _wait_for(Path(self.slow["until"]), self.slow["at_most_s"])
        draw = random.Random(f"{self.seed}/{self.turn}/{response_text}")
        valid = draw.random() < 0.7
        reward = draw.randint(-16, 16) / 16 if valid else -0.125
        reward = 0.25 if self.steady else reward
        self.turn += 1
        over = self.turn >= self.length
        info: StepInfo = {
            "reward": reward,
            "terminated": over and not self.times_out,
            "truncated": over and self.times_out,
            "valid_action": valid,
            "executed_action": response_text[:8] if valid else self.default_action,
            "progression": self.turn / self.length,
            "action": response_text[:8] if valid else None,
            "action_span": (0, min(8, len(response_text))) if valid and response_text else None,
        }
        self._write(reward, info, response_text)
        return self._observe(), over, info

    def _observe(self) -> Observation:
        return make_observation(
            f"seed {self.seed} turn {self.turn}", f"left {self.length - self.turn}"
        )

    def _write(self, reward: float, info: StepInfo, text: str) -> None:
        line = {
            "seed": self.seed,
            "turn": self.turn - 1,
            "reward": reward,
            "terminated": info["terminated"],
            "truncated": info["truncated"],
            "text": text,
        }
        with open(self.ledger / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_ledger(folder: Path) -> dict[tuple[int, int, str], dict[str, Any]]:
    """The payments, by seed, turn and answer."""
    files = [path.read_text().splitlines() for path in folder.glob("*.jsonl")]
    lines = [json.loads(line) for file in files for line in file]
    return {(line["seed"], line["turn"], line["text"]): line for line in lines}


def _wait_for(path: Path, at_most_s: float) -> None:
    deadline = time.monotonic() + at_most_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def build_env(sample: Any, args: Any) -> LedgerGame:
    _, seed = describe_task(sample)
    options = args.env
    ledger = Path(options["ledger"])
    ledger.mkdir(parents=True, exist_ok=True)
    longest, steady = int(options.get("longest", 9)), bool(options.get("steady"))
    return LedgerGame(seed, ledger, longest, steady, options.get("slow"))
