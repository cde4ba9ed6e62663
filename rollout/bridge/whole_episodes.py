"""What slime reads of the samples of one whole episode in its own outer loop.

slime accepts a list of samples in place of one, but still reads attributes of a single sample from
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.bridge.framework import Sample
from rollout.bridge.sample import facts_of, flatten


def episode_facts(samples: Iterable[Sample | Sequence[Sample]]) -> list[Mapping[str, Any]]:
    """Return the facts of each whole episode, from one of its samples; empty for other samples."""
    episodes: dict[Any, Mapping[str, Any]] = {}
    for number, sample in enumerate(flatten(samples)):
        facts = facts_of(sample)
        if "stop" in facts and "episode_turns" in facts:
            episodes[number if sample.index is None else sample.index] = facts
    return list(episodes.values())


def _first(name: str) -> Any:
    """Make a property with the attribute of the first sample."""
    return property(lambda samples: getattr(samples[0], name))


class EpisodeSamples(list[Sample]):
    """The samples of one finished episode, with the attributes that slime reads of a single
    sample."""

    response = ""
    """Empty, because slime marks samples with a response as aborted midway, and this episode is
    over."""
    reward: float | None = _first("reward")
    session_id: str | None = _first("session_id")
    index: int | None = _first("index")  # pyright: ignore[reportIncompatibleMethodOverride]
    """Hides `list.index`, because slime's fully asynchronous loop sorts a group's members by this
    attribute."""
    group_index: int | None = _first("group_index")
    """The episode's id, under which a buffered group is saved and handed out again."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__(samples)
        self.metadata: dict[str, Any] = {}

    @property
    def status(self) -> Sample.Status:
        """Always completed, so slime does not play the episode again."""
        return Sample.Status.COMPLETED

    def get_reward_value(self, args: Any) -> float:
        """The episode's return, which all its samples carry; slime's dynamic filters compare it."""
        return self[0].get_reward_value(args)

    @property
    def remove_sample(self) -> bool:
        return all(sample.remove_sample for sample in self)

    @remove_sample.setter
    def remove_sample(self, removed: bool) -> None:
        """Remove every turn from the loss, as slime's sample filters do with a sample."""
        for sample in self:
            sample.remove_sample = removed

    @property
    def response_length(self) -> int:
        return sum(sample.response_length for sample in self)

    @property
    def loss_mask(self) -> list[int]:
        return [bit for sample in self for bit in sample.loss_mask or ()]

    @loss_mask.setter
    def loss_mask(self, mask: list[int]) -> None:
        """Set the masks of all turns, as slime does for samples from before an update."""
        start = 0
        for sample in self:
            sample.loss_mask = mask[start : start + sample.response_length]
            start += sample.response_length
