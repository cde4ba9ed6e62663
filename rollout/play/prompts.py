"""The prompts of one episode: what its conversation shows, as token ids, and when the model writes
its notes."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from envs.base import Observation, StepInfo
from envs.plain_text import LONG_CHARS, MAX_CACHED_CHARS
from rollout.errors import EncodingError
from rollout.play.conversation import Conversation
from rollout.play.notes import SUMMARY_REQUEST, after_reasoning, measure_notes
from rollout.play.parts import Runtime
from rollout.spec import EpisodeSpec
from rollout.tokens.encoding import DeltaEncoder
from rollout.tokens.reading import Reading
from rollout.turn import EnvReply, Generation, Prompt, Turn
from rollout.workers.pool import EnvSession


class NextPrompt(NamedTuple):
    """The prompt after a turn."""

    prompt: Prompt
    fits: bool
    """Whether the context has room for a response."""
    asks_for_notes: bool = False


class Prompts:
    """Encodes the prompts of one episode, and reads its responses."""

    has_memory = True
    """Whether the memory chooses what prompts show."""

    def __init__(
        self,
        runtime: Runtime,
        spec: EpisodeSpec,
        session: EnvSession,
        encoder: DeltaEncoder,
        response_len: int | None,
    ) -> None:
        """`response_len`: most tokens of a response; None for `--rollout-max-response-len`."""
        self.runtime = runtime
        self.spec = spec
        self.session = session
        self.encoder = encoder
        self.conversation = Conversation(runtime.memory)
        self._response_len = response_len
        self._stop_ids: set[int] = set()
        """The tokens that ended responses."""

    @property
    def reply(self) -> EnvReply:
        """The environment's last one."""
        assert self.session.reply is not None
        return self.session.reply

    @property
    def is_comparable(self) -> bool:
        """Whether the last prompt can be compared with its one-shot encoding."""
        return self.runtime.settings.tokenization_sanity_check != "disable"

    def first(self) -> Prompt:
        """Encode the first prompt; raises EncodingError, and ConfigError if it does not fit."""
        prompt = self._build(None)
        runtime = self.runtime
        settings = runtime.settings if self.has_memory else None
        runtime.flags.check_first_prompt(
            self.spec.name, len(prompt.token_ids), settings, self._response_len
        )
        if self.is_comparable:
            self.encoder.check(self.conversation.messages, prompt.token_ids)
        return prompt

    async def after(self, turn: Turn, may_write_notes: bool) -> NextPrompt:
        """Encode the prompt after a turn, or the one that asks for notes if they are due; raises
        EncodingError."""
        prompt = await self._encode(turn)
        flags = self.runtime.flags
        if may_write_notes and self._are_notes_due(turn.prompt, prompt):
            asking = await self._encode(turn, notes=True)
            if flags.fits(len(asking.token_ids), self.conversation.notes_tokens):
                return NextPrompt(asking, fits=True, asks_for_notes=True)
            self._count_not_asked(asking)
            prompt = await self._encode(turn)
        return NextPrompt(prompt, flags.fits(len(prompt.token_ids), self._response_len))

    def _are_notes_due(self, before: Prompt, prompt: Prompt) -> bool:
        flags = self.runtime.flags
        most = self.conversation.notes_tokens
        if most is None:
            return False
        tokens = len(prompt.token_ids)
        after_next = tokens + max(tokens - len(before.token_ids), 0)  # after another turn as long
        asking = after_next + len(self.encoder.text.encode("\n\n" + SUMMARY_REQUEST.format(most)))
        can_wait = flags.fits(tokens, self._response_len) and flags.fits(asking, most)
        return self.conversation.wants_notes(tokens, can_wait, flags.left(tokens))

    def _count_not_asked(self, asking: Prompt) -> None:
        if self.session.replayed:
            return
        grows = self.runtime.settings.history == "full"
        lost = "the conversation stays as it is" if grows else "turns are forgotten without notes"
        sooner = "memory.free" if grows else "memory.budget, memory.every"
        self.runtime.count_fault(
            "notes_not_asked",
            self.spec.episode_id,
            f"the prompt that asks for notes has {len(asking.token_ids)} tokens and does not fit, "
            f"so {lost}: ask earlier ({sooner}), lower memory.max_tokens, or raise "
            "--rollout-max-context-len (and --rollout-max-prompt-len)",
        )

    async def _encode(self, turn: Turn, notes: bool = False) -> Prompt:
        shown = [
            self.reply.observation,
            *(exchange.observation for exchange in self.conversation.past),
        ]
        if len(self.reply.instruction_prompt) > MAX_CACHED_CHARS or any(map(_takes_long, shown)):
            # Building the prompt here would stall the event loop.
            return await asyncio.to_thread(self._build, turn, notes)
        return self._build(turn, notes)

    def _build(self, turn: Turn | None, notes: bool = False) -> Prompt:
        """The prompt after a turn, None for the first one; with `notes`, it asks for notes."""
        new = self.conversation.show(self.reply, notes=notes)
        if turn is None or not self.conversation.appends:
            return self.encoder.prompt(new)
        return self.encoder.append(
            turn.prompt, turn.generation.token_ids, new, turn.generation.stop_id
        )

    def read(self, generation: Generation) -> Reading:
        """The response as the environment reads it."""
        return self.encoder.read(generation.token_ids, generation.stop_id)

    def answered(
        self, shown: Observation, prompt: Prompt, generation: Generation, info: StepInfo
    ) -> None:
        """Add the response to `prompt` to the conversation; the environment showed `shown` before
        it."""
        encoder = self.encoder
        ended = self._note_end(generation)
        told = encoder.past_answer(
            encoder.answer_text(generation.token_ids, generation.stop_id), cut=ended is None
        )
        if encoder.profile.channels and self.runtime.settings.history == "window":
            told = self.read(generation).text
        self.conversation.answered(shown, told, info["valid_action"], info["executed_action"])

    def noted(self, prompt: Prompt, generation: Generation) -> dict[str, float]:
        """Give the conversation the notes that `prompt` asked for, and return their measures."""
        self._note_end(generation)
        text = after_reasoning(self.read(generation).text)
        self.conversation.noted(text)
        ends = self.encoder.end_of_turn_ids
        control = self.encoder.text.control_ids
        return (
            measure_notes(generation, text, prompt, ends, control) | self.conversation.facts_kept()
        )

    def _note_end(self, generation: Generation) -> int | None:
        """Return the token that ended the response, if one did."""
        ended = self.encoder.end_of(generation.token_ids, generation.stop_id)
        if ended is not None:
            self._stop_ids.add(ended)
        return ended

    async def check_last(self, prompt: Prompt, last_answer: Sequence[int]) -> None:
        """Compare the last prompt with its one-shot encoding; a difference is counted and does not
        stop the run.

        `last_answer`: the last response, which no prompt shows if the episode ended with it.
        """
        if not self.is_comparable:
            return
        messages = self.conversation.messages
        ids = [*prompt.token_ids, *(last_answer if messages[-1]["role"] == "assistant" else ())]
        try:
            await asyncio.to_thread(self.encoder.check, messages, ids, self._stop_ids)
        except EncodingError as error:
            self.runtime.count_fault("sanity_check_failed", self.spec.episode_id, error)


def _takes_long(observation: Observation) -> bool:
    """Whether encoding the observation takes more than a millisecond."""
    parts = observation["text"]
    texts = (observation["obs_str"], parts["long_term_context"], parts["short_term_context"])
    return bool(observation.get("multi_modal_data")) or max(map(len, texts)) > LONG_CHARS
