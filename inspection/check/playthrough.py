"""Plays one episode with a scripted player and measures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspection.text import text_of
from rollout.bridge.settings import RolloutSettings
from rollout.errors import EnvironmentFault
from rollout.play.memory import Conversation, Message, build_memory, write_facts
from rollout.spec import EpisodeSpec
from rollout.workers.reply import EnvReply, digest
from rollout.workers.trial import Trial


@dataclass
class Playthrough:
    """What one episode showed, and how long it took."""

    player: str
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Of the reset and of every step."""
    rewards: list[float] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    prompt_chars: list[int] = field(default_factory=list)
    images: int = 0
    """Most images of one observation."""
    first_prompt: list[Message] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    deterministic: bool = True
    done: bool = False
    progression: float = 0.0

    def see(self, reply: EnvReply, messages: Sequence[Message]) -> None:
        """Note a reply and the prompt that shows it."""
        text = reply.observation["text"]
        whole = "\n".join([text["short_term_context"], text["long_term_context"]])
        shown = "\n".join(text_of(message) for message in reply.messages)
        self.observations.append(max(whole, shown, key=len))
        images = (reply.observation.get("multi_modal_data") or {}).values()
        self.images = max(self.images, sum(map(len, images)))
        self.prompt_chars.append(sum(len(text_of(message)) for message in messages))
        self.digests.append(digest(reply))
        self.deterministic = reply.deterministic
        if reply.info is not None:
            self.step_s.append(reply.seconds)
            self.rewards.append(float(reply.info["reward"]))
            self.valid.append(reply.info["valid_action"])
            self.progression, self.done = float(reply.info["progression"]), reply.done


async def play(trial: Trial, settings: RolloutSettings, episode: EpisodeSpec, player: str, most: int) -> Playthrough:
    """Play from a reset to the end, or for `most` turns; the environment has been built.

    Raises:
        SlimeVerlogError: the environment or the player failed; one sentence.
    """
    conversation = Conversation(build_memory(settings.memory) if settings.history == "window" else None)
    found = Playthrough(player)
    reply = await trial.reset(episode)
    found.reset_s, found.tools = reply.seconds, reply.tools
    conversation.show(reply)
    found.first_prompt = list(conversation.messages)
    found.see(reply, conversation.messages)
    while not found.done and len(found.answers) < most:
        seed = int(episode.env.metadata["seed"]) * 1009 + len(found.answers)
        answer = await trial.suggest(episode, player, seed)
        shown = reply.observation
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
        if not reply.done:
            conversation.show(reply)
            if conversation.wants_notes():
                conversation.noted(write_facts(reply.facts))
                conversation.show(reply)
        found.see(reply, conversation.messages)
    return found


async def replay_difference(trial: Trial, episode: EpisodeSpec, played: Playthrough) -> int | None:
    """The first step at which the same responses show something else (0 is the reset); None if there is none."""
    if digest(await trial.reset(episode)) != played.digests[0]:
        return 0
    for step, (answer, expected) in enumerate(zip(played.answers, played.digests[1:], strict=True), 1):
        if digest(await trial.step(episode, answer)) != expected:
            return step
    return None
