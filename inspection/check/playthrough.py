"""Plays one episode with a scripted player, and replays it."""

from dataclasses import dataclass, field

from envs.base import StepInfo, text_of
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.play.memory import Conversation, Message, build_memory, write_facts
from rollout.spec import EpisodeSpec
from rollout.workers.reply import EnvReply
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

    @property
    def infos(self) -> list[StepInfo]:
        """What every step said."""
        return [reply.info for reply in self.replies if reply.info is not None]

    @property
    def done(self) -> bool:
        """Whether the episode ended."""
        return self.replies[-1].done


async def play(trial: Trial, settings: RolloutSettings, episode: EpisodeSpec, player: str, most: int) -> Playthrough:
    """Play from a reset to the end or for `most` turns; raises SlimeVerlogError if environment or player fail."""
    conversation = Conversation(build_memory(settings.memory) if settings.history == "window" else None)
    found = Playthrough(player)

    def show(reply: EnvReply) -> None:
        if not reply.done:
            conversation.show(reply)
            if conversation.wants_notes():
                conversation.noted(write_facts(reply.facts))
                conversation.show(reply)
        found.replies.append(reply)
        found.prompt_chars.append(sum(len(text_of(message)) for message in conversation.messages))

    show(await trial.reset(episode))
    found.first_prompt = list(conversation.messages)
    while not found.done and len(found.answers) < most:
        seed = int(episode.env.metadata["seed"]) * 1009 + len(found.answers)
        answer = await trial.suggest(episode, player, seed)
        shown = found.replies[-1].observation
        try:
            reply = await trial.step(episode, answer)
        except EnvironmentFault as error:
            if not found.answers:
                raise
            where = f"turn {len(found.answers) + 1} of {player} play, seed {episode.env.metadata['seed']}"
            raise type(error)(f"{error} ({where})") from error
        assert reply.info is not None
        found.answers.append(answer)
        conversation.answered(shown, answer, reply.info["valid_action"], reply.info["executed_action"])
        show(reply)
    return found


async def replay_difference(trial: Trial, episode: EpisodeSpec, played: Playthrough) -> int | None:
    """The first step at which the same responses show something else (0 is the reset); None if there is none."""
    first, *others = (reply.digest for reply in played.replies)
    if (await trial.reset(episode)).digest != first:
        return 0
    for step, (answer, expected) in enumerate(zip(played.answers, others, strict=True), 1):
        if (await trial.step(episode, answer)).digest != expected:
            return step
    return None
