"""What the states of an episode are worth, from continuations by the same policy (`group_estimator:
branches`)."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout.errors import ConfigError, EnvironmentFault
from rollout.play.episode import Episode, open_episode
from rollout.play.loop import Slot, gather, play
from rollout.play.parts import Runtime
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import Generation, Segment, Turn, discounted_return
from rollout.workers.pool import ReplayError


async def with_baselines(
    runtime: Runtime, spec: EpisodeSpec, segment: Segment, played: Replay, params: Mapping[str, Any]
) -> Segment:
    """Return a whole episode whose turns have a baseline: the mean return of `branches`
    continuations from before them.

    Each continuation starts the episode again, repeats its first responses, and plays on to the
    end.

    Raises:
        ConfigError: the environment cannot be replayed.
        EnvironmentFault: a continuation lost its environment.
        EngineError: as for any turn.
    """
    count = runtime.settings.branches
    places = asyncio.Semaphore(runtime.settings.n_env)

    async def continued(position: int, number: int) -> float:
        # The id decides what is sampled, so continuations need different ones.
        one = replace(spec, episode_id=(position + 1) * 1_000_000 + number)
        async with places:
            return await _continued(runtime, one, _first(played, position), params)

    async def with_baseline(position: int, turn: Turn) -> Turn:
        returns = await gather(continued(position, number) for number in range(1, count + 1))
        return replace(turn, baseline=sum(returns) / count)

    turns = await gather(
        with_baseline(position, turn) for position, turn in enumerate(segment.turns)
    )
    return replace(segment, turns=tuple(turns))


def _first(played: Replay, responses: int) -> Replay:
    stepped = played.stepped[:responses]
    return Replay(played.answers[:responses], stepped, played.digests[: sum(stepped) + 1])


async def _continued(
    runtime: Runtime, spec: EpisodeSpec, before: Replay, params: Mapping[str, Any]
) -> float:
    """Play on from a replayed state, and return the discounted return from there."""
    try:
        episode = await open_episode(runtime, spec, before)
    except ReplayError as error:
        raise ConfigError(
            f"group_estimator: branches plays episodes again, and this one cannot be: {error}"
        ) from error
    continuation = _Continuation(params)
    slot = Slot(lambda _: open_episode(runtime, spec, before), episode=episode)
    try:
        await play(slot, continuation)
    finally:
        await slot.leave()
    return discounted_return(
        [(turn.reward, turn.moves) for turn in continuation.turns], runtime.settings.gamma_step
    )


class _Continuation:
    """Collects the turns of one continuation."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.turns: list[Turn] = []
        self._params = params
        self._ended = False

    async def may_issue(self, slot: Slot) -> bool:
        return not self._ended

    async def ask(self, slot: Slot, episode: Episode) -> Generation:
        return await episode.generate(self._params)

    def record(self, slot: Slot, episode: Episode, turn: Turn) -> None:
        self.turns.append(turn)
        self._ended = episode.stop is not None

    def lose(self, slot: Slot, fault: EnvironmentFault) -> None:
        raise fault
