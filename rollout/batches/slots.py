"""Saves slots to a checkpoint and restores them: a live episode is its seed and responses, which
are played again."""

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rollout.errors import EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.loop import Slot, gather
from rollout.play.parts import Runtime
from rollout.spec import EpisodeSpec, Replay

logger = logging.getLogger(__name__)


async def restore_slots(
    runtime: Runtime,
    slots: Sequence[Slot],
    spec_of: Callable[[int], EpisodeSpec],
    saved: Sequence[Mapping[str, Any]],
) -> None:
    """Put the saved live episodes into new slots, replayed up to where they were saved.

    If the checkpoint has another number of slots, as many live episodes as fit continue, and later
    ones get new ids. A live episode is given up and counted if no slot is left for it, if the
    configuration now plays something else under its id, or if its replay differs.
    """
    episodes = [item["episode"] for item in saved]
    if len(saved) == len(slots):
        for slot, item in zip(slots, saved, strict=True):
            slot.next_episode = item["next_episode"]
    else:
        first = max(item["next_episode"] for item in saved)
        for slot in slots:
            slot.next_episode = first + slot.number
        episodes = [episode for episode in episodes if episode is not None]
        what = f"the checkpoint has {len(saved)} slots, n_env is {len(slots)}"
        _give_up(runtime, max(len(episodes) - len(slots), 0), what)
    changes: Counter[str] = Counter()
    restoring: list[Coroutine[Any, Any, None]] = []
    for slot, item in zip(slots, episodes, strict=False):
        if item is None:
            continue
        spec = spec_of(item["spec"]["episode_id"])
        if change := _change(item["spec"], spec):
            changes[change] += 1
        else:
            restoring.append(_restore(slot, item, spec, runtime))
    for change, count in changes.items():
        _give_up(runtime, count, change)
    await gather(restoring)


def _give_up(runtime: Runtime, episodes: int, why: str) -> None:
    runtime.counters["episodes_lost_at_resume"] += episodes
    logger.warning("%d live episodes of the checkpoint are given up: %s", episodes, why)


def _change(saved: Mapping[str, Any], spec: EpisodeSpec) -> str:
    configured = _spec_state(spec)
    for key, name in (("env_path", "environment"), ("options", "environment's options")):
        if configured[key] != saved[key]:
            return f"their {name} was {saved[key]!r}, the configuration says {configured[key]!r}"
    if configured["metadata"] != saved["metadata"]:
        return "their tasks or seeds are not those of the configuration"
    return ""


async def _restore(
    slot: Slot, item: Mapping[str, Any], spec: EpisodeSpec, runtime: Runtime
) -> None:
    try:
        saved = Replay(item["answers"], item["stepped"], item["digests"])
        slot.episode = await open_episode(runtime, spec, saved)
    except EnvironmentFault:
        runtime.counters["episodes_lost_at_resume"] += 1


def slots_state(slots: Sequence[Slot]) -> list[Mapping[str, Any]]:
    """The slots as plain data, copied."""
    return [saved_slot(slot.next_episode, slot.episode) for slot in slots]


def saved_slot(
    next_episode: int, episode: Episode | None, turns: int | None = None
) -> Mapping[str, Any]:
    """The next episode's id, and the live episode as its seed and its first `turns` responses
    (None: all)."""
    if episode is None:
        return {"next_episode": next_episode, "episode": None}
    count = len(episode.answers) if turns is None else turns
    live = {
        "spec": _spec_state(episode.spec),
        "answers": episode.answers[:count],
        "stepped": episode.stepped[:count],
        "digests": episode.digests[: sum(episode.stepped[:count]) + 1],
    }
    return {"next_episode": next_episode, "episode": live}


def _spec_state(spec: EpisodeSpec) -> Mapping[str, Any]:
    env = spec.env
    return {
        "episode_id": spec.episode_id,
        "name": spec.name,
        "env_path": env.env_path,
        "metadata": dict(env.metadata),
        "options": dict(env.options),
    }
