"""The places in which episodes live from batch to batch, and how they come back after a restart.

A live episode is stored as seed and answers; `restore_slots` plays it again, in the environment that the configuration
names, and checks that every observation is the one that was seen.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.engine import LARGEST_ID
from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.runtime import Runtime
from rollout.spec import EpisodeSpec
from rollout.turn import FinishReason, Generation

logger = logging.getLogger(__name__)


class Slot:
    """One place for a live episode; it plays its own sequence of episode ids, one after another."""

    def __init__(self, number: int, first_episode: int, stride: int) -> None:
        self.number = number
        self.next_episode = first_episode
        self.stride = stride
        self.episode: Episode | None = None
        self.ahead: asyncio.Task[Episode] | None = None

    async def live(self, runtime: Runtime, spec_of: Callable[[int], EpisodeSpec]) -> Episode:
        """The episode to play on; the one after it is made ready meanwhile. `spec_of` an id says what it plays."""
        if self.episode is None:
            if self.ahead is None:
                self._prepare(runtime, spec_of)
            assert self.ahead is not None
            ahead, self.ahead = self.ahead, None
            self.next_episode += self.stride
            self.episode = await ahead
        if self.ahead is None:
            self._prepare(runtime, spec_of)
        return self.episode

    def _prepare(self, runtime: Runtime, spec_of: Callable[[int], EpisodeSpec]) -> None:
        self.ahead = asyncio.create_task(open_episode(runtime, spec_of(self.next_episode)))
        # A failure is read when the episode's turn comes; until then it is nobody's.
        self.ahead.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def leave(self) -> None:
        """Give up the slot's episode; the next one takes its place."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()


@dataclass
class FixedTurnState:
    """What lives from batch to batch: the slots, on the event loop that made them."""

    runtime: Runtime
    slots: list[Slot]


async def restore_slots(
    saved: list[Mapping[str, Any]], runtime: Runtime, n_env: int, spec_of: Callable[[int], EpisodeSpec]
) -> list[Slot]:
    """Slots with their episodes played again up to where they were saved.

    `spec_of` an id says what the configuration plays; a checkpoint names environments only to compare. With another
    `n_env` than saved, as many live episodes as there are slots go on, and later ones have ids that were never used.
    An episode is given up and counted if there is no slot for it, if the configuration now plays something else under
    its id, or if its replay differs. Its slot then begins the next episode.
    """
    if len(saved) == n_env:
        slots = [Slot(number, item["next_episode"], n_env) for number, item in enumerate(saved)]
        episodes = [item["episode"] for item in saved]
    else:
        first = max((item["next_episode"] for item in saved), default=0)
        slots = [Slot(number, first + number, n_env) for number in range(n_env)]
        episodes = [item["episode"] for item in saved if item["episode"] is not None]
        surplus = max(len(episodes) - n_env, 0)
        runtime.counters["episodes_lost_at_resume"] += surplus
        what = "the checkpoint has %d slots, n_env is %d: %d live episodes are given up"
        logger.warning(what, len(saved), n_env, surplus)
    changes: Counter[str] = Counter()
    restoring = []
    for slot, item in zip(slots, episodes, strict=False):
        if item is None:
            continue
        spec = spec_of(item["spec"]["episode_id"])
        if change := _change(item["spec"], spec):
            changes[change] += 1
        else:
            restoring.append(_restore(slot, item, spec, runtime))
    for change, count in changes.items():
        runtime.counters["episodes_lost_at_resume"] += count
        logger.warning("%d live episodes of the checkpoint are given up and new ones begun: %s", count, change)
    await asyncio.gather(*restoring)
    return slots


def _change(saved: Mapping[str, Any], spec: EpisodeSpec) -> str:
    """What the configuration plays otherwise than was saved under the episode's id; empty if nothing."""
    configured = json.loads(json.dumps(_spec_state(spec)))  # as the checkpoint gives it back: tuples are lists
    for key, name in (("env_path", "environment"), ("options", "environment's options")):
        if configured[key] != saved[key]:
            return f"their {name} was {saved[key]!r}, the configuration says {configured[key]!r}"
    if configured["metadata"] != saved["metadata"]:
        return "their tasks or seeds are not those of the configuration"
    return ""


async def _restore(slot: Slot, item: Mapping[str, Any], spec: EpisodeSpec, runtime: Runtime) -> None:
    try:
        slot.episode = episode = await open_episode(runtime, spec)
        for token_ids in item["answers"]:
            await episode.take(Generation(token_ids, [0.0] * len(token_ids), "", FinishReason.STOP))
        if episode.session.digests != item["digests"] or episode.stop is not None:
            raise EnvironmentFault("the replayed episode differs from the saved one")
    except EnvironmentFault:
        runtime.counters["episodes_lost_at_resume"] += 1
        await slot.leave()


def slots_state(state: Any) -> list[Mapping[str, Any]]:
    """The slots as plain data: where each goes on, and its episode as seed and answers."""
    if state is None:
        return []
    if isinstance(state, list):  # loaded, and not played on since
        return state
    return [{"next_episode": slot.next_episode, "episode": _episode_state(slot.episode)} for slot in state.slots]


def _episode_state(episode: Any) -> Mapping[str, Any] | None:
    if episode is None:
        return None
    return {
        "spec": _spec_state(episode.spec),
        "answers": episode.answers,
        "digests": episode.session.digests,
    }


def _spec_state(spec: EpisodeSpec) -> Mapping[str, Any]:
    env = spec.env
    return {
        "episode_id": spec.episode_id,
        "name": spec.name,
        "env_path": env.env_path,
        "metadata": dict(env.metadata),
        "options": dict(env.options),
    }


def check_slot(slot: Mapping[str, Any]) -> None:
    """Make sure that plain data describes a slot; raises KeyError, TypeError or ValueError if not."""
    read_whole(slot["next_episode"])
    if slot["episode"] is None:
        return
    spec, answers, digests = (slot["episode"][key] for key in ("spec", "answers", "digests"))
    read_whole(spec["episode_id"])
    if not all(isinstance(spec[key], kind) for key, kind in (("name", str), ("env_path", str), ("options", dict))):
        raise ValueError("an episode's name and environment must be text, its options a mapping")
    if not isinstance(spec["metadata"], dict) or not all(isinstance(item, str) for item in digests):
        raise ValueError("an episode's metadata must be a mapping, its digests text")
    for token_ids in answers:
        read_ids(token_ids)
    if len(digests) != len(answers) + 1:
        raise ValueError("an episode has not one digest more than answers")


def read_whole(value: Any) -> int:
    """A number that counts or numbers something."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def read_ids(value: Any) -> list[int]:
    """Token ids of one answer."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < LARGEST_ID for item in value):
        raise ValueError("token ids must be a list of whole numbers")
    return value
