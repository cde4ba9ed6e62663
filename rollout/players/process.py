"""A player: a process that plays episodes with its own event loop, tokenizer, engine client and environment workers.

It does what the manager asks over one connection, and ends when that closes. `launch` starts it: as a guarded process
of this machine, or as a Ray actor if this process belongs to a Ray cluster.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rollout.errors import PlayerError, SlimeVerlogError
from rollout.play.build import build_runtime
from rollout.play.clock import Demands
from rollout.play.held_out import play_episode
from rollout.play.loop import LiveEpisode
from rollout.play.opening import open_episode
from rollout.play.parts import Runtime
from rollout.players.wire import NOTHING, Link, PromptChange, prompt_change, turn_values
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation
from rollout.workers.hosts import end_guarded, start_guarded
from rollout.workers.utilization import ProcessUsage

START_S = 600.0
"""Seconds in which Ray must have started an actor."""
HELLO_S = 10.0
"""Seconds in which whoever connects must have shown the token."""
REPORT_S = 0.01
"""Seconds after which a frame reports again what the player has used."""


class EndedEarlyError(Exception):
    """A player ended before it had connected; another one may be started."""


class Report(NamedTuple):
    """What the player has counted; it goes with a frame, so a turn never arrives before the faults on its way."""

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
    turn: list[Any] | None = None
    """`turn_values` of the turn that was played."""


class Player:
    """Runs the calls that arrive, each in its own task. The methods without underscore are what can be called."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._link = Link(self._receive, self.ended.set, self._report)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runtime: Runtime | None = None
        self._reported: Counter[str] = Counter()
        self._reported_at = 0.0
        self._episodes: dict[int, LiveEpisode] = {}
        self._engine_s: defaultdict[int, float] = defaultdict(float)
        """Seconds of the requests for an episode's next turn, by the episode's key."""

    async def serve(self, connection: socket.socket) -> None:
        """Serve until the connection closes."""
        connection.set_inheritable(False)
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=connection)
        await self.ended.wait()
        for task in self._tasks.values():
            task.cancel()
        if self._runtime is not None:
            await self._runtime.close()

    def _receive(self, messages: list[Any], _: None) -> None:
        for number, method, arguments in messages:
            if method == "cancel":
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            else:
                self._tasks[number] = asyncio.create_task(self._answer(number, method, arguments))

    async def _answer(self, number: int, method: str, arguments: Sequence[Any] | Exception) -> None:
        try:
            if isinstance(arguments, Exception):  # what the manager wanted to send could not be pickled
                raise arguments
            self._link.send((number, True, await getattr(self, method)(*arguments)))
        except Exception as error:
            self._link.send((number, False, _portable(error)))
        finally:
            del self._tasks[number]

    def _report(self) -> Report | None:
        if self._runtime is None:
            return None
        faults = self._runtime.fault_counts()
        new, now = faults - self._reported, time.monotonic()
        if not new and now - self._reported_at < REPORT_S:
            return None
        self._reported, self._reported_at = faults, now
        return Report(new, self._runtime.usage()[0])

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

        A response that was aborted or does not meet the demands is returned without its tokens; it is not stepped.
        `first_version` is what the manager knows of `ActorWeights.first`.
        """
        self._note_version(first_version)
        episode = self._episodes[key]
        before, known = episode.prompt, len(episode.digests)
        began = time.perf_counter()
        generation = await episode.generate(params, gives_up=lambda: True)
        self._engine_s[key] += time.perf_counter() - began
        if generation.finish_reason is FinishReason.ABORT or not demands.met_by(generation):
            return replace(generation, token_ids=(), log_probs=(), text="", meta_info={})
        turn = await episode.step(generation, self._engine_s.pop(key))
        changed = None if episode.prompt is before else prompt_change(before, episode.prompt)
        return Progress(_state(episode), changed, episode.digests[known:], turn_values(turn))

    async def close(self, key: int) -> None:
        """Close the episode's environment."""
        self._engine_s.pop(key, None)
        if (episode := self._episodes.pop(key, None)) is not None:
            await episode.close()

    def _note_version(self, first: int | None) -> None:
        weights = self.runtime.engine.weights
        weights.first = first if weights.first is None else weights.first

    async def evaluate(self, spec: EpisodeSpec, first_version: int | None) -> tuple[Any, list[Any]]:
        """Play a whole held-out episode; return its result without turns, and each turn with its prompt's change."""
        self._note_version(first_version)
        result = await play_episode(self.runtime, spec)
        before = [NOTHING, *(turn.prompt for turn in result.turns)]
        pairs = zip(before, result.turns, strict=False)
        return replace(result, turns=()), [(turn_values(turn), prompt_change(old, turn.prompt)) for old, turn in pairs]


def _state(episode: LiveEpisode) -> Mapping[str, Any]:
    return {name: getattr(episode, name) for name in STATE}


def _portable(error: Exception) -> Exception:
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
    """A player as a Ray actor, on any node; it connects to the manager and shows the token that it was given."""

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
    died: Awaitable[Any] | None = None
    """Ends or raises when a process on another node is gone, which the connection need not show."""

    async def connect(self, link: Link) -> None:
        """Put the connection behind `link`."""
        await asyncio.get_running_loop().create_connection(lambda: link, sock=self.connection)
        if self.died is not None:
            # Reads the exception, which asyncio would otherwise log as never retrieved.
            gone = lambda task: (task.cancelled() or task.exception(), link.abort())
            asyncio.ensure_future(self.died).add_done_callback(gone)


async def launch(number: int) -> Launched:
    """Start player `number`; raises PlayerError if Ray does not, or EndedEarlyError."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return await _launch_actor(ray, number)
    guard, connection = await asyncio.to_thread(start_guarded, "rollout.players.process")
    return Launched(connection, lambda: end_guarded(guard))


async def _launch_actor(ray: Any, number: int) -> Launched:
    token = secrets.token_bytes(32)
    with socket.create_server((ray.util.get_node_ip_address(), 0)) as listener:
        listener.setblocking(False)
        actor = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(PlayerActor).remote()
        playing = asyncio.ensure_future(actor.play.remote(listener.getsockname()[:2], token))
        accepting = asyncio.create_task(_accept(listener, token))
        try:
            await asyncio.wait({playing, accepting}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                return Launched(accepting.result(), lambda: ray.kill(actor), playing)
            raise _reason(ray, number, playing.exception() if playing.done() else None)
        except BaseException:
            playing.cancel()
            ray.kill(actor)
            raise
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)  # before its socket closes


def _reason(ray: Any, number: int, problem: BaseException | None) -> Exception:
    """Why an actor has not connected, by the error with which it ended."""
    if problem is None:
        why = (
            f"it has not connected for {START_S:g} s; `ray status` shows whether a node has a free CPU: if none has, "
            "lower rollout_processes, otherwise look for slow imports"
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


async def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Wait for a connection that shows the token; nothing that another one sends is read."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        shown = b""
        try:
            async with asyncio.timeout(HELLO_S):
                while len(shown) < len(token) and (more := await loop.sock_recv(connection, len(token) - len(shown))):
                    shown += more
        except (TimeoutError, OSError):
            shown = b""
        if hmac.compare_digest(shown, token):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()
