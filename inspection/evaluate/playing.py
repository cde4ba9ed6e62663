"""Connects a player with the episodes of one point of a sweep: serves a folder, opens clients and
environments.

Players that read messages instead of tokens (scripted ones, chat models) play here, without
tokenizer and engine, but with the environment, memory and limits of a rollout.
"""

import asyncio
import itertools
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

import aiohttp
from tqdm import tqdm

from inspection.evaluate.players import ChatPlayer, Kind, PlayerSpec
from inspection.evaluate.table import SweepPoint
from inspection.records import Record
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EngineError, EnvironmentFault
from rollout.play.build import build_runtime
from rollout.play.conversation import Conversation
from rollout.play.engine import EngineClient
from rollout.play.held_out import after_refusal, play_episode
from rollout.play.memory import Message, memory_of
from rollout.play.notes import asks_for_notes, write_facts
from rollout.play.transcript import Transcript
from rollout.spec import EpisodeSpec, Past
from rollout.tokens.image_files import data_uri, read_image
from rollout.turn import StopReason
from rollout.workers.pool import EnvPool, EnvSession
from slime_verlog import ConfigError

Play = Callable[[EpisodeSpec], Awaitable[Record]]

MAX_RESPONSE_LEN = 512
PROBE_S = 10.0  # seconds to wait for any answer from an address


@contextmanager
def open_engine(player: PlayerSpec, options: Namespace, at_once: int) -> Iterator[Namespace]:
    """Yield the engine's `address` and lengths; serves a model's folder meanwhile, or raises
    ConfigError."""
    longest = options.max_response_len or MAX_RESPONSE_LEN
    context = options.max_context_len
    if player.kind is not Kind.FOLDER:
        yield Namespace(address=player.source, max_response_len=longest, max_context_len=context)
        return
    import torch
    from transformers.utils import logging

    from embedded.engine.engine import EngineOptions
    from embedded.engine.server import EngineServer

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    engine_options = EngineOptions(
        model_path=player.source,
        max_running_requests=at_once,
        context_length=context,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=options.seed,
    )
    with EngineServer(engine_options) as server:
        context = server.engine.decoder.context_length
        longest = options.max_response_len or min(MAX_RESPONSE_LEN, max(1, context // 2))
        yield Namespace(address=server.url, max_response_len=longest, max_context_len=context)


@asynccontextmanager
async def open_player(
    player: PlayerSpec, point: SweepPoint, options: Namespace, engine: Namespace
) -> AsyncIterator[Play]:
    """Yield a function that plays one episode of this point and returns its record.

    With token ids, episodes are played as in a rollout: the same sampling and limits.
    """
    async with AsyncExitStack() as stack:
        if player.kind in (Kind.FOLDER, Kind.SGLANG):
            runtime = await asyncio.to_thread(
                build_runtime, _slime_args(player, point, options, engine)
            )
            runtime.engine = EngineClient(engine.address, runtime.settings.engine)
            stack.push_async_callback(runtime.close)
            if player.kind is Kind.SGLANG:
                await _probe(f"{engine.address}/health", use_proxy=False)

            async def play(spec: EpisodeSpec) -> Record:
                return (await play_episode(runtime, spec, detailed=True)).facts()

            yield play
            return
        pool = EnvPool(point.settings)
        stack.callback(pool.close)
        if player.kind is Kind.SCRIPTED:
            number = lambda spec: 0 if spec.past is None else spec.episode_id
            yield lambda spec: play_text_episode(
                pool, point.settings, spec, scripted(player.name, number(spec))
            )
            return
        client = EngineClient(engine.address, point.settings.engine, use_proxy=True)
        stack.push_async_callback(client.close)
        await _probe(f"{engine.address}/models", use_proxy=True)
        chat = ChatPlayer(
            client, player.name, options.api_key_env, options.temperature, engine.max_response_len
        )
        stack.callback(_report_faults, client)

        async def play_chat(spec: EpisodeSpec) -> Record:
            used = Counter[str]()
            facts = await play_text_episode(pool, point.settings, spec, partial(chat.respond, used))
            return {**facts, "usage": dict(used)}

        yield play_chat


def _slime_args(
    player: PlayerSpec, point: SweepPoint, options: Namespace, engine: Namespace
) -> Namespace:
    """slime's `args` as the rollout reads them: flags and the YAML's top-level keys."""
    return Namespace(
        **point.config,
        hf_checkpoint=player.tokenizer,
        rollout_seed=options.seed,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        global_batch_size=1,
        rollout_max_response_len=engine.max_response_len,
        rollout_max_context_len=engine.max_context_len,
        rollout_temperature=options.temperature,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        # A seed per turn; other engines than ours would have to be started for it.
        sglang_enable_deterministic_inference=player.kind is Kind.FOLDER,
    )


def _report_faults(client: EngineClient) -> None:
    if client.faults:
        kinds = ", ".join(f"{kind} {count}" for kind, count in client.faults.most_common())
        tqdm.write(
            f"{client.faults.total()} requests to the endpoint failed ({kinds})", file=sys.stderr
        )


async def _probe(url: str, use_proxy: bool) -> None:
    """Raise ConfigError if nothing answers, not even with an error; the client itself would try for
    a minute."""
    limit = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, trust_env=use_proxy) as session,
            session.get(url),
        ):
            pass
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = str(error) or f"no answer within {PROBE_S:g} s"
        raise ConfigError(f"no engine answers at {url}: {reason}") from error


Player = Callable[[EnvSession, Sequence[Message], int], Awaitable[str]]
"""Responds to a prompt, given the environment's session, the prompt's messages and the turn's
index."""
UNMOVED = {
    "executed_action": "",
    "valid_action": True,
    "reward": 0.0,
    "terminated": False,
    "truncated": False,
}
"""What is recorded of a turn that the environment does not get."""


def scripted(name: str, number: int = 0) -> Player:
    """Return the player `random` or `expert` of the environment; each `number` draws other random
    actions."""

    async def respond(session: EnvSession, messages: Sequence[Message], index: int) -> str:
        if asks_for_notes(messages):
            return write_facts(session.reply.facts if session.reply is not None else ())
        seed = int(session.spec.metadata["seed"]) * 1009 + index
        return await session.suggest(name, seed + number * 1_000_003)

    return respond


def after_replay(past: Past, player: Player) -> Player:
    """Return a player that first gives the recorded responses; it raises ConfigError as
    `Past.check`."""
    given = iter(enumerate(past.turns))

    async def respond(session: EnvSession, messages: Sequence[Message], index: int) -> str:
        past.check(session.digests, session.reply is None or session.reply.deterministic)
        number, turn = next(given, (0, None))
        if turn is None:
            return await player(session, messages, index)
        past.check_notes(number, asks_for_notes(messages))
        return turn["response"]

    return respond


async def play_text_episode(
    pool: EnvPool, settings: RolloutSettings, spec: EpisodeSpec, player: Player
) -> Record:
    """Play one episode to its end and return its facts, as
    `rollout.play.transcript.Transcript.facts` describes them.

    An environment that is lost, or a scripted player that fails, ends the episode with a `fault`. A
    prompt that is too long for a chat model ends it as `CONTEXT`. A game without a limit ends after
    `rollout.spec.DEFAULT_MAX_TURNS`.
    """
    transcript = Transcript()
    session = None
    fault = None
    stop = StopReason.FAILED
    conversation = Conversation(memory_of(settings))
    player = after_replay(spec.past, player) if spec.past is not None else player
    try:
        session = await pool.open(spec.env)
        stop = await _play(session, conversation, player, transcript)
    except EnvironmentFault as error:
        fault = str(error)
    except EngineError as error:
        stop, fault = after_refusal(error, transcript)
    finally:
        if session is not None:
            transcript.digests = session.digests
            await session.close()
    return transcript.facts(spec, stop, fault)


async def _play(
    session: EnvSession, conversation: Conversation, player: Player, transcript: Transcript
) -> StopReason:
    transcript.tools = session.reply.tools if session.reply is not None else ()
    limit = session.turn_limit
    for index in itertools.count() if limit is None else range(limit):
        assert session.reply is not None
        shown = session.reply.observation
        conversation.show(session.reply)
        if conversation.wants_notes():
            # The environment does not get notes.
            messages = list(conversation.show(session.reply, notes=True))
            response = await player(session, messages, index)
            conversation.noted(conversation.cut_notes(response))
            notes = {"notes": conversation.notes, "summary": conversation.facts_kept()}
            known = {**(session.reply.info or {}), **UNMOVED, **notes}
            transcript.add(messages, images_of(messages), response, known)
            conversation.show(session.reply)
        messages = list(conversation.messages)
        response = await player(session, messages, index)
        info = (await session.step(response)).info
        assert info is not None
        conversation.answered(shown, response, info["valid_action"], info["executed_action"])
        transcript.add(
            messages, images_of(messages), response, {**info, "notes": conversation.inline_notes}
        )
        if info["terminated"]:
            return StopReason.TERMINATED
        if info["truncated"]:
            return StopReason.TIME_LIMIT
    return StopReason.MAX_TURNS


def images_of(messages: Sequence[Record]) -> list[str]:
    """Return the images in the messages, in order, as `data:` URIs."""
    contents = [
        message["content"] for message in messages if isinstance(message.get("content"), list)
    ]
    return [
        data_uri(read_image(part["image"]))
        for parts in contents
        for part in parts
        if part["type"] == "image"
    ]
