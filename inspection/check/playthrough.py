"""Plays an episode with a scripted player, and plays it again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from envs.base import StepInfo, text_of
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.play.conversation import Conversation
from rollout.play.memory import Message, memory_of
from rollout.play.notes import write_facts
from rollout.spec import EpisodeSpec
from rollout.turn import EnvReply
from rollout.workers.abilities import suggest
from rollout.workers.trial import Trial


@dataclass
class Playthrough:
    """What one episode showed."""

    player: str
    replies: list[EnvReply] = field(default_factory=list)
    """To the reset, and to every step."""
    answers: list[str] = field(default_factory=list)
    prompt_chars: list[int] = field(default_factory=list)
    first_prompt: list[Message] = field(default_factory=list)
    notes: int = 0
    """Turns in which the player was asked for notes."""

    @property
    def infos(self) -> list[StepInfo]:
        """What every step said."""
        return [reply.info for reply in self.replies if reply.info is not None]

    @property
    def rewards(self) -> list[float]:
        return [float(info["reward"]) for info in self.infos]

    @property
    def done(self) -> bool:
        """Whether the episode ended."""
        return self.replies[-1].done


async def play(
    trial: Trial, settings: RolloutSettings, episode: EpisodeSpec, player: str, most: int
) -> Playthrough:
    """Play from a reset to the end or for `most` turns; raises SlimeVerlogError if environment or
    player fail."""
    conversation = Conversation(memory_of(settings))
    found = Playthrough(player)
    _show(conversation, await trial.reset(episode), found)
    found.first_prompt = list(conversation.messages)
    episode_seed = int(episode.env.metadata["seed"])
    while not found.done and len(found.answers) < most:
        answer = await trial.ask(
            episode, suggest, player, episode_seed * 1009 + len(found.answers), True
        )
        shown = found.replies[-1].observation
        try:
            reply = await trial.step(episode, answer)
        except EnvironmentFault as error:
            if not found.answers:
                raise
            where = f"turn {len(found.answers) + 1} of {player} play, seed {episode_seed}"
            raise type(error)(f"{error} ({where})") from error
        assert reply.info is not None
        found.answers.append(answer)
        conversation.answered(
            shown, answer, reply.info["valid_action"], reply.info["executed_action"]
        )
        _show(conversation, reply, found)
    return found


def _show(conversation: Conversation, reply: EnvReply, found: Playthrough) -> None:
    """Add a reply to the conversation, and write notes if the prompt asks for them."""
    if not reply.done:
        conversation.show(reply)
        if conversation.wants_notes():
            found.notes += 1
            found.prompt_chars.append(_count_characters(conversation.show(reply, notes=True)))
            conversation.noted(write_facts(reply.facts))
            conversation.show(reply)
    found.replies.append(reply)
    found.prompt_chars.append(_count_characters(conversation.messages))


def _count_characters(messages: Sequence[Message]) -> int:
    return sum(len(text_of(message)) for message in messages)


async def replay_difference(
    trial: Trial, episode: EpisodeSpec, played: Playthrough, neighbour: EpisodeSpec | None = None
) -> int | None:
    """The first step at which the same responses show something else (0 is the reset); None if
    there is none.

    A `neighbour` is played in the same process meanwhile, as another slot is in training.
    """
    first, *others = (reply.digest for reply in played.replies)
    if (await trial.reset(episode)).digest != first:
        return 0
    if neighbour is not None:
        await trial.build(neighbour)
    over = True
    for step, (answer, expected) in enumerate(zip(played.answers, others, strict=True), 1):
        if neighbour is not None:
            if over:
                await trial.reset(neighbour)
            over = (await trial.step(neighbour, answer)).done
        if (await trial.step(episode, answer)).digest != expected:
            return step
    return None
