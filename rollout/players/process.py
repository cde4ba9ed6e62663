"""A player: a process that plays episodes with its own event loop, tokenizer, engine client and
environment workers.

It does what the manager asks over one connection, and ends when that closes. `launch` starts it: as
a guarded process of this machine, or as a Ray actor if this process belongs to a Ray cluster.
"""

import asyncio
import gc
import hmac
import os
import pickle
import re
import secrets
import socket
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from rollout.errors import EnvironmentFault, PlayerError, SlimeVerlogError
from rollout.play.build import build_runtime
from rollout.play.clock import Demands
from rollout.play.episode import Episode, open_episode
from rollout.play.held_out import EpisodeResult, play_episode
from rollout.play.parts import Runtime
from rollout.players.wire import NOTHING, PromptChange, dumps, prompt_change
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation, Turn
from rollout.workers.child import Channel, end_guarded, start_guarded
from rollout.workers.utilization import ProcessUsage

START_S = 600.0
"""Seconds in which Ray must have started an actor."""
HELLO_S = 10.0
"""Seconds in which whoever connects must have shown the token."""
REPORT = -1
"""The number of a message that is a `Report`, not the reply to a call."""
REPORT_S = 0.01
"""Seconds after which a reply comes with another report of what the player has used."""


class EndedEarlyError(Exception):
    """A player ended before it had connected; another one may be started."""


class Report(NamedTuple):
    """What the player has counted; sent before a reply, so a turn never arrives before the faults
    on its way."""

    faults: Counter[str]
    """Faults and retries since the last report."""
    usage: ProcessUsage


STATE = ("index", "steps", "stop", "has_next_prompt", "total_reward")
"""The attributes of an episode by which the manager decides."""


class Progress(NamedTuple):
    """An episode after it was opened or stepped."""

    state: Mapping[str, Any]
    """Its `STATE`."""
    prompt: PromptChange | None
    """The next prompt; None if it is still the one before."""
    digests: Sequence[str]
    """The digests that are new."""
    turn: Turn | None = None
    """The turn that was played, without its prompt, which the manager has."""


class Player(Channel):
    """Runs the calls that arrive, each in its own task. The public coroutines are what can be
    called."""

    dumps = staticmethod(dumps)

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runtime: Runtime | None = None
        self._reported: Counter[str] = Counter()
        self._reported_at = 0.0
        self._episodes: dict[int, Episode] = {}
        self._engine_s: defaultdict[int, float] = defaultdict(float)
        """Seconds of the requests for an episode's next turn, by the episode's key."""

    async def serve(self, connection: socket.socket) -> None:
        """Serve until the connection closes."""
        connection.set_inheritable(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)
        await self.ended.wait()
        for task in self._tasks.values():
            task.cancel()
        if self._runtime is not None:
            await self._runtime.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()

    def received(self, number: int, what: str, value: Sequence[Any]) -> None:
        if what != "cancel":
            self._tasks[number] = asyncio.create_task(self._answer(number, what, value))
        elif (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _answer(self, number: int, method: str, arguments: Sequence[Any]) -> None:
        try:
            self.send(number, True, await getattr(self, method)(*arguments))
        except BaseException as error:  # a cancelled call gets a reply, too
            self.send(number, False, _portable(error))
        finally:
            del self._tasks[number]

    def send(self, *message: Any) -> None:
        """Send a message, after a report of what was counted until now."""
        if self._runtime is not None:
            faults = self._runtime.fault_counts()
            now = time.monotonic()
            new = faults - self._reported
            if new or now - self._reported_at >= REPORT_S:
                self._reported = faults
                self._reported_at = now
                super().send(REPORT, True, Report(new, self._runtime.usage()[0]))
        super().send(*message)

    @property
    def runtime(self) -> Runtime:
        assert self._runtime is not None, "the player was not started"
        return self._runtime

    async def start(self, args: Any) -> tuple[str, int]:
        """Build the runtime; return the node's name and the process's id."""
        self._runtime = await asyncio.to_thread(build_runtime, args)
        gc.collect()
        gc.freeze()
        return socket.gethostname(), os.getpid()

    async def ping(self) -> None:
        """Show that the event loop runs, and what was used up to now."""
        self._reported_at = 0.0

    async def open(self, key: int, spec: EpisodeSpec, replay: Replay) -> Progress:
        """Start the episode, or replay what was played of it."""
        await self.close(key)  # what is left of it if the manager gave up waiting
        self._episodes[key] = episode = await open_episode(self.runtime, spec, replay)
        return Progress(_state(episode), prompt_change(NOTHING, episode.prompt), episode.digests)

    async def turn(
        self, key: int, params: Mapping[str, Any], demands: Demands, first_version: int | None
    ) -> Progress | Generation:
        """Ask the engine once, and step the environment with the response.

        A response that was aborted or does not meet the demands is returned without its tokens; it
        is not stepped. `first_version` is what the manager knows of `ActorWeights.first`.
        """
        self._note_version(first_version)
        episode = self._episodes[key]
        before = episode.prompt
        known = len(episode.digests)
        began = time.perf_counter()
        generation = await episode.generate(params, gives_up=lambda: True)
        self._engine_s[key] += time.perf_counter() - began
        if generation.finish_reason is FinishReason.ABORT or not demands.met_by(generation):
            return replace(generation, token_ids=(), log_probs=(), text="", meta_info={})
        turn = await episode.step(generation, self._engine_s.pop(key))
        changed = None if episode.prompt is before else prompt_change(before, episode.prompt)
        return Progress(_state(episode), changed, episode.digests[known:], turn)

    async def close(self, key: int) -> None:
        """Close the episode's environment."""
        self._engine_s.pop(key, None)
        if (episode := self._episodes.pop(key, None)) is not None:
            await episode.close()

    def _note_version(self, first: int | None) -> None:
        weights = self.runtime.engine.weights
        weights.first = first if weights.first is None else weights.first

    async def evaluate(
        self, spec: EpisodeSpec, first_version: int | None
    ) -> tuple[EpisodeResult, list[PromptChange]]:
        """Play a whole held-out episode; return its result, and the changes of its prompts.

        Raises EnvironmentFault if its environment did not start.
        """
        self._note_version(first_version)
        result = await play_episode(self.runtime, spec)
        if result.fault is not None and not result.turns:
            raise EnvironmentFault(result.fault)
        prompts = [NOTHING, *(turn.prompt for turn in result.turns)]
        return result, [prompt_change(old, new) for old, new in pairwise(prompts)]


def _state(episode: Episode) -> Mapping[str, Any]:
    return {name: getattr(episode, name) for name in STATE}


def _portable(error: BaseException) -> Exception:
    """The error if the manager can unpickle it, otherwise its text with the traceback."""
    try:
        if isinstance(error, SlimeVerlogError):
            pickle.loads(pickle.dumps(error))
            return error
    except Exception:
        pass
    return RuntimeError("".join(traceback.format_exception(error)))


def main() -> None:
    """Entry of a player on this machine: `sys.argv[1]` is its socket."""
    asyncio.run(Player().serve(socket.socket(fileno=int(sys.argv[1]))))


class PlayerActor:
    """A player as a Ray actor, on any node; it connects to the manager and shows the token that it
    was given."""

    def play(self, address: tuple[str, int], token: bytes) -> None:
        """Play until the manager closes the connection."""
        connection = socket.create_connection(address)
        connection.sendall(token)
        asyncio.run(Player().serve(connection))


@dataclass(frozen=True)
class Launched:
    """A process that was started, and the connection to it."""

    connection: socket.socket
    end: Callable[[], None]
    """Ends the process, and the connection with it."""
    died: asyncio.Future[Any] | None = None
    """Done when a process on another node is gone, which the connection need not show."""

    async def connect(self, channel: Channel) -> None:
        """Put the connection behind `channel`."""
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=self.connection)
        if self.died is not None:
            # Reads the exception, which asyncio would otherwise log as never retrieved.
            self.died.add_done_callback(
                lambda task: (task.cancelled() or task.exception(), channel.abort())
            )


async def launch(number: int) -> Launched:
    """Start player `number`; raises PlayerError if Ray does not, or EndedEarlyError."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return await _launch_actor(ray, number)
    guard, connection = await asyncio.to_thread(start_guarded, "rollout.players.process:main")
    return Launched(connection, lambda: end_guarded(guard))


async def _launch_actor(ray: Any, number: int) -> Launched:
    token = secrets.token_bytes(32)
    connected: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        partial(_accept, token, connected), ray.util.get_node_ip_address()
    )
    actor = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(
        PlayerActor
    ).remote()
    playing = asyncio.ensure_future(actor.play.remote(server.sockets[0].getsockname()[:2], token))
    try:
        await asyncio.wait(
            {playing, connected}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if connected.done():
            return Launched(connected.result(), lambda: ray.kill(actor), playing)
        raise _reason(ray, number, playing.exception() if playing.done() else None)
    except BaseException:
        playing.cancel()
        ray.kill(actor)
        raise
    finally:
        server.close()


def _reason(ray: Any, number: int, problem: BaseException | None) -> Exception:
    """Why an actor has not connected, by the error with which it ended."""
    if problem is None:
        why = (
            f"it has not connected for {START_S:g} s; `ray status` shows whether a node has a free "
            "CPU: if none has, lower rollout_processes, otherwise look for slow imports"
        )
    else:
        told = re.sub(r"\x1b\[[\d;]*m", "", str(problem)).strip()
        lacks = re.search("ModuleNotFoundError|ImportError", told) is not None
        if not lacks and isinstance(problem, ray.exceptions.RayActorError):
            return EndedEarlyError(told.splitlines()[0])
        node = re.search(r"\bip=([^,)]+)", told)
        why = f"{told.splitlines()[-1]} on {node[1] if node else 'its node'}"
        why += "; every node needs the same packages" if lacks else ""
    return PlayerError(f"rollout process {number} could not be started as a Ray actor: {why}")


async def _accept(
    token: bytes,
    connected: asyncio.Future[socket.socket],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Hand a connection over if it shows the token; what another one sends is not looked at."""
    shown = b""
    with suppress(TimeoutError, OSError, EOFError):
        async with asyncio.timeout(HELLO_S):
            shown = await reader.readexactly(len(token))
    if hmac.compare_digest(shown, token) and not connected.done():
        connection = writer.get_extra_info("socket").dup()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.set_result(connection)
    writer.close()
