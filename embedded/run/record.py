"""What a run writes down: every number as JSON lines, one row per update and per evaluation, and a sample of its turns.

A line of `training.jsonl` is one episode's part of a batch, with what the trainer computed for its tokens, for
`slime-verlog view`, in the form of `episodes.jsonl`. `credit` holds the numbers from which a reader can follow an
advantage back to rewards and values. A turn of the quickstart costs about 2 kB.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from advantage.gae import discounts_of, token_lambdas
from advantage.settings import AdvantageSettings
from advantage.turn_table import TurnKind, TurnRow, TurnSpan
from embedded.run.folder import append_text, whole_lines
from rollout.bridge.framework import Sample
from rollout.bridge.sample import facts_of, flatten, row_of
from rollout.play.metrics import mean
from rollout.turn import StopReason

Row = dict[str, float]
TURNS = 16
"""Turns per update; an episode's part of a batch is recorded as a whole, up to its last `LONGEST` turns."""
LONGEST = 64
_PER_TOKEN = ("log_probs", "kl", "values", "advantages", "returns")
_NO_ROW = TurnRow(0, 0, TurnKind.BOOTSTRAP)
PLAYER = "training"
"""What the records name as the player of training episodes."""


class MetricsLog:
    """A `Tracker` of `embedded.train` that appends rows to a file.

    Each row begins with `update`, `turns` and `seconds`: updates and trained turns so far, and the wall time that
    they took, without evaluations and checkpoints. A resumed run continues these counts.
    """

    def __init__(self, path: Path, turns_before: float = 0.0) -> None:
        self.path, rows = path, read_rows(path)
        self.turns = turns_before + sum(row.get("rollout/turns", 0.0) for row in rows)
        self.seconds = sum(map(update_seconds, rows))

    def update(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one update."""
        self.turns += metrics.get("rollout/turns", 0.0)
        self.seconds += update_seconds(metrics)
        self._write(rollout_id + 1, metrics)

    def evaluation(self, rollout_id: int, result: Any, weights: Any = None) -> Row:
        """Append and return the means over the held-out episodes, also by task if there are several."""
        means = evaluation_means(held_out(result))
        for task, group in result.data.items() if len(result.data) > 1 else ():
            means[f"eval/{task}/success"] = mean(facts_of(sample)["success"] for sample in group["samples"])
        self._write(rollout_id, means)
        return means

    def _write(self, update: int, metrics: Mapping[str, float]) -> None:
        row = {"update": update, "turns": self.turns, "seconds": self.seconds, **metrics}
        append_text(self.path, json.dumps(row) + "\n")


def update_seconds(metrics: Mapping[str, float]) -> float:
    """Add up the wall time of one update: waiting for its batch, training, and loading the weights into the engine."""
    return metrics.get("perf/rollout_s", 0.0) + metrics.get("perf/train_s", 0.0)


def held_out(result: Any) -> list[dict[str, Any]]:
    """Return the facts of each held-out episode of an evaluation."""
    return [dict(facts_of(sample)) for group in result.data.values() for sample in group["samples"]]


def evaluation_means(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the means over all episodes, whatever their task."""
    measures = ("success", "return", "progression", "turns")
    means = {f"eval/{key}": mean(facts[key] for facts in episodes) for key in measures}
    return {**means, "eval/episodes": float(len(episodes))}


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
    if not any(row.get("actor/pg_loss") for row in trained):
        return f"the actor learned nothing from rewards: every advantage was 0 in all {len(trained)} updates"
    return None


def reward_note(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Warn if no response was valid, or if two or more batches all paid the same mean reward; None otherwise."""
    valid = [row["turn/valid_action_ratio"] for row in rows if "turn/valid_action_ratio" in row]
    if valid and not any(valid):
        return "no answer was valid, so rewards taught nothing; the policy must imitate longer, or from more episodes"
    rewards = [row["turn/reward"] for row in rows if "turn/reward" in row]
    if len(rewards) < 2 or len(set(rewards)) > 1:
        return None
    same = f"every batch paid the same mean reward, {rewards[0]:g} per turn, so there was nothing to learn from"
    return f"{same}; look at the episodes, and reward progress (a success by chance is needed at least now and then)"


class TrainingRecord:
    """Appends to `path`: an episode that is followed through the batches, then parts with rewards, then others."""

    def __init__(self, path: Path, tokenizer: Any, settings: AdvantageSettings, kl_coef: float) -> None:
        self.path, self._tokenizer, self._settings, self._kl_coef = path, tokenizer, settings, kl_coef
        self._followed: Any = None

    def add(self, rollout_id: int, samples: Sequence[Any], role: str, data: Mapping[str, Any]) -> None:
        """Record some of one update's turns: `samples`, the batch as the rollout function returned it.

        `role` is `actor`, or `critic` while the actor is frozen; `data` has the numbers that it trained on, as
        `PpoTrainer.trained`.
        """
        flat = flatten(samples)
        segments: dict[int, list[int]] = {}
        for place, row in enumerate(map(row_of, flat)):
            if row is not None:
                segments.setdefault(row.segment, []).append(place)
        episode = lambda places: facts_of(flat[places[0]]).get("episode_id")
        is_paid = lambda places: any(span.reward for i in places for span in (row_of(flat[i]) or _NO_ROW).turns)
        order = lambda places: 0 if episode(places) == self._followed else 1 if is_paid(places) else 2
        left, lines, cut = TURNS, [], []
        for places in sorted(segments.values(), key=order):
            if left <= 0:
                break
            record = self._segment([(flat[i], i) for i in places], data, role)
            if record is None:
                continue
            left -= record["turns"]
            cut += [episode(places)] if record["stop"] == StopReason.CUT else []
            lines.append(json.dumps({"setting": f"update {rollout_id + 1}", "update": rollout_id + 1, **record}))
        self._followed = cut[0] if cut else None
        append_text(self.path, "".join(line + "\n" for line in lines))

    def _segment(self, samples: Sequence[tuple[Sample, int]], data: Mapping[str, Any], role: str) -> Any:
        turns: list[dict[str, Any]] = []
        first, facts, row, next_value = 0, {}, None, None
        for sample, place in samples:
            found = row_of(sample)
            assert found is not None
            if found.kind is TurnKind.BOOTSTRAP:
                next_value = round(float(data["values"][place][0]), 5) if "values" in data else None
                continue
            first, facts, row = first or found.first_turn + 1, facts_of(sample), found
            spans = list(enumerate(found.turns))
            turns += [self._turn(sample, place, span, data, role, k == len(spans) - 1) for k, span in spans]
        if row is None:
            return None
        kept, discounts = turns[-LONGEST:], discounts_of(self._settings, role)
        first += len(turns) - len(kept)
        ended = StopReason.TIME_LIMIT if row.truncated else StopReason.CUT
        stop = StopReason.TERMINATED if row.terminated else ended
        names = ("gamma_step", "lambda_step", "gamma_token", "lambda_token")
        credit = {"role": role, "form": self._settings.gae_form, "kl_coef": self._kl_coef if role == "actor" else 0.0}
        return {
            **{"player": PLAYER, "task_name": facts.get("task_name"), "stop": stop},
            "seed": f"episode {facts.get('episode_id')}, turns {first}–{first + len(kept) - 1}",
            "turns": len(kept),
            "return": sum(turn["reward"] for turn in kept),
            "success": facts.get("progression", 0.0) >= 1.0 if row.terminated else None,
            "progression": facts.get("progression"),
            "metrics": facts.get("env_metrics") or {},
            "messages": [],
            "story": kept,
            "credit": credit | {name: getattr(discounts, name) for name in names} | {"next_value": next_value},
        }

    def _turn(
        self, sample: Sample, place: int, span: TurnSpan, data: Mapping[str, Any], role: str, is_last: bool
    ) -> dict[str, Any]:
        ids, length = data["tokens"][place].tolist(), int(data["response_lengths"][place])
        start = len(ids) - length
        own = ids[start + span.start : start + span.end]
        facts = facts_of(sample) if is_last else {}
        columns = {
            key: [float(f"{x:.4g}") for x in data[key][place][span.start : span.end].tolist()]
            for key in (*_PER_TOKEN, *(() if "log_probs" in data else ("rollout_log_probs",)))
            if key in data and (key != "kl" or self._kl_coef)
        }
        mask = data["loss_masks"][place][span.start : span.end]
        if not bool(mask.all()):
            columns["loss_mask"] = mask.tolist()
        lambdas = token_lambdas(self._settings, role, (mask.sum() or mask.new_tensor(len(mask))).reshape(1))
        return {
            "prompt": self._tokenizer.decode(ids[: start + span.start]),
            "response": self._tokenizer.decode(own, skip_special_tokens=True),
            "executed_action": facts.get("executed_action"),
            "valid": facts.get("valid_action"),
            "reward": span.reward,
            "terminated": is_last and bool(facts.get("terminated")),
            "truncated": is_last and bool(facts.get("truncated")),
            "tokens": {"text": [self._tokenizer.decode([i]) for i in own], **columns},
            **({} if lambdas is None else {"lambda_token": round(float(lambdas[0]), 6)}),
            **{key: facts[key] for key in ("notes", "summary") if key in facts},
            **({} if span.moves else {"moves": False}),
        }
