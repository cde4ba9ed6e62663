"""Starts episodes, here or in a player, and plays recorded ones again."""

import asyncio

from rollout.errors import ConfigError, EncodingError, EnvironmentFault
from rollout.play.episode import Episode
from rollout.play.loop import LiveEpisode
from rollout.play.parts import Runtime
from rollout.play.prompts import Prompts
from rollout.play.whole_prompts import WholePrompts
from rollout.spec import EpisodeSpec, Replay
from rollout.turn import FinishReason, Generation
from rollout.workers.pool import ReplayError
from rollout.workers.reply import check_history


async def open_episode(
    runtime: Runtime, spec: EpisodeSpec, replay: Replay | None = None
) -> LiveEpisode:
    """Start an episode in this process or another one; with `replay`, give it the same responses
    again.

    Raises:
        EnvironmentFault: the environment could not be started, or its first prompt cannot be
            encoded or does not fit.
        ReplayError: a replay showed something else.
        EncodingError: the chat template does not show the environment's tools.
    """
    if runtime.players is not None:
        return await runtime.players.open(spec, replay)
    episode = await start_episode(runtime, spec)
    # An episode without responses starts afresh: nothing of it was handed out.
    if replay is not None and replay.answers:
        await _play_again(episode, replay)
    return episode


async def start_episode(
    runtime: Runtime, spec: EpisodeSpec, response_len: int | None = None
) -> Episode:
    """Start an episode's environment in this process and encode its first prompt. Raises as
    `open_episode`."""
    session = await runtime.pool.open(spec.env)
    try:
        assert session.reply is not None, "an open session has a reply"
        encoder = runtime.encoder_for(session.reply.tools)
        try:
            check_history(session.reply, runtime.settings.history)
            prompts_of = WholePrompts if session.reply.whole_prompts else Prompts
            prompts = prompts_of(runtime, spec, session, encoder, response_len)
            return await asyncio.to_thread(Episode, runtime, spec, session, prompts)
        except (EncodingError, ConfigError) as error:
            raise EnvironmentFault(f"{error}\n{session.describe()}") from error
    except BaseException:
        await session.close()
        raise


async def _play_again(episode: Episode, replay: Replay) -> None:
    """Give the episode its earlier responses; closes it and raises ReplayError if it shows
    something else."""
    try:
        if not episode.prompts.reply.deterministic:
            raise ReplayError(
                "the environment is not deterministic, so the episode cannot be replayed"
            )
        episode.session.replayed = True
        for token_ids, to_environment in zip(replay.answers, replay.stepped, strict=True):
            if episode.writes_notes is to_environment:
                raise ReplayError(
                    "the memory asks for notes at other turns than when the episode was played"
                )
            stop_id = token_ids[-1] if token_ids else None
            replayed = Generation(
                token_ids, [0.0] * len(token_ids), "", FinishReason.STOP, stop_id=stop_id
            )
            await episode.step(replayed)
        if episode.digests != list(replay.digests) or episode.stop is not None:
            raise ReplayError("the replayed episode differs from the original")
        episode.session.replayed = False
    except BaseException:
        await episode.close()
        raise
