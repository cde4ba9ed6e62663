"""An episode whose environment and prompts are in a player; the manager decides about it as about its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from rollout.errors import EnvironmentFault
from rollout.play.clock import Demands
from rollout.play.episode import Episode
from rollout.play.parts import Runtime
from rollout.players.process import Progress
from rollout.players.running import PlayerPlace, ResponseLostError, RunningPlayer
from rollout.players.wire import NOTHING, changed_prompt, read_turn
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation, StopReason, Turn
from rollout.workers.utilization import UNUSED


class Places(Protocol):
    """What an episode needs of the manager."""

    runtime: Runtime
    demands: Demands
    turns: int

    async def live(self, place: PlayerPlace) -> RunningPlayer: ...
    def elsewhere(self, place: PlayerPlace, tried: dict[int, object], fault: object) -> PlayerPlace | None: ...
    def note_start(self, place: PlayerPlace, tried: Mapping[int, object]) -> None: ...


class RemoteEpisode(Episode):
    """An episode whose environment and prompts are in a player; here is what decides about a batch."""

    def __init__(self, players: Places, place: PlayerPlace, key: int, spec: EpisodeSpec, replay: Replay) -> None:
        self.spec, self.runtime = spec, players.runtime  # not super().__init__(), which needs the environment
        self.index = self.steps = 0
        self.stop: StopReason | None = None
        self.has_next_prompt, self.total_reward = True, 0.0
        self.prompt = NOTHING
        self.answers = [tuple(ids) for ids in replay.answers]
        self.stepped = list(replay.stepped)
        self._digests = list(replay.digests)
        self._players, self._place, self._key = players, place, key
        self._player: RunningPlayer | None = None
        """The player that has the episode in this state; None if none has."""
        self._played: tuple[Progress, Turn]
        """What `step` takes over."""
        place.episodes += 1

    @property
    def digests(self) -> list[str]:
        return self._digests

    async def ensure(self) -> RunningPlayer:
        """Return the player that has the episode, which is replayed if it was lost; raises EnvironmentFault."""
        tried: dict[int, object] = {}
        while self._player is None or self._player.lost:
            player = await self._players.live(self._place)
            try:
                played = Replay(self.answers, self.stepped, self._digests)
                opened = await player.call("open", self._key, self.spec, played)
            except ResponseLostError:
                continue
            except EnvironmentFault as fault:
                other = self._players.elsewhere(self._place, tried, fault)
                if other is None:
                    raise
                self._place.episodes, other.episodes = self._place.episodes - 1, other.episodes + 1
                self._place = other
                continue
            self._players.note_start(self._place, tried)
            self.prompt, self._digests = NOTHING, []
            self._take(opened)
            self._player = player
        return self._player

    def _take(self, progress: Progress) -> None:
        for name, value in progress.state.items():
            setattr(self, name, value)
        if progress.prompt is not None:
            self.prompt = changed_prompt(self.prompt, progress.prompt)
        self._digests += progress.digests

    async def _call_turn(self, params: Mapping[str, Any]) -> tuple[RunningPlayer, Any]:
        """Return the player and its answer to the next turn; a turn whose player died is asked again."""
        while True:
            player, self._player = await self.ensure(), None  # cancelled below, the state would be unknown
            first = self.runtime.engine.weights.first
            try:
                return player, await player.call("turn", self._key, params, self._players.demands, first)
            except ResponseLostError:
                self.runtime.counters["turns_interrupted"] += 1

    async def _request(self, params: Mapping[str, Any]) -> Generation:
        """Have the player ask the engine once, and step at once if it need not ask again."""
        player, answer = await self._call_turn(params)
        weights = self.runtime.engine.weights
        self._player = player
        if isinstance(answer, Generation):  # the player does not ask again
            again = int(answer.finish_reason is FinishReason.ABORT)
            self._place.earlier = self._place.earlier.plus(UNUSED._replace(retries=again))
            return answer
        self._played = answer, read_turn(answer.turn, self.prompt)
        generation = self._played[1].generation
        weights.learn(generation)
        return generation

    async def step(self, generation: Generation, engine_s: float = 0.0) -> Turn:
        """Take over the turn that the player has played, with the engine's time as the player measured it."""
        progress, turn = self._played
        self._take(progress)
        self.answers.append(tuple(turn.generation.token_ids))
        self.stepped.append(turn.stepped)
        self._players.turns += 1
        return turn

    async def close(self) -> None:
        self._place.episodes -= 1
        if (player := self._place.player) is not None:
            with suppress(ResponseLostError):
                await player.call("close", self._key)
