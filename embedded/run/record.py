"""What a run writes down: every number as JSON lines, one row per update and per evaluation, and a
sample of its turns.

A line of `training.jsonl` is one episode's part of a batch, with what the trainer computed for its
tokens, for `slime-verlog view`, in the form of `episodes.jsonl`. `credit` holds the numbers from
which a reader can follow an advantage back to rewards and values. A turn of the quickstart costs
about 2 kB.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from advantage.gae import discounts_of
from advantage.settings import AdvantageSettings
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from embedded.run.ending import played
from embedded.run.folder import append_text, whole_lines
from rollout.batches.metrics import mean
from rollout.bridge.framework import Sample
from rollout.bridge.sample import facts_of, facts_of_turns, flatten, places_in_train_data, row_of
from rollout.turn import StopReason

Row = dict[str, float]
TURNS = 16
"""Turns per update; an episode's part of a batch is recorded as a whole, up to its last `LONGEST`
turns."""
LONGEST = 64
_PER_TOKEN = ("log_probs", "rollout_log_probs", "kl", "values", "advantages", "returns")
_READ = (*_PER_TOKEN, "tokens", "response_lengths", "loss_masks")
PLAYER = "training"
"""What the records name as the player of training episodes."""


class MetricsLog:
    """A `Tracker` of `embedded.train` that appends rows to a file.

    Each row begins with `update`, `turns` and `seconds`: updates and trained turns so far, and the
    wall time that they took, without evaluations and checkpoints. A resumed run continues these
    counts.
    """

    def __init__(self, path: Path, turns_before: float = 0.0) -> None:
        self.path = path
        rows = read_rows(path)
        self.turns = turns_before + sum(row.get("rollout/turns", 0.0) for row in rows)
        self.seconds = sum(map(update_seconds, rows))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one update."""
        self.turns += metrics.get("rollout/turns", 0.0)
        self.seconds += update_seconds(metrics)
        self._write(rollout_id + 1, metrics)

    def evaluation(self, rollout_id: int, result: Any, weights: Any = None) -> Row:
        """Append the means over the held-out episodes, of each task and of all, and return them."""
        means = {**result.metrics, **evaluation_means(held_out(result))}
        self._write(rollout_id, means)
        return means

    def _write(self, update: int, metrics: Mapping[str, float]) -> None:
        row = {"update": update, "turns": self.turns, "seconds": self.seconds, **metrics}
        append_text(self.path, json.dumps(row) + "\n")


def update_seconds(metrics: Mapping[str, float]) -> float:
    """Add up the wall time of one update: waiting for its batch, training, and loading the weights
    into the engine."""
    return metrics.get("perf/rollout_s", 0.0) + metrics.get("perf/train_s", 0.0)


def held_out(result: Any) -> list[dict[str, Any]]:
    """Return the facts of each held-out episode of an evaluation."""
    return [dict(facts_of(sample)) for group in result.data.values() for sample in group["samples"]]


def evaluation_means(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the means over all episodes that were played, whatever their task."""
    found = played(episodes)
    measures = ("success", "return", "progression", "turns")
    means = {f"eval/{key}": mean(facts[key] for facts in found) for key in measures}
    return {**means, "eval/episodes": float(len(found))}


def read_rows(path: Path) -> list[Row]:
    """Read the rows that a run has written so far; none without a file."""
    return [json.loads(line) for line in whole_lines(path)]


def actor_fault(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Say why the updates in `rows` taught the actor nothing; None if they did."""
    updates = [row for row in rows if "train/actor_trains" in row]
    trained = [row for row in updates if row["train/actor_trains"]]
    norms = [row.get("actor/grad_norm", 0.0) for row in trained]
    if not trained:
        never = f"the actor never trained: only the critic did, in all {len(updates)} updates"
        return f"{never}; raise the number of updates above num_critic_only_steps"
    if not all(math.isfinite(norm) for norm in norms):
        return "the actor's gradient was not finite (see actor/grad_norm); lower lr"
    if not any(norms):
        return f"the actor never changed: its gradient was 0 in all {len(trained)} updates that trained it"
    if not any(row.get("actor/advantage_abs", 1.0) for row in trained):
        return f"the actor learned nothing from rewards: every advantage was 0 in all {len(trained)} updates"
    return None


def reward_note(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Warn if no response was valid, or if two or more batches all paid the same mean reward; None
    otherwise."""
    valid = [row["turn/valid_action_ratio"] for row in rows if "turn/valid_action_ratio" in row]
    if valid and not any(valid):
        return "no answer was valid, so rewards taught nothing; the policy must imitate longer, or from more episodes"
    rewards = [row["turn/reward"] for row in rows if "turn/reward" in row]
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return None
    same = f"every batch paid the same mean reward, {rewards[0]:g} per turn, so there was nothing to learn from"
    return f"{same}; look at the episodes, and reward progress (a success by chance is needed at least now and then)"


@dataclass(frozen=True)
class _Recorded:
    """One sample of a batch with its row of the turn table and its numbers."""

    sample: Sample
    row: TurnRow
    numbers: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        return facts_of(self.sample)

    @property
    def is_played(self) -> bool:
        return self.row.kind is not TurnKind.BOOTSTRAP


class TrainingRecord:
    """Appends to `path`: an episode that is followed through the batches, then parts with rewards,
    then others."""

    def __init__(
        self, path: Path, tokenizer: Any, settings: AdvantageSettings, kl_coef: float
    ) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._settings = settings
        self._kl_coef = kl_coef
        self._followed: Any = None

    def add(
        self, rollout_id: int, samples: Sequence[Any], role: str, data: Mapping[str, Any]
    ) -> None:
        """Record some of one update's turns: `samples`, the batch as the rollout function returned
        it.

        `role` is `actor`, or `critic` while the actor is frozen; `data` has the numbers that it
        trained on, as `PpoTrainer.trained`.
        """
        segments: dict[int, list[_Recorded]] = {}
        flat = flatten(samples)
        for place, sample in zip(places_in_train_data(flat), flat, strict=True):
            row = row_of(sample)
            if row is not None:
                numbers = {key: values[place] for key, values in data.items() if key in _READ}
                segments.setdefault(row.segment, []).append(_Recorded(sample, row, numbers))
        update = rollout_id + 1
        left = TURNS
        followed = None
        for segment in sorted(segments.values(), key=self._order):
            if left > 0 and any(part.is_played for part in segment):
                record = self._segment(segment, role)
                left -= record["turns"]
                if followed is None and record["stop"] == StopReason.CUT:
                    followed = segment[0].facts.get("episode_id")
                line = json.dumps({"setting": f"update {update}", "update": update, **record})
                append_text(self.path, line + "\n")
        self._followed = followed

    def _order(self, segment: Sequence[_Recorded]) -> int:
        if segment[0].facts.get("episode_id") == self._followed:
            return 0
        rewards = [span.reward for part in segment for span in part.row.turns]
        return 1 if any(rewards) else 2

    def _segment(self, segment: Sequence[_Recorded], role: str) -> dict[str, Any]:
        turns: dict[int, dict[str, Any]] = {}
        next_value = None
        for part in segment:
            state = part.row.bootstrap if part.is_played else 0
            if state >= 0 and "values" in part.numbers:
                next_value = round(float(part.numbers["values"][state]), 5)
            if part.is_played:
                facts_of_each = facts_of_turns(part.sample)
                for index, span, facts in zip(
                    part.row.indices, part.row.turns, facts_of_each, strict=True
                ):
                    turns[index] = self._turn(part, span, facts, role)
        played = [part for part in segment if part.is_played]
        final = max(played, key=lambda part: part.row.indices[-1])
        facts = final.facts
        row = final.row
        kept = [turns[index] for index in sorted(turns)][-LONGEST:]
        last = max(turns) + 1
        ended = StopReason.TIME_LIMIT if row.truncated else StopReason.CUT
        return {
            "player": PLAYER,
            "task_name": facts.get("task_name"),
            "stop": StopReason.TERMINATED if row.terminated else ended,
            "seed": f"episode {facts.get('episode_id')}, turns {last - len(kept) + 1}–{last}",
            "turns": len(kept),
            "return": sum(turn["reward"] for turn in kept),
            "success": facts.get("progression", 0.0) >= 1.0 if row.terminated else None,
            "progression": facts.get("progression"),
            "metrics": facts.get("env_metrics") or {},
            "messages": [],
            "story": kept,
            "credit": self._credit(role, next_value),
        }

    def _credit(self, role: str, next_value: float | None) -> dict[str, Any]:
        kl_coef = self._kl_coef if role == "actor" else 0.0
        about = {
            "role": role,
            "form": self._settings.gae_form,
            "kl_coef": kl_coef,
            "next_value": next_value,
        }
        return {**about, **asdict(discounts_of(self._settings, role))}

    def _turn(
        self, part: _Recorded, span: TurnSpan, facts: Mapping[str, Any], role: str
    ) -> dict[str, Any]:
        decode = self._tokenizer.decode
        numbers = part.numbers
        ids = numbers["tokens"].tolist()
        response = len(ids) - int(numbers["response_lengths"])
        begin = response + span.start
        end = response + span.end
        own = ids[begin:end]
        place = slice(span.start, span.end)
        tokens: dict[str, Any] = {"text": [decode([token]) for token in own]}
        left_out = {"rollout_log_probs"} if "log_probs" in numbers else set()
        if not self._kl_coef:
            left_out.add("kl")
        for key in _PER_TOKEN:
            if key in numbers and key not in left_out:
                tokens[key] = [float(f"{x:.4g}") for x in numbers[key][place].tolist()]
        mask = numbers["loss_masks"][place]
        if not mask.all():
            tokens["loss_mask"] = mask.tolist()
        turn = {
            "prompt": decode(ids[:begin]),
            "response": decode(own, skip_special_tokens=True),
            "executed_action": facts.get("executed_action"),
            "valid": facts.get("valid_action"),
            "reward": span.reward,
            "terminated": bool(facts.get("terminated")),
            "truncated": bool(facts.get("truncated")),
            "tokens": tokens,
        }
        trained = mask.sum() or mask.new_tensor(len(mask))
        own_lambda = discounts_of(self._settings, role, trained.reshape(1)).lambda_token
        if not isinstance(own_lambda, float | int):
            turn["lambda_token"] = round(own_lambda.item(), 6)
        turn |= {key: facts[key] for key in ("notes", "summary") if key in facts}
        if not span.moves:
            turn["moves"] = False
        return turn
