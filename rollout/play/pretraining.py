"""Value pretraining's data: episodes joined over the collected batches, and which of them are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from rollout.errors import ConfigError
from rollout.turn import Segment

FEWEST_EPISODES = 10
"""Episodes that are needed to hold some out."""


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
    if len(lengths) < FEWEST_EPISODES:
        raise ConfigError(
            f"value pretraining collected {turns} turns of {len(lengths)} episodes, too few to hold some out: it needs "
            f"at least {FEWEST_EPISODES} episodes, so raise value_pretraining.batches or n_env"
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
