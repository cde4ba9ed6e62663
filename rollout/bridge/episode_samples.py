"""One episode's samples, one a turn, that slime's own rollout loop may also take for a single sample.

slime passes a list on where an episode became several samples, but asks a group's member for `response`, `status` or
`reward` in places where it expects one sample: when it collects what it aborted, hands such a group out again, or
filters it. These attributes answer for the episode as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.bridge.framework import Sample


class EpisodeSamples(list[Sample]):
    """A list of samples with what slime reads of a finished one."""

    response = ""
    """Empty: slime marks what it aborted midway by it, and this episode is over."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__(samples)
        self.metadata: dict[str, Any] = {}

    @property
    def status(self) -> Sample.Status:
        """Over, so slime does not play it again when it hands it out."""
        return Sample.Status.COMPLETED

    @property
    def reward(self) -> float | None:
        return self[0].reward

    def get_reward_value(self, args: Any) -> float:
        """The episode's return, which all its samples carry; slime's dynamic filters compare it."""
        return self[0].get_reward_value(args)

    @property
    def session_id(self) -> str | None:
        return self[0].session_id

    @property
    def index(self) -> int | None:
        return self[0].index

    @property
    def group_index(self) -> int | None:
        """The episode's id, by which a buffered group is written down and handed out again."""
        return self[0].group_index

    @property
    def remove_sample(self) -> bool:
        return all(sample.remove_sample for sample in self)

    @remove_sample.setter
    def remove_sample(self, removed: bool) -> None:
        """slime's sample filters take a whole sample out of the loss; here that is every turn."""
        for sample in self:
            sample.remove_sample = removed

    @property
    def response_length(self) -> int:
        return sum(sample.response_length for sample in self)

    @property
    def loss_mask(self) -> list[int]:
        return [bit for sample in self for bit in sample.loss_mask]

    @loss_mask.setter
    def loss_mask(self, mask: list[int]) -> None:
        """slime masks a whole sample from before an update; here that is every turn."""
        start = 0
        for sample in self:
            sample.loss_mask = mask[start : start + sample.response_length]
            start += sample.response_length
