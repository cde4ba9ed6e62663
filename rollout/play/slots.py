"""Saves slots to a checkpoint and restores them: a live episode is its seed and responses, which are played again."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rollout.errors import EnvironmentFault
from rollout.play.engine import MAX_TOKEN_ID
from rollout.play.episode import open_episode
from rollout.play.loop import LiveEpisode, Slot, gather
from rollout.play.parts import Runtime
from rollout.spec import EpisodeSpec, Replay

logger = logging.getLogger(__name__)


async def restore_slots(
    runtime: Runtime, slots: Sequence[Slot], spec_of: Callable[[int], EpisodeSpec], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Put the saved live episodes into new slots, replayed up to where they were saved.

    If the checkpoint has another number of slots, as many live episodes as fit continue, and later ones get new ids. A
    live episode is given up and counted if no slot is left for it, if the configuration now plays something else under
    its id, or if its replay differs.
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
    configured = json.loads(json.dumps(_spec_state(spec)))  # in the checkpoint, tuples are lists
    for key, name in (("env_path", "environment"), ("options", "environment's options")):
        if configured[key] != saved[key]:
            return f"their {name} was {saved[key]!r}, the configuration says {configured[key]!r}"
    if configured["metadata"] != saved["metadata"]:
        return "their tasks or seeds are not those of the configuration"
    return ""


async def _restore(slot: Slot, item: Mapping[str, Any], spec: EpisodeSpec, runtime: Runtime) -> None:
    try:
        saved = Replay(item["answers"], item["stepped"], item["digests"])
        slot.episode = await open_episode(runtime, spec, saved)
    except EnvironmentFault:
        runtime.counters["episodes_lost_at_resume"] += 1


def slots_state(slots: Sequence[Slot]) -> list[Mapping[str, Any]]:
    """The slots as plain data, copied."""
    return [saved_slot(slot.next_episode, slot.episode) for slot in slots]


def saved_slot(next_episode: int, episode: LiveEpisode | None, turns: int | None = None) -> Mapping[str, Any]:
    """The next episode's id, and the live episode as its seed and its first `turns` responses (None: all)."""
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


def check_slot(slot: Mapping[str, Any]) -> None:
    """Check that plain data describes a slot; raises KeyError, TypeError or ValueError if not."""
    read_whole(slot["next_episode"])
    if slot["episode"] is None:
        return
    spec, answers, digests, stepped = (slot["episode"][key] for key in ("spec", "answers", "digests", "stepped"))
    read_whole(spec["episode_id"])
    if not all(isinstance(spec[key], kind) for key, kind in (("name", str), ("env_path", str), ("options", dict))):
        raise ValueError("an episode's name and environment must be text, its options a mapping")
    if not isinstance(spec["metadata"], dict) or not all(isinstance(item, str) for item in digests):
        raise ValueError("an episode's metadata must be a mapping, its digests text")
    for token_ids in answers:
        read_ids(token_ids)
    if len(stepped) != len(answers) or not all(isinstance(item, bool) for item in stepped):
        raise ValueError("an episode must say for each answer whether the environment got it")
    if len(digests) != sum(stepped) + 1:
        raise ValueError("an episode must have one digest more than answers that the environment got")


def read_whole(value: Any) -> int:
    """A non-negative integer."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a non-negative integer")
    return value


def read_ids(value: Any) -> list[int]:
    """Return token ids of one response; raises ValueError for anything else."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise ValueError("token ids must be a list of whole numbers")
    return value
