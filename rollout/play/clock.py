"""How many actor updates lie between playing a turn and training it, told by the engine's weight
versions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rollout.turn import Generation


@dataclass
class WeightClock:
    """Counts the actor updates before a rollout, and those in the weights of a version.

    Each push of weights to the engine raises the version by one. Versions may begin with any
    number: the first batch of a process is played with the weights of its first rollout. `train.py`
    pushes after every rollout; `train_async.py` after rollout r if `interval` divides r + 1, and
    only when batch r + 1 is complete. Here is a run whose engine begins with version 1, with an
    interval of 2. Pushes are those before the batch is played, updates those in the weights that
    play it:

                 train.py                               train_async.py
        rollout  version  pushes  updates  staleness    version  pushes  updates  staleness
              0        1       0        0          0          1       0        0          0
              1        2       1        1          0          1       0        0          1
              2        3       2        2          0          1       0        0          2
              3        4       3        3          0          2       1        2          1
              4        5       4        4          0          2       1        2          2
              5        6       5        5          0          3       2        4          1

    slime does not say which of the two runs. `learn` tells them apart by the pushes before a batch
    is asked for: `train.py` has made one per rollout since the first, `train_async.py` at least one
    fewer.
    """

    interval: int = 1
    """`--update-weights-interval`."""
    frozen: int = 0
    """Rollouts at the start of the run in which the actor does not train
    (`--num-critic-only-steps`)."""
    first: tuple[int, int] | None = None
    """Rollout id and weight version of the first batch; None until an engine has answered."""
    after_each: bool | None = None
    """Whether weights are pushed after every rollout before the next batch is asked for; None until
    it is known."""

    def learn(self, rollout_id: int, version: int, *, asked_since: bool) -> None:
        """Take note of the weight version in a response.

        `asked_since`: the request was sent after slime asked for this rollout's batch, so the
        version shows whether weights were pushed in between.
        """
        # While the first batch is played, nothing is pushed, so a smaller version was an engine's
        # own.
        if self.first is None or rollout_id == self.first[0]:
            self.first = rollout_id, max(version, self.first[1] if self.first else version)
        first_rollout, first_version = self.first
        if rollout_id > first_rollout:
            if version - first_version >= rollout_id - first_rollout:
                self.after_each = True  # also if an engine that missed a push had told otherwise
            elif asked_since and self.after_each is None:
                self.after_each = False

    def needs_answer(self, rollout_id: int) -> bool:
        """Whether only a response that is requested now can tell how often weights are pushed."""
        begun = self.first is not None and rollout_id > self.first[0]
        return begun and self.interval > 1 and self.after_each is None

    def pushes_before(self, rollout_id: int) -> int:
        """Pushes since the first batch that are certain when slime asks for the batch of this
        rollout."""
        if self.first is None:
            return 0
        start = self.first[0]
        made = (
            rollout_id - start
            if self.after_each
            else (rollout_id - 1) // self.interval - start // self.interval
        )
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

    def staleness(self, version: int, rollout_id: int) -> int:
        """Actor updates between playing a turn with this version and training it in this rollout.

        -1: unknown, because the version is older than the first batch's and so an engine's own.
        """
        if self.first is None or version < self.first[1]:
            return -1
        return max(0, self.updates_before(rollout_id) - self.updates_in(version))

    def token_staleness(self, generations: Iterable[Generation], rollout_id: int) -> float | None:
        """Mean staleness of the tokens that are trained on; None if no engine says which weights
        wrote them."""
        updates = tokens = 0
        for generation in filter(
            lambda generation: generation.trained and generation.version_ends, generations
        ):
            start = 0
            for version, end in zip(
                numbered_versions(generation), generation.version_ends, strict=True
            ):
                updates += (end - start) * self.staleness(version, rollout_id)
                start = end
            tokens += start
        return updates / tokens if tokens else None


class Demands(NamedTuple):
    """What a loop demands of the weight versions of a response; others are requested again."""

    numbered: bool = False
    single: bool = False
    """All tokens by one version."""

    def met_by(self, generation: Generation) -> bool:
        """Whether the response may be used."""
        if self.numbered and not numbered_versions(generation):
            return False
        return not self.single or len(set(generation.weight_versions)) <= 1


@dataclass
class ActorWeights:
    """Tells whether the actor's weights answered, or those that an engine had when it started.

    slime numbers the weights that it pushes from 1. An engine that starts while a run plays, such
    as a recovered one, answers with the weights of its own checkpoint until the next push. It has
    another name for them, such as SGLang's `default`, or none. Some engines never number their
    weights, so any answer counts until a number is seen.
    """

    first: int | None = None
    """The first number seen above 0; the actor's weights have this or a larger one. None until
    then."""

    def learn(self, generation: Generation) -> None:
        """Take note of the weight versions of a response."""
        version = version_of(generation)
        if self.first is None and version:
            self.first = version

    def wrote(self, generation: Generation) -> bool:
        """Whether the actor's weights wrote the whole response, as far as is known."""
        version = version_of(generation)
        return self.first is None or (version is not None and version >= self.first)


def numbered_versions(generation: Generation) -> list[int]:
    """The weight versions that produced the tokens, in order; empty unless the engine numbers all
    of them."""
    versions = generation.weight_versions
    # A text of 20 digits or more is a hash.
    are_numbers = all(v.isdecimal() and len(v) < 20 for v in versions)
    return [int(v) for v in versions] if are_numbers else []


def version_of(generation: Generation) -> int | None:
    """The oldest weight version that produced a token; None if the engine does not number its
    weights."""
    return min(numbered_versions(generation), default=None)
