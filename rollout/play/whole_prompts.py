"""Prompts of environments that write the whole prompt themselves, such as agents."""

import asyncio
from collections.abc import Sequence
from typing import Any

from envs.base import Observation, StepInfo
from rollout.errors import EncodingError
from rollout.play.memory import Message
from rollout.play.prompts import Prompts
from rollout.turn import Generation, Prompt, Turn


class WholePrompts(Prompts):
    """Encodes what the environment wrote, with the tools that it names; memory and notes do not
    apply."""

    has_memory = False

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._turns: list[tuple[Prompt, Generation]] = []
        """The turns so far."""

    @property
    def is_comparable(self) -> bool:
        """Not if the prompt ends with a response: a template renders that as a finished
        conversation."""
        return super().is_comparable and self.conversation.messages[-1]["role"] != "assistant"

    async def _encode(self, turn: Turn, notes: bool = False) -> Prompt:
        return await asyncio.to_thread(self._build, turn)

    def _build(self, turn: Turn | None, notes: bool = False) -> Prompt:
        messages = self.conversation.show(self.reply)
        self.encoder = self.runtime.encoder_for(self.reply.tools)
        if self.reply.continues is None:
            return self.encoder.prompt(messages)
        number, first = self.reply.continues
        prompt, generation = self._turns[number]
        return self._continued(prompt, generation, messages, first)

    def _continued(
        self, prompt: Prompt, generation: Generation, messages: Sequence[Message], first: int
    ) -> Prompt:
        """Encode a prompt that continues a turn, with that turn's own tokens unless the template
        disagrees.

        `first` is the number of the first message after the turn's response.
        """
        try:
            found = self.encoder.append(
                prompt, generation.token_ids, messages[first:], generation.stop_id
            )
            self.encoder.check(messages, found.token_ids, self._stop_ids)
            return found
        except EncodingError as error:
            found = self.encoder.prompt(messages)
            kept = [*prompt.token_ids, *generation.token_ids]
            if found.token_ids[: len(kept)] != kept:
                words = "the chat template does not write a response as the model did, so its prompts cannot share "
                words += f"training samples (see rollout/turns_per_sample): {error}"
                self.runtime.count_fault("responses_rewritten", self.spec.episode_id, words)
            return found

    def answered(
        self, shown: Observation, prompt: Prompt, generation: Generation, info: StepInfo
    ) -> None:
        """Keep the turn, which a later prompt may continue."""
        super().answered(shown, prompt, generation, info)
        self._turns.append((prompt, generation))
