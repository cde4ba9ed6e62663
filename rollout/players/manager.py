"""The manager's side of the players: starts them, restarts those that die, and shows their episodes as its own.

Nothing about a batch depends on how many players there are: an episode's turns follow from its seed and responses. A
player that dies takes its environments and the responses in flight with it. Its episodes are then replayed in its
successor, and the turns in flight are asked again.
"""

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

from rollout.errors import PlayerError
from rollout.play.clock import Demands
from rollout.play.loop import LiveEpisode
from rollout.play.parts import Runtime
from rollout.players.process import EndedEarlyError, Report, launch
from rollout.players.remote import RemoteEpisode
from rollout.players.running import PlayerPlace, ResponseLostError, RunningPlayer
from rollout.players.wire import NOTHING, changed_prompt, read_turn
from rollout.spec import EpisodeSpec, Replay
from rollout.workers.pool import ReplayError
from rollout.workers.utilization import UNUSED, ProcessUsage

logger = logging.getLogger(__name__)

MAX_DEATHS = 8
"""How often one player may die while the turns of one batch are played; a lost node ends several players at once."""
AVOID_S = 600.0
"""How long a process in which no environment starts gets no episodes, if they start in others."""
PAUSE_S = 1.0
"""After a player that ended before it connected, until the next is started."""


class PlayerProcesses:
    """The players of one run; each starts with its first episode."""

    def __init__(self, runtime: Runtime, args: Any, count: int) -> None:
        self.faults: Counter[str] = Counter()
        """Faults that the players have counted, by name."""
        self.turns = 0
        """Turns that the players have finished."""
        self.demands = Demands()
        self.runtime = runtime
        self._workers = runtime.settings.env_workers or min(runtime.settings.n_env, os.cpu_count() or 1)
        self._args = copy.copy(args)
        """slime's `args` for a player, which plays alone; the YAML's keys are in it, and the file may have changed."""
        self._args.rollout_processes, self._args.custom_config_path = 1, None
        self._places = [PlayerPlace(number) for number in range(count)]
        self._keys = itertools.count()
        self._broken: Exception | None = None
        """Why no player can be started; the slots that still wait for one raise it, too."""

    async def start(self) -> list[int]:
        """Start those that do not run yet; return the process ids, each on its node."""
        await asyncio.gather(*map(self.live, self._places))
        return [place.pid for place in self._places]

    async def open(self, spec: EpisodeSpec, replay: Replay | None = None) -> LiveEpisode:
        """Start an episode where the fewest are open, or replay what was played of it; raises EnvironmentFault."""
        episode = RemoteEpisode(self, self._emptiest(self._places), next(self._keys), spec, replay or Replay())
        try:
            await episode.ensure()
        except BaseException:
            await episode.close()
            raise
        return episode

    async def evaluate(self, spec: EpisodeSpec) -> Any:
        """Play a held-out episode in one of the players; if that dies, from the start in its successor."""
        tried: dict[int, object] = {}
        place = self._emptiest(self._places)
        while True:
            name, result, played = await self._play_held_out(place, spec)
            if played or result.fault is None:
                self.note_start(place, tried)
                break
            if (other := self.elsewhere(place, tried, f"{name}: {result.fault}")) is None:
                break
            place = other
        prompt, turns = NOTHING, []
        for values, change in played:
            prompt = changed_prompt(prompt, change)
            turns.append(read_turn(values, prompt))
        return replace(result, turns=tuple(turns))

    async def _play_held_out(self, place: PlayerPlace, spec: EpisodeSpec) -> tuple[str, Any, list[Any]]:
        """Return the player's name, the result without turns, and what is needed to make the turns."""
        place.episodes += 1
        try:
            while True:
                with suppress(ResponseLostError):
                    player = await self.live(place)
                    return player.name, *await player.call("evaluate", spec, self.runtime.engine.weights.first)
        finally:
            place.episodes -= 1

    def _emptiest(self, places: Sequence[PlayerPlace]) -> PlayerPlace:
        """Return the place with the fewest open episodes; those that are avoided come last."""
        now = asyncio.get_running_loop().time()
        return min(places, key=lambda place: (place.avoided_until > now, place.episodes))

    def elsewhere(self, place: PlayerPlace, tried: dict[int, object], fault: object) -> PlayerPlace | None:
        """Note an episode's fault at its start, and return where to try it next; None if that would not help.

        It may help where nothing has started yet, because a package of the environment may be missing there.
        """
        tried[place.number] = fault
        if place.started or isinstance(fault, ReplayError):
            return None
        now = asyncio.get_running_loop().time()
        others = [other for other in self._places if other.number not in tried and other.avoided_until <= now]
        return self._emptiest(others) if others else None

    def note_start(self, place: PlayerPlace, tried: Mapping[int, object]) -> None:
        """Note that an episode has started here. Places where it was `tried` and nothing has started are avoided."""
        place.started, place.avoided_until = True, 0.0
        for number, fault in tried.items():
            if not (other := self._places[number]).started:
                if not other.avoided_until:
                    words = "no environment starts in one process, so the others get its episodes for %g s: %s"
                    logger.warning(words, AVOID_S, fault)
                other.avoided_until = asyncio.get_running_loop().time() + AVOID_S

    def usage(self) -> list[ProcessUsage]:
        """What each of them has used so far, as of its latest reply."""
        return [place.earlier.plus(place.usage) for place in self._places]

    async def refresh(self) -> None:
        """Have the players report what they have used up to now. One that does not answer at once may hang."""
        players = [place.player for place in self._places if place.player is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*(player.call("ping") for player in players), return_exceptions=True)

    async def live(self, place: PlayerPlace) -> RunningPlayer:
        """Return the place's player; starts one if there is none, or if it died.

        Raises PlayerError if players die again and again, or ConfigError, for example for lack of the tokenizer.
        """
        async with place.lock:
            while place.player is None or place.player.lost:
                self._check_deaths(place)
                place.player = await self._start(place)
            return place.player

    async def _start(self, place: PlayerPlace) -> RunningPlayer:
        """Start a player; the one returned may have died already."""
        player = RunningPlayer(lambda report: self._take(place, report), lambda: self._died(place))
        args, count = copy.copy(self._args), len(self._places)
        args.env_workers = max(1, (self._workers + count - 1 - place.number) // count)  # they add up to `_workers`
        try:
            node, place.pid = await player.start(await launch(place.number), args)
            place.earlier = place.earlier.plus(place.usage, -1)  # its imports are not the batch's
            self._check_deaths(place)  # the run may have ended meanwhile
            player.name = f"rollout process {place.number} on {node}"
            logger.info("%s plays with pid %d", player.name, place.pid)
        except ResponseLostError:
            pass
        except (EndedEarlyError, OSError) as error:  # a lost node, or too many processes for a moment
            logger.warning("rollout process %d ended before it had connected: %s", place.number, error)
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
        place.earlier, place.usage = place.earlier.plus(place.usage), UNUSED
        place.started, place.avoided_until = False, 0.0
        self.faults["player_died"] += 1
        place.deaths.append(self.turns)
        while place.deaths[0] < self.turns - self.runtime.flags.turns_per_batch:
            place.deaths.popleft()
        logger.warning("rollout process %d died; its episodes are replayed in a new one", place.number)

    def _check_deaths(self, place: PlayerPlace) -> None:
        if self._broken is not None:
            raise self._broken
        if len(place.deaths) > MAX_DEATHS:
            raise PlayerError(
                f"rollout process {place.number} died {len(place.deaths)} times within the turns of one batch: look "
                "for its last output and for the kernel's out-of-memory killer, lower rollout_processes, or run "
                "environments that crash with env_backend: process"
            )

    async def close(self) -> None:
        """End all of them; episodes that are still being opened start no other."""
        self._broken = self._broken or PlayerError("the run has ended, and its rollout processes with it")
        for place in self._places:
            if place.player is not None:
                place.player.end()
