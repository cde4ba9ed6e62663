"""The manager's side of the players: starts them, restarts those that die, and shows their episodes
as its own.

Nothing about a batch depends on how many players there are: an episode's turns follow from its seed
and responses. A player that dies takes its environments and the responses in flight with it. Its
episodes are then replayed in its successor, and the turns in flight are asked again.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rollout.errors import EnvironmentFault, PlayerError
from rollout.play.clock import Demands
from rollout.play.episode import Episode
from rollout.play.held_out import EpisodeResult
from rollout.play.parts import Runtime
from rollout.play.transcript import Transcript
from rollout.players.process import EndedEarlyError, Progress, Report, launch
from rollout.players.running import PlayerPlace, RunningPlayer
from rollout.players.wire import NOTHING, changed_prompt
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation, StopReason, Turn
from rollout.workers.child import ChildLostError
from rollout.workers.pool import ReplayError
from rollout.workers.utilization import UNUSED, ProcessUsage

logger = logging.getLogger(__name__)

MAX_DEATHS = 8
"""How often one player may die while the turns of one batch are played; a lost node ends several
players at once."""
AVOID_S = 600.0
"""How long a process in which no environment starts gets no episodes, if they start in others."""
PAUSE_S = 1.0
"""After a player that ended before it connected, until the next is started."""


class RemoteEpisode(Episode):
    """An episode whose environment and prompts are in a player; here is what decides about a
    batch."""

    def __init__(
        self, players: PlayerProcesses, key: int, spec: EpisodeSpec, replay: Replay
    ) -> None:
        # super().__init__() is not called, because it needs the environment.
        self.spec = spec
        self.runtime = players.runtime
        self.index = self.steps = 0
        self.stop: StopReason | None = None
        self.has_next_prompt = True
        self.total_reward = 0.0
        self.prompt = NOTHING
        self.answers = [tuple(ids) for ids in replay.answers]
        self.stepped = list(replay.stepped)
        self._digests = list(replay.digests)
        self._players = players
        self._key = key
        self._player: RunningPlayer | None = None
        """The player that has the episode in this state; None if none has."""
        self._played: tuple[Progress, Turn]
        """What `step` takes over."""

    @property
    def digests(self) -> list[str]:
        return self._digests

    async def ensure(self) -> RunningPlayer:
        """Return the player that has the episode, which is replayed if it was lost; raises
        EnvironmentFault."""
        while self._player is None or self._player.lost:
            played = Replay(self.answers, self.stepped, self._digests)
            self._player, opened = await self._players.begin(
                self._key, "open", self._key, self.spec, played
            )
            self.prompt = NOTHING
            self._digests = []
            self._take(opened)
        return self._player

    def _take(self, progress: Progress) -> None:
        for name, value in progress.state.items():
            setattr(self, name, value)
        if progress.prompt is not None:
            self.prompt = changed_prompt(self.prompt, progress.prompt)
        self._digests += progress.digests

    async def _request(self, params: Mapping[str, Any]) -> Generation:
        """Have the player ask the engine once, and step at once if it need not ask again.

        A turn whose player died is asked again.
        """
        weights = self.runtime.engine.weights
        while True:
            player = await self.ensure()
            self._player = None  # cancelled below, the state would be unknown
            try:
                answer = await player.call(
                    "turn", self._key, params, self._players.demands, weights.first
                )
                break
            except ChildLostError:
                self.runtime.counters["turns_interrupted"] += 1
        self._player = player
        if isinstance(answer, Generation):  # the player does not ask again
            again = int(answer.finish_reason is FinishReason.ABORT)
            place = self._players.where[self._key]
            place.earlier = place.earlier.plus(UNUSED._replace(retries=again))
            return answer
        self._played = answer, replace(answer.turn, prompt=self.prompt)
        generation = self._played[1].generation
        weights.learn(generation)
        return generation

    async def step(self, generation: Generation, engine_s: float = 0.0) -> Turn:
        """Take over the turn that the player has played, with the engine's time as the player
        measured it."""
        progress, turn = self._played
        self._take(progress)
        self.answers.append(tuple(turn.generation.token_ids))
        self.stepped.append(turn.stepped)
        self._players.turns += 1
        return turn

    async def close(self) -> None:
        place = self._players.where.pop(self._key, None)
        if place is not None and place.player is not None:
            with suppress(ChildLostError):
                await place.player.call("close", self._key)


class PlayerProcesses:
    """The players of one run; each starts with its first episode."""

    def __init__(self, runtime: Runtime, args: Any, count: int) -> None:
        self.faults: Counter[str] = Counter()
        """Faults that the players have counted, by name."""
        self.turns = 0
        """Turns that the players have finished."""
        self.demands = Demands()
        self.runtime = runtime
        self._workers = runtime.settings.env_workers or min(
            runtime.settings.n_env, os.cpu_count() or 1
        )
        self._args = copy.copy(args)
        """slime's `args` for a player, which plays alone; the YAML's keys are in it, and the file
        may have changed."""
        self._args.rollout_processes = 1
        self._args.custom_config_path = None
        self._places = [PlayerPlace(number) for number in range(count)]
        self.where: dict[int, PlayerPlace] = {}
        """Where each open episode is, by its key, including those that are being opened."""
        self._keys = itertools.count()
        self._broken: Exception | None = None
        """Why no player can be started; the slots that still wait for one raise it, too."""

    async def start(self) -> list[int]:
        """Start those that do not run yet; return the process ids, each on its node."""
        await asyncio.gather(*map(self.live, self._places))
        return [place.pid for place in self._places]

    async def open(self, spec: EpisodeSpec, replay: Replay | None = None) -> Episode:
        """Start an episode where the fewest are open, or replay what was played of it; raises
        EnvironmentFault."""
        episode = RemoteEpisode(self, next(self._keys), spec, replay or Replay())
        try:
            await episode.ensure()
        except BaseException:
            await episode.close()
            raise
        return episode

    async def evaluate(self, spec: EpisodeSpec) -> EpisodeResult:
        """Play a held-out episode in one of the players; if that dies, from the start in its
        successor."""
        key = next(self._keys)
        first = self.runtime.engine.weights.first
        try:
            _, (result, changes) = await self.begin(key, "evaluate", spec, first)
        except EnvironmentFault as fault:
            return EpisodeResult(spec, (), StopReason.FAILED, str(fault), Transcript())
        finally:
            self.where.pop(key, None)
        prompt = NOTHING
        turns = list[Turn]()
        for turn, change in zip(result.turns, changes, strict=True):
            prompt = changed_prompt(prompt, change)
            turns.append(replace(turn, prompt=prompt))
        return replace(result, turns=tuple(turns))

    async def begin(self, key: int, method: str, *arguments: Any) -> tuple[RunningPlayer, Any]:
        """Call a method that starts an episode; return the player and its answer. Raises
        EnvironmentFault.

        If the episode does not start where nothing has started yet, another player is tried,
        because a package of the environment may be missing there.
        """
        tried: dict[PlayerPlace, EnvironmentFault] = {}
        while True:
            place = self.where.get(key) or self._emptiest(self._places)
            self.where[key] = place
            try:
                player = await self.live(place)
                answer = await player.call(method, *arguments)
                break
            except ChildLostError:
                continue
            except EnvironmentFault as fault:
                tried[place] = fault
                others = [
                    other
                    for other in self._places
                    if other not in tried and not self._is_avoided(other)
                ]
                if place.started or isinstance(fault, ReplayError) or not others:
                    raise
                self.where[key] = self._emptiest(others)
        place.started = True
        place.avoided_until = 0.0
        for other, fault in tried.items():
            if not other.started:
                if not other.avoided_until:
                    words = "no environment starts in one process, so the others get its episodes for %g s: %s"
                    logger.warning(words, AVOID_S, fault)
                other.avoided_until = asyncio.get_running_loop().time() + AVOID_S
        return player, answer

    def _emptiest(self, places: Sequence[PlayerPlace]) -> PlayerPlace:
        """Return the place with the fewest open episodes; those that are avoided come last."""
        episodes = Counter(self.where.values())
        return min(places, key=lambda place: (self._is_avoided(place), episodes[place]))

    def _is_avoided(self, place: PlayerPlace) -> bool:
        return place.avoided_until > asyncio.get_running_loop().time()

    def usage(self) -> list[ProcessUsage]:
        """What each of them has used so far, as of its latest reply."""
        return [place.earlier.plus(place.usage) for place in self._places]

    async def refresh(self) -> None:
        """Have the players report what they have used up to now. One that does not answer at once
        may hang."""
        players = [place.player for place in self._places if place.player is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(
                    *(player.call("ping") for player in players), return_exceptions=True
                )

    async def live(self, place: PlayerPlace) -> RunningPlayer:
        """Return the place's player; starts one if there is none, or if it died.

        Raises PlayerError if players die again and again, or ConfigError, for example for lack of
        the tokenizer.
        """
        async with place.lock:
            while place.player is None or place.player.lost:
                self._check_deaths(place)
                place.player = await self._start(place)
            return place.player

    async def _start(self, place: PlayerPlace) -> RunningPlayer:
        """Start a player; the one returned may have died already."""
        player = RunningPlayer(lambda report: self._take(place, report), lambda: self._died(place))
        args = copy.copy(self._args)
        count = len(self._places)
        # The workers of all players add up to `_workers`.
        args.env_workers = max(1, (self._workers + count - 1 - place.number) // count)
        try:
            node, place.pid = await player.start(await launch(place.number), args)
            place.earlier = place.earlier.plus(place.usage, -1)  # its imports are not the batch's
            self._check_deaths(place)  # the run may have ended meanwhile
            player.name = f"rollout process {place.number} on {node}"
            logger.info("%s plays with pid %d", player.name, place.pid)
        except ChildLostError:
            pass
        except (EndedEarlyError, OSError) as error:
            # The node was lost, or has too many processes for a moment.
            logger.warning(
                "rollout process %d ended before it had connected: %s", place.number, error
            )
            player.lost = True
            self._died(place)
            await asyncio.sleep(PAUSE_S)
        except BaseException as error:
            if isinstance(error, Exception):
                self._broken = self._broken or error
            player.end()
            raise
        return player

    def _take(self, place: PlayerPlace, report: Report) -> None:
        self.faults.update(report.faults)
        place.usage = report.usage

    def _died(self, place: PlayerPlace) -> None:
        place.earlier = place.earlier.plus(place.usage)
        place.usage = UNUSED
        place.started = False
        place.avoided_until = 0.0
        self.faults["player_died"] += 1
        place.deaths.append(self.turns)
        while place.deaths[0] < self.turns - self.runtime.flags.turns_per_batch:
            place.deaths.popleft()
        logger.warning(
            "rollout process %d died; its episodes are replayed in a new one", place.number
        )

    def _check_deaths(self, place: PlayerPlace) -> None:
        if self._broken is not None:
            raise self._broken
        if len(place.deaths) > MAX_DEATHS:
            raise PlayerError(
                f"rollout process {place.number} died {len(place.deaths)} times within the turns "
                "of one batch: look for its last output and for the kernel's out-of-memory "
                "killer, lower rollout_processes, or run environments that crash with "
                "env_backend: process"
            )

    async def close(self) -> None:
        """End all of them; episodes that are still being opened start no other."""
        self._broken = self._broken or PlayerError(
            "the run has ended, and its rollout processes with it"
        )
        for place in self._places:
            if place.player is not None:
                place.player.end()
