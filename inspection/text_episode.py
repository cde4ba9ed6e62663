"""Plays episodes with players that read messages instead of tokens: scripted ones, people, chat models.

The environment, the memory and the limits are those of a rollout; there is neither a tokenizer nor an engine.
"""

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.errors import EngineError, EnvironmentFault
from rollout.evaluate import after_refusal
from rollout.play.memory import Conversation, Memory, Message, asks_for_notes, build_memory, write_facts
from rollout.spec import EpisodeSpec
from rollout.tokens.image_files import data_uri, read_image
from rollout.transcript import Transcript
from rollout.turn import StopReason
from rollout.workers.pool import EnvPool, EnvSession

Player = Callable[[EnvSession, Sequence[Message], int], Awaitable[str]]
"""Responds to a prompt, given the environment's session, the prompt's messages and the turn's index."""
UNMOVED = {"executed_action": "", "valid_action": True, "reward": 0.0, "terminated": False, "truncated": False}
"""What is recorded of a turn that the environment does not get."""


def scripted(name: str) -> Player:
    """Return the player `random` or `expert` of the environment."""

    async def respond(session: EnvSession, messages: Sequence[Message], index: int) -> str:
        if asks_for_notes(messages):
            return write_facts(session.reply.facts if session.reply is not None else ())
        return await session.suggest(name, int(session.spec.metadata["seed"]) * 1009 + index)

    return respond


async def play_text_episode(
    pool: EnvPool, settings: RolloutSettings, spec: EpisodeSpec, player: Player
) -> dict[str, Any]:
    """Play one episode to its end and return its facts, as `rollout.transcript.Transcript.facts` describes them.

    An environment that is lost, or a scripted player that fails, ends the episode with a `fault`. A prompt that is too
    long for a chat model ends it as `CONTEXT`. A game without a limit ends after `rollout.spec.DEFAULT_MAX_TURNS`.
    """
    transcript, session, fault, stop = Transcript(), None, None, StopReason.FAILED
    memory = build_memory(settings.memory) if settings.history == "window" else None
    try:
        session = await pool.open(spec.env)
        stop = await _play(session, memory, player, transcript, session.turn_limit)
    except EnvironmentFault as error:
        fault = str(error)
    except EngineError as error:
        stop, fault = after_refusal(error, len(transcript.turns))
    finally:
        if session is not None:
            await session.close()
    return transcript.facts(spec, stop, fault)


async def _play(
    session: EnvSession, memory: Memory | None, player: Player, transcript: Transcript, max_turns: int | None
) -> StopReason:
    conversation = Conversation(memory)
    transcript.tools = session.reply.tools if session.reply is not None else ()
    for index in itertools.count() if max_turns is None else range(max_turns):
        assert session.reply is not None
        shown = session.reply.observation
        conversation.show(session.reply)
        if conversation.wants_notes():
            # The environment does not get notes.
            messages = list(conversation.show(session.reply, notes=True))
            response = await player(session, messages, index)
            conversation.noted(response)
            notes = {"notes": conversation.notes, "summary": conversation.facts_kept()}
            known = {**(session.reply.info or {}), **UNMOVED, **notes}
            transcript.add(messages, images_of(messages), response, known)
            conversation.show(session.reply)
        messages = list(conversation.messages)
        response = await player(session, messages, index)
        info = (await session.step(response)).info
        assert info is not None
        conversation.answered(shown, response, info["valid_action"], info["executed_action"])
        transcript.add(messages, images_of(messages), response, {**info, "notes": conversation.inline_notes})
        if info["terminated"]:
            return StopReason.TERMINATED
        if info["truncated"]:
            return StopReason.TIME_LIMIT
    return StopReason.MAX_TURNS


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the images in the messages, in order, as `data:` URIs."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return [data_uri(read_image(part["image"])) for parts in contents for part in parts if part["type"] == "image"]
