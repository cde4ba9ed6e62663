"""Connects a player with the episodes of one point: `play(spec)` plays one and returns its facts."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from inspection.evaluation.chat import ChatPlayer
from inspection.evaluation.players import Contestant, Kind
from inspection.evaluation.points import Point
from inspection.text_episode import Player, play_text_episode, scripted
from rollout.evaluate import play_episode
from rollout.play.engine import EngineClient
from rollout.play.runtime import build_runtime
from rollout.spec import EpisodeSpec
from rollout.workers.pool import EnvPool
from slime_verlog import ConfigError

Play = Callable[[EpisodeSpec], Awaitable[dict[str, Any]]]

MAX_RESPONSE_LEN = 512
PROBE_S = 10.0
"""Seconds to wait for any answer from an address."""


@contextmanager
def engine_of(contestant: Contestant, options: Namespace, at_once: int) -> Iterator[Namespace]:
    """`address` of the engine and the lengths to ask it for; serves a folder while the context is open.

    Raises:
        ConfigError: the folder's model cannot be served.
    """
    longest, context = options.max_response_len or MAX_RESPONSE_LEN, options.max_context_len
    if contestant.kind is not Kind.FOLDER:
        yield Namespace(address=contestant.source, max_response_len=longest, max_context_len=context)
        return
    import torch
    from transformers.utils import logging

    from embedded.engine.engine import EngineOptions
    from embedded.engine.server import EngineServer

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    serve = EngineOptions(
        model_path=contestant.source,
        max_running_requests=at_once,
        context_length=context,
        device="cuda" if torch.cuda.is_available() else "cpu",
        seed=options.seed,
    )
    with EngineServer(serve) as server:
        context = server.engine.decoder.context_length
        longest = options.max_response_len or min(MAX_RESPONSE_LEN, max(1, context // 2))
        yield Namespace(address=server.url, max_response_len=longest, max_context_len=context)


@asynccontextmanager
async def seat(contestant: Contestant, point: Point, options: Namespace, engine: Namespace) -> AsyncIterator[Play]:
    """A function that plays one episode of this point."""
    if contestant.kind is Kind.SCRIPTED:
        async with _text_seat(point, scripted(contestant.name)) as play:
            yield play
    elif contestant.kind is Kind.CHAT:
        client = EngineClient(engine.address, point.settings.engine, use_proxy=True)
        player = ChatPlayer(client, contestant.name, options.api_key_env, options.temperature, engine.max_response_len)
        try:
            await _probe(f"{engine.address}/models", use_proxy=True)
            async with _text_seat(point, player) as play:
                yield play
        finally:
            await client.close()
    else:
        async with _token_seat(contestant, point, options, engine) as play:
            yield play


@asynccontextmanager
async def _text_seat(point: Point, player: Player) -> AsyncIterator[Play]:
    pool = EnvPool(point.settings)
    try:
        yield lambda spec: play_text_episode(pool, point.settings, spec, player)
    finally:
        pool.close()


@asynccontextmanager
async def _token_seat(
    contestant: Contestant, point: Point, options: Namespace, engine: Namespace
) -> AsyncIterator[Play]:
    """Episodes as a rollout plays them: the same token ids, sampling and limits."""
    args = _rollout_args(contestant, point, options, engine)
    runtime = await asyncio.to_thread(build_runtime, args)
    runtime.engine = EngineClient(engine.address, runtime.settings.engine)

    async def play(spec: EpisodeSpec) -> dict[str, Any]:
        return (await play_episode(runtime, spec, detailed=True)).facts()

    try:
        if contestant.kind is Kind.SGLANG:
            await _probe(f"{engine.address}/health", use_proxy=False)
        yield play
    finally:
        await runtime.close()


async def _probe(url: str, use_proxy: bool) -> None:
    """Check that something answers, if only with an error, since the client itself would try for a minute.

    Raises:
        ConfigError: nothing does.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S), trust_env=use_proxy) as session,
            session.get(url),
        ):
            pass
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = str(error) or f"no answer within {PROBE_S:g} s"
        raise ConfigError(f"no engine answers at {url}: {reason}") from error


def _rollout_args(contestant: Contestant, point: Point, options: Namespace, engine: Namespace) -> Namespace:
    """slime's `args` as the rollout reads them: flags and the YAML's top-level keys."""
    return Namespace(
        hf_checkpoint=contestant.tokenizer,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
        global_batch_size=1,
        rollout_max_response_len=engine.max_response_len,
        rollout_max_context_len=engine.max_context_len,
        rollout_temperature=options.temperature,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_seed=options.seed,
        # A seed per turn; other engines than ours would have to be started for it.
        sglang_enable_deterministic_inference=contestant.kind is Kind.FOLDER,
        **point.config,
    )
