"""A batch of turns: its budget and failures while it is played, its segments, its age, and batches that are reused.

While the actor is frozen, the critic's warm-up plays and keeps `w_epoch` batches, then draws `w_iter` batches from the
kept segments without generation. The advantage hook computes returns with the current critic, so the targets of kept
turns are never stale, and the frozen actor keeps them on-policy. Value pretraining keeps all its batches.
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from advantage.settings import WarmupSettings
from rollout.errors import ConfigError, EnvironmentFault, FailureBudgetError
from rollout.play.parts import Parts
from rollout.turn import Generation, Segment, StopReason

logger = logging.getLogger(__name__)

MIN_EPISODES = 10
"""Episodes that value pretraining needs to hold some out."""


@dataclass
class Batch:
    """One batch: the turns that it may still issue while it is played, then its segments in slot order."""

    segments: list[Segment] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    slots: list[Mapping[str, Any]] = field(default_factory=list)
    """The slots' state after the batch; empty unless the slots kept playing after it was cut."""
    staleness: Sequence[int] | None = None
    """Actor updates between playing and training each turn, -1 where unknown; None while the actor is frozen."""
    waited_s: float = 0.0
    """Seconds for which it had enough turns and waited for turns that would have become too old."""
    masked: int = 0
    """Turns that are too old and therefore have no loss."""
    failed: int = 0
    """Episodes whose environment was lost while the batch was played."""
    left: list[int] = field(default_factory=list)
    """Turns left to issue: one number for all slots, or one per slot (`turn_quota: per_env`)."""

    @property
    def turn_count(self) -> int:
        return count_turns(self.segments)

    def issue(self, slot: int) -> bool:
        """Take one turn from the slot's budget; False if it is used up."""
        place = slot % len(self.left)
        if self.left[place] == 0:
            return False
        self.left[place] -= 1
        return True

    def give_back(self, slot: int) -> None:
        """Return a turn that was issued and not played."""
        self.left[slot % len(self.left)] += 1

    def lose_episode(self, fault: EnvironmentFault, parts: Parts) -> None:
        """Count an episode whose environment was lost.

        Raises:
            FailureBudgetError: more episodes of this batch failed than `max_episode_failures_per_batch` allows.
        """
        self.failed += 1
        parts.counters["episodes_failed"] += 1
        budget = parts.settings.max_episode_failures_per_batch
        if self.failed > budget:
            raise FailureBudgetError(
                f"{self.failed} episodes of one batch failed; max_episode_failures_per_batch is {budget}. "
                f"Last failure:\n{fault}"
            ) from fault
        logger.warning("episode abandoned (%d of %d allowed): %s", self.failed, budget, fault)


def count_turns(segments: Sequence[Segment]) -> int:
    """The number of turns in the segments."""
    return sum(len(segment.turns) for segment in segments)


class Phase(enum.StrEnum):
    """The phase of the critic's warm-up that a rollout belongs to."""

    COLLECT = "collect"
    """Play a batch and keep it; only the critic trains."""
    DRAW = "draw"
    """Draw a batch from the kept turns; only the critic trains."""
    TRAIN = "train"
    """The warm-up is over: play a batch, train both."""


def phase_of(rollout_id: int, warmup: WarmupSettings) -> Phase:
    """The phase of a rollout."""
    if rollout_id < warmup.w_epoch:
        return Phase.COLLECT
    return Phase.DRAW if rollout_id < warmup.w_epoch + warmup.w_iter else Phase.TRAIN


def draw(kept: Sequence[Segment], fraction: float, step_turns: int, seed: int) -> list[Segment]:
    """Random kept segments holding `fraction` of the kept turns, in whole steps of `step_turns` turns.

    Segments are drawn without replacement. The last one is shortened to fill the last step exactly: its first turns
    stay, and the prompt after them becomes the bootstrap.

    Raises:
        ConfigError: less than one step was kept, for example after a restart without the rollout checkpoint.
    """
    total = count_turns(kept)
    if total < step_turns:
        raise ConfigError(
            f"the warm-up has {total} kept turns, fewer than --global-batch-size {step_turns}; resume with the "
            "rollout checkpoint of the same step, or start the warm-up again"
        )
    wanted = max(step_turns, round(fraction * total))
    wanted -= wanted % step_turns
    order = list(range(len(kept)))
    random.Random(f"warmup/{seed}").shuffle(order)
    drawn: list[Segment] = []
    left = wanted
    for number in order:
        if left == 0:
            break
        segment = shorten(kept[number], left)
        drawn.append(segment)
        left -= len(segment.turns)
    return drawn


def shorten(segment: Segment, turns: int) -> Segment:
    """The segment's first `turns` turns; the next turn's prompt becomes the bootstrap."""
    if len(segment.turns) <= turns:
        return segment
    return Segment(segment.task_name, segment.turns[:turns], segment.turns[turns].prompt, StopReason.CUT)


def join_episodes(collected: Sequence[Segment]) -> list[Segment]:
    """The segments, with those of an episode that went on in the next batch laid end to end."""
    joined: dict[tuple[int, int], Segment] = {}
    for segment in collected:
        first, last = segment.turns[0], segment.turns[-1]
        before = joined.pop((first.episode_id, first.index), None)
        turns = segment.turns if before is None else before.turns + segment.turns
        joined[first.episode_id, last.index + 1] = replace(segment, turns=turns)
    return list(joined.values())


def choose_held_out(segments: Sequence[Segment], share: float, seed: int) -> set[int]:
    """Ids of random episodes that together hold about `share` of all turns; at least one episode is not chosen.

    Raises:
        ConfigError: there are fewer than 10 episodes.
    """
    lengths: dict[int, int] = {}
    for segment in segments:
        episode = segment.turns[0].episode_id
        lengths[episode] = lengths.get(episode, 0) + len(segment.turns)
    turns = sum(lengths.values())
    if len(lengths) < MIN_EPISODES:
        raise ConfigError(
            f"value pretraining collected {turns} turns of {len(lengths)} episodes, too few to hold some out: it needs "
            f"at least {MIN_EPISODES} episodes, so raise value_pretraining.batches or n_env"
        )
    order = list(lengths)
    random.Random(f"held out/{seed}").shuffle(order)
    chosen: set[int] = set()
    held = 0
    for episode in order[:-1]:
        if held >= share * turns:
            break
        chosen.add(episode)
        held += lengths[episode]
    return chosen


@dataclass
class WeightClock:
    """Counts actor updates behind rollout ids and behind the engine's weight versions.

    Each push of weights to the engine raises the version by one. Versions may begin with any number: the first batch of
    a process is played with the weights of its first rollout. `train.py` pushes after every rollout; `train_async.py`
    after rollout r if `interval` divides r + 1, and only when batch r + 1 is complete. slime does not say which of them
    runs. `learn` tells them apart by the pushes before a batch is asked for: `train.py` has made one per rollout since
    the first, `train_async.py` at least one fewer.
    """

    interval: int = 1
    """`--update-weights-interval`."""
    frozen: int = 0
    """Rollouts at the start of the run in which the actor does not train (`--num-critic-only-steps`)."""
    first: tuple[int, int] | None = None
    """Rollout id and weight version of the first batch; None until an engine has answered."""
    after_each: bool | None = None
    """Whether weights are pushed after every rollout before the next batch is asked for; None until it is known."""

    def learn(self, rollout_id: int, version: int, asked_since: bool = True) -> None:
        """Learn from the version of an answer while the batch of this rollout is collected, or the next to be.

        Args:
            asked_since: the answer was requested after slime had asked for the batch.
        """
        if self.first is None:
            self.first = rollout_id, version
        first_rollout, first_version = self.first
        if self.after_each is None and rollout_id > first_rollout:
            if version - first_version >= rollout_id - first_rollout:
                self.after_each = True
            elif asked_since:
                self.after_each = False

    def needs_answer(self, rollout_id: int) -> bool:
        """Whether only an answer that is requested now can tell how often weights are pushed."""
        begun = self.first is not None and rollout_id > self.first[0]
        return begun and self.interval > 1 and self.after_each is None

    def pushes_before(self, rollout_id: int) -> int:
        """Pushes since the first batch that are certain when slime asks for the batch of this rollout."""
        if self.first is None:
            return 0
        start = self.first[0]
        made = rollout_id - start if self.after_each else (rollout_id - 1) // self.interval - start // self.interval
        return max(0, made)

    def updates_before(self, rollout_id: int) -> int:
        """Actor updates before the batch of this rollout is trained on."""
        return max(0, rollout_id - self.frozen)

    def updates_after(self, pushes: int) -> int:
        """Actor updates in the weights after so many pushes since the first batch."""
        assert self.first is not None, "no version is known yet"
        start = self.first[0]
        if pushes <= 0 or self.after_each is not False:  # not known: the older weights of the two
            return self.updates_before(start + pushes)
        return self.updates_before((start // self.interval + pushes) * self.interval)

    def updates_in(self, version: int) -> int:
        """Actor updates in the weights of this version."""
        assert self.first is not None, "no version is known yet"
        return self.updates_after(version - self.first[1])

    def last_rollout(self, updates: int, max_staleness: int) -> int:
        """The last rollout that may train on turns of weights with so many updates."""
        return self.frozen + updates + max_staleness

    def staleness(self, version: int, rollout_id: int) -> int:
        """Actor updates between playing a turn with this version and training it in this rollout."""
        return max(0, self.updates_before(rollout_id) - self.updates_in(version))


def version_of(generation: Generation) -> int | None:
    """The oldest weight version that produced a token; None if the engine does not number its weights."""
    found = [int(v) for v in generation.weight_versions if v.isdecimal() and len(v) < 20]
    return min(found, default=None)
